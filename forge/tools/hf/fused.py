"""Names and layouts of tensors specific to Qwen3-Next and gpt-oss.

Qwen3-Next fuses several of forge's tensors into one. The projection to queries and gates has, for each head, the rows of
the query and then the rows of the gate. Linear attention has two fused projections. The first has, for each key head, the
rows of query, key, values and output gates. The second has, for each key head, the rows for write strength (beta) and
decay.

gpt-oss has one tensor per projection for all experts, with the input dim before the output dim, and with alternating rows
of gate and up.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from forge.config.model import ModelConfig


class Rows(NamedTuple):
    """Rows of a fused tensor. Divide all rows into `groups` equal blocks, and take rows `start` to `stop` - 1 of each."""

    groups: int
    start: int
    stop: int

    def of(self, theirs: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Return a copy of these rows of `theirs`, a tensor of transformers, reshaped to `shape`."""
        return theirs.unflatten(0, (self.groups, -1))[:, self.start : self.stop].reshape(shape).contiguous()


class HFPlace(NamedTuple):
    """The place of one of forge's tensors in a tensor of transformers.

    theirs, shape: name (below `model.layers.N`) and shape of transformers' tensor.
    rows: the rows of transformers' tensor that hold forge's tensor; None: all rows.
    paired: transformers alternates rows of gate and up; forge stores all rows of gate first.
    transposed: transformers stores the input dim before the output dim.
    """

    theirs: str
    shape: tuple[int, ...]
    rows: Rows | None = None
    paired: bool = False
    transposed: bool = False


def gpt_oss_places(model: ModelConfig, layer: int) -> dict[str, HFPlace]:
    """Return a dict from the name of forge's tensor (below `layers.N`) to the tensor's place in gpt-oss, for one layer.

    Tensors with the usual name and layout of transformers are left out.
    """
    found = {"attention.sinks.weight": HFPlace("self_attn.sinks", (model.n_heads,))}
    if not model.has_experts(layer) or model.moe is None:
        return found
    number, dim, hidden, experts = model.moe.n_experts, model.dim, model.moe.expert_dim, "mlp.experts"
    return found | {
        "feed_forward.router.weight": HFPlace("mlp.router.weight", (number, dim)),
        "feed_forward.router.logit_bias": HFPlace("mlp.router.bias", (number,)),
        "feed_forward.experts.w13": HFPlace(
            f"{experts}.gate_up_proj", (number, dim, 2 * hidden), paired=True, transposed=True
        ),
        "feed_forward.experts.w13_bias": HFPlace(
            f"{experts}.gate_up_proj_bias", (number, 2 * hidden), paired=True
        ),
        "feed_forward.experts.w2": HFPlace(f"{experts}.down_proj", (number, hidden, dim), transposed=True),
        "feed_forward.experts.w2_bias": HFPlace(f"{experts}.down_proj_bias", (number, dim)),
    }


def qwen3_next_places(model: ModelConfig, layer: int) -> dict[str, HFPlace]:
    """Return a dict from the name of forge's tensor (below `layers.N`) to the tensor's place in Qwen3-Next, for one layer.

    Tensors with the usual name and layout of transformers are left out.
    """
    linear = model.linear_attention
    if model.kind_of(layer) != "linear" or linear is None:
        if model.attention_gate != "element":
            return {}
        shape = 2 * model.n_heads * model.head_dim, model.dim
        rows = _stacked(model.n_heads, wq=model.head_dim, wg=model.head_dim)
        return {
            f"attention.{name}.weight": HFPlace("self_attn.q_proj.weight", shape, rows[name]) for name in rows
        }
    heads, ratio = linear.n_key_heads, linear.n_value_heads // linear.n_key_heads
    key, value = linear.key_head_dim, ratio * linear.value_head_dim
    found = {
        "attention.decay.a_log": HFPlace("linear_attn.A_log", (linear.n_value_heads,)),
        "attention.decay.dt_bias": HFPlace("linear_attn.dt_bias", (linear.n_value_heads,)),
        "attention.out_norm.weight": HFPlace("linear_attn.norm.weight", (linear.value_head_dim,)),
        "attention.wo.weight": HFPlace("linear_attn.out_proj.weight", (model.dim, heads * value)),
    }
    fused = {
        "linear_attn.in_proj_qkvz.weight": _stacked(heads, wq=key, wk=key, wv=value, wg=value),
        "linear_attn.in_proj_ba.weight": _stacked(heads, wb=ratio, wa=ratio),
    }
    for theirs, rows in fused.items():
        shape = heads * max(part.stop for part in rows.values()), model.dim
        found |= {f"attention.{name}.weight": HFPlace(theirs, shape, part) for name, part in rows.items()}
    channels = _stacked(1, q=heads * key, k=heads * key, v=heads * value)
    whole = channels["v"].stop, 1, linear.conv_size
    conv = "linear_attn.conv1d.weight"
    return found | {f"attention.conv.{name}": HFPlace(conv, whole, part) for name, part in channels.items()}


def join(parts: list[Tensor], rows: list[Rows], shape: tuple[int, ...]) -> Tensor:
    """Fuse forge's tensors `parts` into one tensor of transformers, of shape `shape`. Part i fills the rows `rows[i]`.

    The rows left at the end of each group are zeros.
    """
    runs = [
        part.reshape(place.groups, place.stop - place.start, -1)
        for part, place in zip(parts, rows, strict=True)
    ]
    joined = torch.cat(runs, dim=1)
    missing = shape[0] // rows[0].groups - joined.shape[1]
    return F.pad(joined, (0, 0, 0, missing)).reshape(shape)


def _stacked(groups: int, **sizes: int) -> dict[str, Rows]:
    found, start = {}, 0
    for name, size in sizes.items():
        found[name] = Rows(groups, start, start + size)
        start += size
    return found
