"""Find overrides of configuration keys with which a plan fits the GPU memory.

The candidates come from `usable_changes`, as in the advice after an out-of-memory error. A new plan measures the effect of
each candidate.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from forge.config import check_world
from forge.config.keys import to_literal
from forge.run.out_of_memory import usable_changes
from forge.tools.plan.layouts import Changes
from forge.tools.plan.plan import Plan, make_plan

# Keys excluded from a remedy, because they change the training samples or the number of processes.
NOT_THE_SAME_RUN = ("train.seq_len", "parallel.dp_shard")
# Largest number of overrides in a remedy.
MOST = 5


@dataclass(frozen=True)
class Remedy:
    """Overrides that free memory. needed: bytes on the fullest rank after all overrides are applied."""

    overrides: list[str]
    needed: int


def remedy_for(made: Plan, allowed: Callable[[Changes], bool] = lambda changes: True) -> Remedy | None:
    """Add overrides to the plan `made`, one after another, until the plan fits the GPUs. Return at most MOST overrides.

    Each override frees memory in addition to the earlier ones. All of them together may still not suffice: compare
    `Remedy.needed` with the GPU's memory. Return None if no override frees memory. allowed: a further condition on all
    changes together, e.g. that no phase overrides them.
    """
    overrides: list[str] = []
    changes: Changes = {}
    best = made
    tried: set[str] = set()
    while len(overrides) < MOST and not best.fits_gpus:
        found = _next(best, tried, changes, allowed)
        if found is None:
            break
        override, more, best = found
        changes |= more
        overrides.append(override)
    return Remedy(overrides, best.worst.needed) if overrides else None


def _next(
    made: Plan, tried: set[str], before: Changes, allowed: Callable[[Changes], bool]
) -> tuple[str, Changes, Plan] | None:
    """Plan untried overrides in turn. Return the first that frees memory, as text and as changes, and its plan.

    None if none does. before: changes already in the plan. Adds every planned override to `tried`.
    """
    state = sum(made.worst.state.values())
    on_gpu = made.hardware is not None and bool(made.hardware.card)
    dominates = 2 * state > made.worst.peak.size
    for (key, value, _), config in usable_changes(made.config, made.degrees, dominates, on_gpu):
        override, changes = f"--{key}={to_literal(value)}", {key: value}
        if key == "parallel.dp_replicate" and made.config.parallel.dp_shard != -1:
            override += " --parallel.dp_shard=-1"
            changes["parallel.dp_shard"] = -1
        if key in NOT_THE_SAME_RUN or override in tried:
            continue
        tried.add(override)
        if not allowed(before | changes):
            continue
        plan = make_plan(config, check_world(config, made.degrees.world), made.hardware)
        fills_hosts = plan.fits_hosts is False and made.fits_hosts is not False
        if plan.worst.needed < made.worst.needed and not fills_hosts:
            return override, changes, plan
    return None
