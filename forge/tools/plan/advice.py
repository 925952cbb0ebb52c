"""Find keys that free enough memory. The candidates are the keys that an out-of-memory message names; each is planned."""

from __future__ import annotations

from dataclasses import dataclass

from forge.config import check_world
from forge.config.keys import to_literal
from forge.run.out_of_memory import usable_changes
from forge.tools.plan.plan import Plan, make_plan

# These train on other samples, or need another number of processes.
NOT_THE_SAME_RUN = ("train.seq_len", "parallel.dp_shard")
# At most this many keys, set one after another.
MOST = 5


@dataclass(frozen=True)
class Remedy:
    """Overrides that free memory, and the bytes that the rank with the largest need still needs with all of them."""

    overrides: list[str]
    needed: int


def remedy_for(made: Plan) -> Remedy | None:
    """Return at most MOST overrides that together free memory, if possible so much that the plan `made` fits.

    None if no override frees memory.
    """
    overrides: list[str] = []
    best = made
    tried: set[str] = set()
    while len(overrides) < MOST and not best.fits:
        found = _next(best, tried)
        if found is None:
            break
        override, best = found
        overrides.append(override)
    return Remedy(overrides, best.worst.needed) if overrides else None


def _next(made: Plan, tried: set[str]) -> tuple[str, Plan] | None:
    """Return the first override that frees memory, with its plan. Add every planned override to `tried`."""
    state = sum(made.worst.state.values())
    on_gpu = made.hardware is not None and bool(made.hardware.card)
    dominates = 2 * state > made.worst.peak.size
    for (key, value, _), config in usable_changes(made.config, made.degrees, dominates, on_gpu):
        override = f"--{key}={to_literal(value)}"
        if key == "parallel.dp_replicate" and made.config.parallel.dp_shard != -1:
            override += " --parallel.dp_shard=-1"
        if key in NOT_THE_SAME_RUN or override in tried:
            continue
        tried.add(override)
        plan = make_plan(config, check_world(config, made.degrees.world), made.hardware)
        if plan.worst.needed < made.worst.needed:
            return override, plan
    return None
