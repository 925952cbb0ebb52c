"""`make_plan`: memory, traffic and time of each pipeline stage of a run, from fake ranks."""

from __future__ import annotations

from dataclasses import dataclass, field

from forge.config import Config, Degrees, check_world
from forge.parallel.pipeline import plan_pipeline
from forge.parallel.pipeline.schedule import TimedAction, idle_share
from forge.runtime.errors import UserError
from forge.tools.plan.estimate import PACES, StepTime
from forge.tools.plan.float8 import float8_notes
from forge.tools.plan.hardware import Hardware
from forge.tools.plan.layers import plan_stages
from forge.tools.plan.plannable import plannable
from forge.tools.plan.speed import Speed, speed_of
from forge.tools.plan.stage import StagePlan

# Load of a rank's experts in `crowded_bytes`, as a multiple of an equal share.
CROWDED = 2.0


@dataclass(frozen=True)
class Plan:
    """The plan of a configuration. stages: one per rank of the pp axis. hardware, speed: None for unknown hardware."""

    config: Config
    degrees: Degrees
    stages: list[StagePlan]
    hardware: Hardware | None = None
    warnings: list[str] = field(default_factory=list)
    speed: Speed | None = None

    @property
    def timeline(self) -> list[list[TimedAction]] | None:
        """The timed actions of each pipeline rank; None without a pipeline.

        Times are in seconds. If the hardware is unknown, the unit is the duration of one forward.
        """
        if self.speed is not None:
            return self.speed.timeline
        if self.degrees.pp == 1:
            return None
        return plan_pipeline(self.config, self.degrees).schedule.timeline

    @property
    def bubble(self) -> float:
        return 0.0 if self.timeline is None else idle_share(self.timeline)

    @property
    def worst(self) -> StagePlan:
        """The stage that needs the most memory."""
        return max(self.stages, key=lambda stage: stage.needed)

    @property
    def nodes(self) -> int:
        """The number of nodes; 1 for unknown hardware."""
        return 1 if self.hardware is None else -(-self.degrees.world // self.hardware.cards_per_node)

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory on the fullest node. For unknown hardware, all ranks are on one node."""
        world = self.degrees.world
        size = world if self.hardware is None else self.hardware.cards_per_node
        of_stages = [
            stage.offloaded + stage.state_on_host + stage.host + local_states(self, stage)
            for stage in self.stages
        ]
        of_ranks = [of_stages[rank * len(of_stages) // world] for rank in range(world)]
        return max(sum(of_ranks[first : first + size]) for first in range(0, world, size))

    @property
    def fits_gpus(self) -> bool | None:
        """Whether every stage fits the GPU's memory; None if the hardware is unknown."""
        return None if self.hardware is None else self.worst.needed <= self.hardware.memory_bytes

    @property
    def fits_hosts(self) -> bool | None:
        """Whether the host memory of every node is enough; None if the size of host memory is unknown."""
        if self.hardware is None or not self.hardware.host_memory_gib:
            return None
        return self.host_bytes <= self.hardware.host_memory_bytes

    @property
    def fits(self) -> bool | None:
        """Whether the plan fits the memory of GPUs and hosts; None if the hardware is unknown."""
        return self.fits_gpus and self.fits_hosts is not False


def local_states(plan: Plan, stage: StagePlan) -> int:
    """Return the bytes of host memory that checkpoint.local_interval needs on one rank; 0 if this key is 0.

    A rank holds three copies of its state (two complete and one being written), three of each peer's state, and a buffer.
    With checkpoint.local_dir only the buffer is in memory.
    """
    kept = plan.config.checkpoint
    if not kept.local_interval:
        return 0
    peers = kept.peers if plan.hardware is None else min(kept.peers, plan.nodes - 1)
    return stage.host * (1 if kept.local_dir else 3 * (1 + peers) + 1)


def smallest_world(config: Config) -> Degrees:
    """Return the degrees for the smallest number of processes with which `config` can run.

    If `config` refuses every number, raises the UserError for the smallest number.
    """
    parallel = config.parallel
    unit = parallel.pp * parallel.dp_replicate * parallel.cp * parallel.tp
    sizes = [unit * parallel.dp_shard] if parallel.dp_shard > 0 else range(unit, 1025 * unit, unit)
    first: UserError | None = None
    for world in sizes:
        try:
            return check_world(config, world)
        except UserError as error:
            first = first or error
    assert first is not None
    raise first


def make_plan(config: Config, degrees: Degrees, hardware: Hardware | None = None) -> Plan:
    """Return the plan of `config`. Raises UserError if `config` cannot be planned, e.g. if the model reads tensor values."""
    _, warnings = plannable(config)
    if hardware is not None:
        degrees = degrees.on_nodes(config, hardware.cards_per_node)
    stages = plan_stages(config, degrees, hardware)
    speed = None
    if hardware is not None:
        speed = speed_of(
            config, degrees, [stage.times or (StepTime(),) * len(PACES) for stage in stages], hardware
        )
    return Plan(config, degrees, stages, hardware, [*warnings, *float8_notes(config, hardware)], speed)


def crowded_bytes(config: Config, degrees: Degrees, hardware: Hardware | None = None) -> int | None:
    """Return the bytes needed by the fullest rank if its experts receive CROWDED times an equal share of the tokens.

    Return None without expert parallelism: each rank then has all experts, so its load is constant.
    """
    if degrees.ep == 1:
        return None
    if hardware is not None:
        degrees = degrees.on_nodes(config, hardware.cards_per_node)
    stages = plan_stages(config, degrees, hardware, load=CROWDED)
    return max(stage.needed for stage in stages)
