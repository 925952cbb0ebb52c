"""The nodes of a run: equal configurations, ranks per node, nodes lost and joined, and the cost of each recovery."""

from __future__ import annotations

import os
import socket
from datetime import UTC, datetime
from typing import Any

from forge.config import Config
from forge.config.keys import redacted_values, to_literal
from forge.hook import Hook, StepResult
from forge.observe.json_lines import read_lines
from forge.observe.report import Reporter
from forge.resilience.elastic import is_elastic
from forge.runtime.causes import Cause
from forge.runtime.distributed import find_difference, gather_from_ranks
from forge.runtime.errors import UserError
from forge.runtime.world import World


def ranks_per_node(world: World) -> int:
    """Return the number of ranks per node; 0 if unknown or not equal on all nodes. Collective."""
    sizes = set(gather_from_ranks("counting the ranks of each node", lambda: world.local_size))
    return sizes.pop() if len(sizes) == 1 else 0


def report_nodes(reporter: Reporter) -> None:
    """In an elastic run, report the nodes of this start, and nodes lost or joined since the previous start. Collective."""
    if not is_elastic():
        return
    name = f"{socket.gethostname()}/{os.getppid()}"
    names = list(dict.fromkeys(gather_from_ranks("naming nodes", lambda: name)))
    if reporter.world.rank != 0:
        return
    past = read_lines(reporter.directory.events, "joined")
    before = past[-1]["nodes"] if past else names
    lost = [one for one in before if one not in names]
    joined = [one for one in names if one not in before]
    # Nodes and differences are in one event line, because the next start compares its nodes with this line.
    kind = Cause.NODES_CHANGED if lost or joined else "nodes"
    reporter.event(kind, nodes=names, lost=lost, joined=joined)


# Keys that may differ between nodes. The same data may have another path on each node.
_OF_NODES = (
    "data.cache_dir",
    "data.cache_gib",
    "data.tokenizer",
    "evaluate.tasks_path",
    "checkpoint.local_dir",
    "run.output_dir",
)


def refuse_other_config(config: Config) -> None:
    """Raise UserError if a rank has another configuration than rank 0, apart from _OF_NODES and paths. Collective."""
    values = redacted_values(config)
    for key in ("data.sources", "data.validation"):
        values[key] = [{name: one[name] for name in one if name != "path"} for one in values[key]]
    # Only keys that are set: a section may be absent on a rank.
    values = {key: value for key, value in values.items() if value is not None and key not in _OF_NODES}
    if other := find_difference("comparing the configurations", values):
        raise UserError(
            f"{other.key} is {_shown(other.first)} on rank 0 and {_shown(other.other)} on rank {other.rank}; start "
            "all ranks with the same configuration and options"
        )


def _shown(value: Any) -> str:
    return "not set" if value is None else to_literal(value)


class Recovery(Hook):
    """Reports downtime and repeated steps of a restart, after its first step."""

    def __init__(self, reporter: Reporter):
        self._reporter, self._before = reporter, reporter.before
        self._resumed = 0

    def before_run(self, step: int) -> None:
        self._resumed = step

    def after_result(self, result: StepResult) -> None:
        before, self._before = self._before, {}
        if before.get("state") in ("running", "failed", "stopped"):
            self._reporter.event("recovered", step=result.step, **_cost(before, self._resumed))


def _cost(before: dict[str, Any], resumed: int) -> dict[str, Any]:
    """Return the seconds since the previous start last wrote its status, and the number of steps to repeat.

    before: the previous start's status. resumed: the checkpoint's step. Both results are None if `before` is incomplete.
    """
    try:
        stood_s = (datetime.now(UTC) - datetime.fromisoformat(before["time"])).total_seconds()
        return {"seconds": round(stood_s, 3), "steps_lost": max(0, int(before["step"]) - resumed)}
    except (KeyError, TypeError, ValueError):
        return {"seconds": None, "steps_lost": None}
