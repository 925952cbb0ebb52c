"""Load balance of the experts, as fields of a metrics line and as an image."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forge.config.model import MoEConfig

CELL = 12  # pixels
_LESS, _EVEN, _MORE = np.array([[33, 102, 172], [247, 247, 247], [178, 24, 43]], dtype=float)


def load_fields(
    values: Sequence[float], layers: Sequence[int], moe: MoEConfig, counts: bool = False
) -> dict[str, Any]:
    """Return the fields of one step from the rows of a RouterReport (forge/parallel/step/routers.py).

    Fields for all layers together:

    - expert_load_max, expert_load_min: load of the most and least used expert of any layer, relative to an even share.
    - aux_loss, router_z_loss, if on: sums over layers, without coefficients.
    - expert_dropped: fraction of choices dropped.

    Fields for each layer, in `routers`: load_max, load_min, bias_min, bias_max, and load_entropy (1: even, 0: one expert
    gets all tokens). With `counts`, also `counts`: the number of tokens of each expert.
    """
    rows = np.asarray(values).reshape(len(layers), -1)
    n_experts = moe.n_experts
    chosen, (aux_loss, z_loss, dropped, bias_min, bias_max) = rows[:, :n_experts], rows[:, n_experts:].T
    total = np.maximum(chosen.sum(1, keepdims=True), 1.0)
    load, share = chosen * n_experts / total, chosen / total
    entropy = -(share * np.log(np.where(share > 0, share, 1.0))).sum(1) / np.log(max(n_experts, 2))
    by_layer = {
        "load_max": load.max(1),
        "load_min": load.min(1),
        "load_entropy": entropy if n_experts > 1 else np.ones_like(entropy),
        "bias_min": bias_min,
        "bias_max": bias_max,
    }
    fields: dict[str, Any] = {"expert_load_max": float(load.max()), "expert_load_min": float(load.min())}
    if moe.balance in ("aux_loss", "sequence_aux_loss"):
        fields["aux_loss"] = float(aux_loss.sum())
    if moe.z_loss_coef:
        fields["router_z_loss"] = float(z_loss.sum())
    fields["expert_dropped"] = float(dropped.sum() / max(chosen.sum(), 1.0))
    fields["routers"] = {
        str(layer): {name: float(of_layers[row]) for name, of_layers in by_layer.items()}
        for row, layer in enumerate(layers)
    }
    if counts:
        for of_layer, row in zip(fields["routers"].values(), chosen, strict=True):
            of_layer["counts"] = row.round().astype(int).tolist()
    return fields


def expert_map(counts: Sequence[Sequence[float]]) -> NDArray[np.uint8]:
    """Draw counts `[layers, experts]` as pixels, uint8 `[layers * CELL, experts * CELL, 3]`, with layer 0 on top."""
    return colors(counts).repeat(CELL, 0).repeat(CELL, 1)


def colors(counts: Sequence[Sequence[float]]) -> NDArray[np.uint8]:
    """Return the colours of counts `[layers, experts]` as red, green and blue: uint8 `[layers, experts, 3]`.

    White: an even share; blue: less; red: more. Colours saturate at a quarter of the even share and at four times the
    even share.
    """
    load = np.asarray(counts, dtype=float)
    load = load / np.maximum(load.mean(axis=1, keepdims=True), 1e-9)
    doublings = np.clip(np.log2(np.maximum(load, 1e-9)), -2.0, 2.0)[..., None] / 2
    mixed = _EVEN + np.where(doublings < 0, (_LESS - _EVEN) * -doublings, (_MORE - _EVEN) * doublings)
    return mixed.round().astype(np.uint8)
