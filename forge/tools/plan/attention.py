"""Attention and RMS norms as they run on a GPU, for plans made on a CPU.

GPU attention runs in fused kernels: PyTorch's own, or flex_attention. A kernel keeps queries, keys, values, the output
and its logsumexp for backward. It computes only the scores inside the mask. A CPU has no such kernels, so `attend`
replaces each of them. `attend` takes the number of scores as an argument and returns fake tensors. The block tables of
flex_attention are small and not planned. Document lengths are unknown, so each sequence counts as one document.

On CUDA `F.rms_norm` is one kernel. It keeps its input, its weight and one float32 number per row for backward. On a CPU
it is several operators, which also keep float32 intermediate results.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import _disable_current_modes

from forge.model import AttentionMask
from forge.model.flops import mean_keys
from forge.model.norm import RMSNorm, zero_centered_norm
from forge.model.sdpa import SdpaAttention
from forge.parallel.context.gathered import AllGatherAttention
from forge.parallel.context.ring import FlexKernel, RingAttention
from forge.parallel.context.ulysses import UlyssesAttention


def on_gpu(attend: Any) -> Any:
    """Return an attention function for fake tensors, with the memory and FLOPs that `attend` has on a GPU.

    Linear attention and user-defined functions are returned unchanged.
    """
    if isinstance(attend, SdpaAttention):
        return PlannedAttention()
    if isinstance(attend, AllGatherAttention):
        return PlannedGathered(attend.split, PlannedAttention())
    if isinstance(attend, UlyssesAttention):
        return UlyssesAttention(attend.split, PlannedAttention())
    if isinstance(attend, RingAttention):
        return PlannedRing(attend.split, PlannedKernel())
    return attend  # linear attention and user-defined functions are traced as they are


class PlannedAttention(SdpaAttention):
    """Attention for plans. The mask's `table` is the number of visible scores per head; None: causal attention."""

    def prepare(self, mask: AttentionMask, x: Tensor) -> AttentionMask:
        seq = x.shape[1]
        return mask if mask.is_causal(seq) else mask.with_table(round(seq * mean_keys(seq, mask.window)))

    def prepare_part(self, mask: AttentionMask, queries: Tensor, keys: Tensor, x: Tensor) -> AttentionMask:
        return mask.with_table(visible_scores(mask.window, mask.documents, queries, keys))

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, sinks: Tensor | None = None
    ) -> Tensor:
        seq = q.shape[2]
        out, lse = attend(q, k, v, seq * (seq + 1) // 2 if mask.table is None else mask.table)
        return out if sinks is None else out * torch.sigmoid(lse - sinks[:, None]).unsqueeze(-1).to(out.dtype)


class PlannedGathered(AllGatherAttention):
    """All-gather attention for plans. `prepare` counts visible scores from real positions, not from fake tensors."""

    def prepare(self, mask: AttentionMask, x: Tensor) -> AttentionMask:
        with _disable_current_modes():  # counting visible scores needs the values of positions
            return super().prepare(mask, x)


class PlannedRing(RingAttention):
    """Ring attention for plans. `prepare` counts visible scores from real positions, not from fake tensors."""

    def prepare(self, mask: AttentionMask, x: Tensor) -> AttentionMask:
        with _disable_current_modes():
            return super().prepare(mask, x)


def visible_scores(window: int, _documents: Any, queries: Tensor, keys: Tensor) -> int:
    """Return the number of (query, key) pairs inside the mask.

    queries, keys: positions, int64 `[rows]` and `[columns]`; keys are consecutive. window: 0 is full causal attention.
    """
    first = (queries - window + 1 if window else torch.zeros_like(queries)).clamp(min=int(keys[0]))
    last = queries.clamp(max=int(keys[-1]))
    return int((last - first + 1).clamp(min=0).sum())


class PlannedKernel(FlexKernel):
    """The kernel that ring attention calls once per step, for plans.

    The `table` of an AttentionBlock is the number of visible scores per head, not a mask. None: all scores are visible.
    """

    make_table = staticmethod(visible_scores)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, table: Any, soft_cap: float) -> tuple[Tensor, Tensor]:
        return attend(q, k, v, table)


