"""Attention as it runs on a card, for plans that are made on a CPU.

On a card attention runs in kernels, PyTorch's own or flex_attention, that keep queries, keys, values, the output and its
logsumexp, and compute only the scores that the mask allows. A CPU has no such kernels. `attend` stands for all of them: an
operator without values that carries the number of scores. Tables of blocks, which are small, are left out; documents,
whose lengths a plan does not know, count as one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from forge.model import AttentionMask, sdpa
from forge.model.flops import mean_keys
from forge.model.sdpa import SdpaAttention
from forge.parallel import blocks
from forge.parallel.context import gathered, ring
from forge.parallel.context.gathered import AllGatherAttention
from forge.parallel.context.ring import RingAttention


@contextmanager
def as_on_cards() -> Iterator[None]:
    """In the body attention needs the memory and the operations that it needs on a card."""
    kept = blocks.kept_operators() | {torch.ops.forge.planned_attention.default}
    with ExitStack() as stack:
        for place, name, stand_in in (
            (blocks, "kept_operators", lambda: kept),
            (sdpa, "dense_table", lambda window, _, seq, device: round(seq * mean_keys(seq, window))),
            (SdpaAttention, "__call__", _with_sinks),
            (gathered, "dense_part", _visible_scores),
            (AllGatherAttention, "prepare", _on_values(AllGatherAttention.prepare)),
            (ring, "block_part", _visible_scores),
            (ring, "flex_with_lse", attend),
            (ring, "kernel_for", lambda _: ring.FlexKernel()),
            (RingAttention, "prepare", _on_values(RingAttention.prepare)),
        ):
            stack.enter_context(patch.object(place, name, stand_in))
        yield


def _with_sinks(
    self: SdpaAttention, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, sinks: Tensor | None = None
) -> Tensor:
    """In place of `SdpaAttention`; the table is the number of scores, None: causal."""
    seq = q.shape[2]
    out, lse = attend(q, k, v, seq * (seq + 1) // 2 if mask.table is None else mask.table)
    return out if sinks is None else out * torch.sigmoid(lse - sinks[:, None]).unsqueeze(-1).to(out.dtype)


def _on_values(prepare: Callable[..., AttentionMask]) -> Callable[..., AttentionMask]:
    """Return `prepare` that computes positions with numbers: what it returns depends on them, and on no data."""

    def prepared(self: Any, mask: AttentionMask, x: Tensor) -> AttentionMask:
        with _disable_current_modes():
            return prepare(self, mask, x)

    return prepared


def _visible_scores(window: int, _documents: Any, queries: Tensor, keys: Tensor) -> int:
    """In place of a table: for how many pairs the mask allows a score. queries, keys: positions; keys one after another."""
    first = (queries - window + 1 if window else torch.zeros_like(queries)).clamp(min=int(keys[0]))
    last = queries.clamp(max=int(keys[-1]))
    return int((last - first + 1).clamp(min=0).sum())


def attend(
    q: Tensor, k: Tensor, v: Tensor, scores: int | None = None, _soft_cap: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Return tensors in the place of attention's output `[batch, heads, rows, v_dim]` and its logsumexp, as flex_with_lse.

    scores: of each head, how many the mask allows; None: all.
    """
    out, lse = planned_attention(q, k, v, q.shape[2] * k.shape[2] if scores is None else scores)
    return out, lse


@torch.library.custom_op("forge::planned_attention", mutates_args=())
def planned_attention(q: Tensor, k: Tensor, v: Tensor, scores: int) -> tuple[Tensor, Tensor]:
    """Attention that computes `scores` scores for each head; of fake tensors."""
    raise NotImplementedError("a plan has no values")


@torch.library.custom_op("forge::planned_attention_backward", mutates_args=())
def planned_attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, scores: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Its gradients of q, k and v."""
    raise NotImplementedError("a plan has no values")


@planned_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, scores: int) -> tuple[Tensor, Tensor]:
    return _by_token(q, v.shape[-1]), q.new_empty(q.shape[:-1], dtype=torch.float32)


@planned_attention_backward.register_fake
def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, scores: int) -> tuple[Tensor, Tensor, Tensor]:
    return _by_token(q, q.shape[-1]), _by_token(k, k.shape[-1]), _by_token(v, v.shape[-1])


def _by_token(x: Tensor, width: int) -> Tensor:
    """A tensor `[batch, heads, seq, width]` that lies in memory as kernels leave it, token by token."""
    batch, heads, seq, _ = x.shape
    return x.new_empty((batch, seq, heads, width)).transpose(1, 2)


def _keep(ctx: Any, inputs: Any, output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.scores = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, *output)


def _backward(ctx: Any, grad: Tensor, _of_lse: Tensor | None) -> tuple[Tensor, Tensor, Tensor, None]:
    return (*planned_attention_backward(grad, *ctx.saved_tensors[:3], ctx.scores), None)


planned_attention.register_autograd(_backward, setup_context=_keep)
