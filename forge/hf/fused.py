"""Tensors of transformers that hold several of forge's, row by row: Qwen3-Next's gates and its linear layers.

A projection to queries and gates is, head by head, the rows of queries and then those of the gate. Linear layers have all
projections in two tensors: for each key head its rows of queries, keys, values and output gates, and for each key head
those of the strength and the decay.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from forge.config.model import ModelConfig

# The entry of Qwen3-Next in forge/hf/architectures.py.
QWEN3_NEXT: dict[str, Any] = dict(
    fixed={
        "qk_norm": True,
        "zero_centered_norms": True,
        "attention_gate": "element",
        "moe.shared_expert_gate": True,
    },
    keys={
        "moe.top_k": "num_experts_per_tok",
        "moe.expert_dim": "moe_intermediate_size",
        "linear_attention.n_key_heads": "linear_num_key_heads",
        "linear_attention.n_value_heads": "linear_num_value_heads",
        "linear_attention.key_head_dim": "linear_key_head_dim",
        "linear_attention.value_head_dim": "linear_value_head_dim",
        "linear_attention.conv_size": "linear_conv_kernel_dim",
        "moe.n_experts": "num_experts",
        "moe.normalize_top_k": "norm_topk_prob",
        "moe.aux_loss_coef": "router_aux_loss_coef",
        "moe.n_dense_layers": "mlp_only_layers",
    },
    defaults={
        "num_key_value_heads": 2,
        "head_dim": 256,
        "partial_rotary_factor": 0.25,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "norm_topk_prob": True,
    },
    layer={
        "feed_forward.shared_gate": "mlp.shared_expert_gate",
        "feed_forward.shared.w1": "mlp.shared_expert.gate_proj",
        "feed_forward.shared.w3": "mlp.shared_expert.up_proj",
        "feed_forward.shared.w2": "mlp.shared_expert.down_proj",
    },
    fused=True,
    partial_rope=True,
    ignored=("mtp.",),
)


class Rows(NamedTuple):
    """Of each of `groups` equal runs of rows of their tensor, those from `start` to `stop`."""

    groups: int
    start: int
    stop: int

    def of(self, theirs: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Take these rows of `theirs`: `[shape]`."""
        return theirs.unflatten(0, (self.groups, -1))[:, self.start : self.stop].reshape(shape).contiguous()


class Place(NamedTuple):
    """A tensor of theirs below `model.layers.N`, its shape, and the rows of it that are ours (None: all)."""

    theirs: str
    shape: tuple[int, ...]
    rows: Rows | None = None


def places(model: ModelConfig, layer: int) -> dict[str, Place]:
    """Return where the tensors of one layer lie in the classes that fuse them, by their name below `layers.N`.

    Those that lie where every class has them are left out.
    """
    linear = model.linear_attention
    if model.kind_of(layer) != "linear" or linear is None:
        if model.attention_gate != "element":
            return {}
        shape = 2 * model.n_heads * model.head_dim, model.dim
        rows = _stacked(model.n_heads, wq=model.head_dim, wg=model.head_dim)
        return {
            f"attention.{name}.weight": Place("self_attn.q_proj.weight", shape, rows[name]) for name in rows
        }
    heads, ratio = linear.n_key_heads, linear.n_value_heads // linear.n_key_heads
    key, value = linear.key_head_dim, ratio * linear.value_head_dim
    found = {
        "attention.decay.a_log": Place("linear_attn.A_log", (linear.n_value_heads,)),
        "attention.decay.dt_bias": Place("linear_attn.dt_bias", (linear.n_value_heads,)),
        "attention.out_norm.weight": Place("linear_attn.norm.weight", (linear.value_head_dim,)),
        "attention.wo.weight": Place("linear_attn.out_proj.weight", (model.dim, heads * value)),
    }
    fused = {
        "linear_attn.in_proj_qkvz.weight": _stacked(heads, wq=key, wk=key, wv=value, wg=value),
        "linear_attn.in_proj_ba.weight": _stacked(heads, wb=ratio, wa=ratio),
    }
    for theirs, rows in fused.items():
        shape = heads * max(part.stop for part in rows.values()), model.dim
        found |= {f"attention.{name}.weight": Place(theirs, shape, part) for name, part in rows.items()}
    channels = _stacked(1, q=heads * key, k=heads * key, v=heads * value)
    whole = channels["v"].stop, 1, linear.conv_size
    conv = "linear_attn.conv1d.weight"
    return found | {f"attention.conv.{name}": Place(conv, whole, part) for name, part in channels.items()}


def join(parts: list[Tensor], rows: list[Rows], shape: tuple[int, ...]) -> Tensor:
    """Return their tensor `[shape]` of all `parts` of it, ours, in the order of `rows`."""
    runs = [
        part.reshape(place.groups, place.stop - place.start, -1)
        for part, place in zip(parts, rows, strict=True)
    ]
    return torch.cat(runs, dim=1).reshape(shape)


def _stacked(groups: int, **sizes: int) -> dict[str, Rows]:
    found, start = {}, 0
    for name, size in sizes.items():
        found[name] = Rows(groups, start, start + size)
        start += size
    return found