def attend(q: Tensor, k: Tensor, v: Tensor, scores: int | None) -> tuple[Tensor, Tensor]:
    """Return fake tensors: the output of attention `[batch, heads, rows, v_dim]` and its logsumexp `[batch, heads, rows]`.

    scores: number of scores per head inside the mask; None: every query sees every key.
    """
    out, lse = planned_attention(q, k, v, q.shape[2] * k.shape[2] if scores is None else scores)
    return out, lse


@torch.library.custom_op("forge::planned_attention", mutates_args=())
def planned_attention(q: Tensor, k: Tensor, v: Tensor, scores: int) -> tuple[Tensor, Tensor]:
    """Return output and logsumexp of attention with `scores` scores per head. For fake tensors only."""
    raise NotImplementedError("this operator exists for plans only: it has shapes, but computes no values")


@torch.library.custom_op("forge::planned_attention_backward", mutates_args=())
def planned_attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, scores: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v. For fake tensors only."""
    raise NotImplementedError("this operator exists for plans only: it has shapes, but computes no values")


@planned_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, scores: int) -> tuple[Tensor, Tensor]:
    return _by_token(q, v.shape[-1]), q.new_empty(q.shape[:-1], dtype=torch.float32)


@planned_attention_backward.register_fake
def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, scores: int) -> tuple[Tensor, Tensor, Tensor]:
    return _by_token(q, q.shape[-1]), _by_token(k, k.shape[-1]), _by_token(v, v.shape[-1])


def _by_token(x: Tensor, width: int) -> Tensor:
    """Return a fake tensor `[batch, heads, seq, width]` with the kernels' memory layout, `[batch, seq, heads, width]`."""
    batch, heads, seq, _ = x.shape
    return x.new_empty((batch, seq, heads, width)).transpose(1, 2)


def _keep_attention(ctx: Any, inputs: Any, output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.scores = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, *output)


def _attention_backward(
    ctx: Any, grad: Tensor, _of_lse: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, None]:
    return (*planned_attention_backward(grad, *ctx.saved_tensors[:3], ctx.scores), None)


planned_attention.register_autograd(_attention_backward, setup_context=_keep_attention)


def use_fused_norms(model: nn.Module) -> None:
    """Make each RMS norm of `model` compute with one operator, like the CUDA kernel.

    CUDA has a fused kernel only if weight and input have the same dtype. Other norms keep PyTorch's operators.
    """
    for module in model.modules():
        if isinstance(module, RMSNorm):
            zero_centered = module.normalize is zero_centered_norm
            module.normalize = partial(zero_centered_norm, norm=norm_on_gpu) if zero_centered else norm_on_gpu


def norm_on_gpu(x: Tensor, shape: Sequence[int], weight: Tensor, eps: float) -> Tensor:
    """Compute `F.rms_norm` on fake tensors: one operator if CUDA has a fused kernel for these dtypes."""
    if weight.dtype != x.dtype:
        return F.rms_norm(x, list(shape), weight, eps)
    return fused_norm(x, weight)[0]


@torch.library.custom_op("forge::fused_norm", mutates_args=())
def fused_norm(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the RMS norm over the last dim, and the reciprocal root mean square of each row, float32 `[..., 1]`.

    For fake tensors only.
    """
    raise NotImplementedError("this operator exists for plans only: it has shapes, but computes no values")


@torch.library.custom_op("forge::fused_norm_backward", mutates_args=())
def fused_norm_backward(grad: Tensor, x: Tensor, weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of x and weight. For fake tensors only."""
    raise NotImplementedError("this operator exists for plans only: it has shapes, but computes no values")


@fused_norm.register_fake
def _(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)


@fused_norm_backward.register_fake
def _(grad: Tensor, x: Tensor, weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(weight)


def _keep_norm(ctx: Any, inputs: Any, output: tuple[Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs, output[1])


def _norm_backward(ctx: Any, grad: Tensor, _of_scale: Tensor | None) -> tuple[Tensor, Tensor]:
    x, weight, scale = ctx.saved_tensors
    return fused_norm_backward(grad, x, weight, scale)


fused_norm.register_autograd(_norm_backward, setup_context=_keep_norm)
