"""Verify one layout on the processes, devices and network of a real run.

The reference is one process, or a file of digests from one process.
"""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist

from forge.config import Config, check_world, to_toml
from forge.config.keys import read_toml
from forge.run.nodes import ranks_per_node
from forge.runtime.distributed import gather_from_ranks, on_every_rank, single_process_group
from forge.runtime.errors import UserError
from forge.runtime.world import World, join
from forge.tools.verify.compare import TOLERANCE, compare_rank, elements, merge
from forge.tools.verify.digests import Expected, compare_digests, held_by
from forge.tools.verify.layouts import AXES, Case
from forge.tools.verify.plain import record_plain
from forge.tools.verify.ranks import limit_s, run_ranks
from forge.tools.verify.record import Settings, record_on_rank
from forge.tools.verify.run import Outcome, drop_unsteady, outcome_of
from forge.tools.verify.shrink import changed, for_layout, shrink

# Sections of the configuration without influence on the result of a step. They may differ between digests and run.
_HOW = ("parallel", "pipeline", "activation_checkpoint")


def write_digests(config: Config, settings: Settings, world: int, file: Path) -> Config:
    """Shrink `config`, run it in one process and write the digests of its tensors to `file`. Return the shrunk configuration.

    world: number of processes that will call `verify_in_place` with this file. The shrunk sizes are multiples of the degrees.
    """
    small = for_layout(shrink(config)[0], check_world(config, world))
    text = to_toml(small)
    (reference,) = run_ranks(_digest_on_rank, 1, text, settings, timeout=limit_s(1))
    reference.write(file)
    return small


def verify_in_place(
    config: Config,
    settings: Settings,
    world: World,
    digests: Path | None = None,
    tolerance: float = TOLERANCE,
) -> tuple[Config, Outcome]:
    """Compare the layout of `config`, on the launcher's processes and devices, with one process. Collective.

    digests: a file of `write_digests`. None: each rank computes the reference on its device, because random numbers depend
    on the kind of device. Return the shrunk configuration and the result, on every rank.
    """
    began = time.monotonic()
    degrees = check_world(config, world.size)
    small = for_layout(shrink(config)[0], degrees)
    text = to_toml(small)
    if digests is None:
        # Hooks and some optimizers need a process group, even in one process.
        with single_process_group():
            reference = record_plain(text, settings, world.device)
            drop_unsteady(reference, text, settings, world.device)
    join(world)
    expected = None
    if digests is not None:
        expected = on_every_rank("reading digests", lambda: _read_digests(digests, small))
    # The dispatcher of the run depends on the nodes that its expert groups span.
    nodes = degrees.on_nodes(config, ranks_per_node(world) if degrees.ep > 1 else 0).ep_nodes
    if nodes > 1:
        text = to_toml(changed(small, {"parallel.ep_node_size": degrees.ep // nodes}))
    settings = replace(settings, draw_on_cpu=expected is not None)
    record = record_on_rank(world.rank, world.size, text, settings, world.device)
    if expected is not None:
        order, held = expected.order, held_by(record, expected)
        result = compare_digests(expected, gather_from_ranks("comparing", lambda: held), tolerance)
    else:
        order, mine = reference.order, compare_rank(reference, world.rank, record, tolerance)
        result = merge(gather_from_ranks("comparing", lambda: mine), elements(reference))
    dist.destroy_process_group()
    case = Case.of({axis: getattr(degrees, axis) for axis in AXES})
    return small, outcome_of(case, result, order, time.monotonic() - began)


def _digest_on_rank(_rank: int, _world: int, text: str, settings: Settings) -> Expected:
    logging.disable(logging.WARNING)
    reference = record_plain(text, settings)
    drop_unsteady(reference, text, settings)
    return Expected.of(text, reference)


def _read_digests(file: Path, small: Config) -> Expected:
    """Read digests from `file`. Raises UserError if their configuration differs from `small` in more than the layout."""
    expected = Expected.read(file)
    here, there = read_toml(to_toml(small)), read_toml(expected.text)
    for section in (key for key in here.keys() | there.keys() if key not in _HOW):
        mine, theirs = here.get(section, {}), there.get(section, {})
        if isinstance(mine, list) or isinstance(theirs, list):  # of phases
            mine, theirs = {"": mine}, {"": theirs}
        for key in sorted(mine.keys() | theirs.keys()):
            if mine.get(key) != theirs.get(key) and key != "micro_batch_size":
                name = f"{section}.{key}" if key else section
                raise UserError(
                    f"--digests {file}: was written for another configuration or number of processes: "
                    f"{name} is {theirs.get(key)} in the file and {mine.get(key)} in this run; write the file again "
                    "with the options of this run"
                )
    return expected
