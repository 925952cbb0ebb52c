"""How evenly the experts of a mixture are used, as fields of a metrics line."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

# What follows the counts of the experts in a row of forge/parallel/routers.py's report.
AFTER_COUNTS = ("aux_loss", "router_z_loss", "dropped", "bias_min", "bias_max")


def load_fields(
    rows: Sequence[Sequence[float]], layers: Sequence[int], losses: Collection[str], counts: bool = False
) -> dict[str, Any]:
    """Fields for one step, from a row `[n_experts + 5]` for each layer.

    Of the run: expert_load_max and expert_load_min (tokens of the most and least used expert of any layer, relative to an
    even share), aux_loss and router_z_loss if among `losses` (sums over layers, without coefficients), expert_dropped
    (share of all choices). `routers`: by layer, load_max, load_min, load_entropy (1: even, 0: one expert takes all),
    bias_min and bias_max; if `counts`, counts: how often each expert was chosen.
    """
    by_layer = [_of_layer(row) for row in rows]
    choices = sum(sum(row[: -len(AFTER_COUNTS)]) for row in rows)
    totals = {name: sum(layer.pop(name) for layer in by_layer) for name in AFTER_COUNTS[:3]}
    fields: dict[str, Any] = {
        "expert_load_max": max(layer["load_max"] for layer in by_layer),
        "expert_load_min": min(layer["load_min"] for layer in by_layer),
    }
    fields |= {name: totals[name] for name in AFTER_COUNTS[:2] if name in losses}
    fields["expert_dropped"] = totals["dropped"] / max(choices, 1.0)
    fields["routers"] = {str(layer): of_layer for layer, of_layer in zip(layers, by_layer, strict=True)}
    if counts:
        for of_layer, row in zip(by_layer, rows, strict=True):
            of_layer["counts"] = [round(count) for count in row[: -len(AFTER_COUNTS)]]
    return fields


def _of_layer(row: Sequence[float]) -> dict[str, Any]:
    counts = row[: -len(AFTER_COUNTS)]
    total, experts = max(sum(counts), 1.0), len(counts)
    entropy = -sum(count / total * math.log(count / total) for count in counts if count > 0)
    return {
        "load_max": max(counts) * experts / total,
        "load_min": min(counts) * experts / total,
        "load_entropy": entropy / math.log(experts) if experts > 1 else 1.0,
        **dict(zip(AFTER_COUNTS, row[-len(AFTER_COUNTS) :], strict=True)),
    }
