"""Attention of some queries over some keys, with the logsumexp by which it is merged with others: the ring's inner part.

q `[batch, heads, rows, head_dim]`, k and v `[batch, kv_heads, columns, head_dim]`; results in promote(float32, q.dtype).
A row that sees no key has out = 0 and lse = -inf. (The CPU's fused kernel returns lse = 0, and such rows would then weigh
as much as a key of score 0; so it is not used.)
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest

from forge.model.attention import _capped, _flex_for
from forge.model.precision import promoted


class AttentionBlock(NamedTuple):
    """Queries, keys and values, and which query sees which key.

    table: a BlockMask for flex_attention, else bool `[batch or 1, 1, rows, columns]`; None: every query sees every key.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    table: Any
    soft_cap: float


class PlainKernel:
    """The formula, with rows x columns scores in memory for each head."""

    flex = False

    def forward(self, block: AttentionBlock) -> tuple[Tensor, Tensor]:
        """out, shaped like q, and lse `[batch, heads, rows]`, the logarithm of each row's sum of exp(score)."""
        q, k, v, table, soft_cap = block
        exact = promoted(q.dtype)
        scores, _ = _scores(_grouped(q, k), k.to(exact), table, soft_cap)
        lse = scores.logsumexp(-1, keepdim=True)
        # exp(-inf - 0) = 0 for rows that see no key; -inf - -inf would be NaN.
        weights = torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0.0))
        out = weights @ v.to(exact)
        return out.view(q.shape), lse.view(q.shape[:-1])

    def backward(
        self, block: AttentionBlock, grad: Tensor, delta: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return this block's share of the gradients of q, k and v.

        grad, lse: of the attention over all keys. delta `[batch, heads, rows]`: sum of grad * out, likewise.
        """
        q, k, v, table, soft_cap = block
        exact = promoted(q.dtype)
        rows, grad_rows, k, v = _grouped(q, k), _grouped(grad, k), k.to(exact), v.to(exact)
        scores, slope = _scores(rows, k, table, soft_cap)
        column = (*rows.shape[:-1], 1)
        weights = torch.exp(scores - lse.reshape(column))
        grad_scores = weights * (grad_rows @ v.mT - delta.reshape(column)) * q.shape[-1] ** -0.5
        if slope is not None:
            grad_scores = grad_scores * slope
        grad_q = (grad_scores @ k).view(q.shape)
        # A key/value head's gradient is the sum over its query heads: they are rows of one product.
        return grad_q, grad_scores.mT @ rows, weights.mT @ grad_rows


def _grouped(q: Tensor, k: Tensor) -> Tensor:
    """Query heads as further rows of their key/value head: `[batch, kv_heads, group * rows, head_dim]`."""
    return q.to(promoted(q.dtype)).unflatten(1, (k.shape[1], -1)).flatten(2, 3)


def _scores(rows: Tensor, k: Tensor, table: Tensor | None, soft_cap: float) -> tuple[Tensor, Tensor | None]:
    """Scores `[batch, kv_heads, group * rows, columns]`, -inf where the table forbids; the soft cap's derivative, if any."""
    scores, slope = rows @ k.mT * rows.shape[-1] ** -0.5, None
    if soft_cap:
        capped = torch.tanh(scores / soft_cap)
        scores, slope = soft_cap * capped, 1.0 - capped.square()
    if table is not None:
        by_head = scores.unflatten(2, (-1, table.shape[2]))
        scores = by_head.masked_fill(~table.unsqueeze(2), -torch.inf).flatten(2, 3)
    return scores, slope


class FlexKernel:
    """PyTorch's flex_attention; methods as in `PlainKernel`.

    Its backward takes no sums over all keys, so the block is computed again and its own backward runs, with a gradient
    of lse that accounts for the other blocks.
    """

    flex = True

    def forward(self, block: AttentionBlock) -> tuple[Tensor, Tensor]:
        out, lse = _flex_with_lse(*block)
        exact = promoted(block.q.dtype)
        return out.to(exact), lse.to(exact)

    def backward(
        self, block: AttentionBlock, grad: Tensor, delta: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (x.detach().requires_grad_() for x in block[:3])
        with torch.enable_grad():
            out, own_lse = _flex_with_lse(q, k, v, block.table, block.soft_cap)
        # The whole is the sum of weight * out over blocks, where weight = exp(own_lse - lse) sums to 1.
        exact = promoted(q.dtype)
        weight = torch.exp(own_lse.detach().to(exact) - lse)
        own_delta = (grad.to(exact) * out.detach().to(exact)).sum(-1)
        grads = torch.autograd.grad(
            (out, own_lse),
            (q, k, v),
            ((grad * weight.unsqueeze(-1)).to(out.dtype), (weight * (own_delta - delta)).to(own_lse.dtype)),
        )
        grad_q, grad_k, grad_v = (x.to(exact) for x in grads)
        return grad_q, grad_k, grad_v


def kernel_for(x: Tensor) -> PlainKernel | FlexKernel:
    """flex_attention on CUDA up to float32; the formula written out elsewhere."""
    return FlexKernel() if x.is_cuda and x.dtype != torch.float64 else PlainKernel()


def _flex_with_lse(q: Tensor, k: Tensor, v: Tensor, table: Any, soft_cap: float) -> tuple[Tensor, Tensor]:
    attend: Any = _flex_for(q.device.type)
    out, further = attend(
        q,
        k,
        v,
        score_mod=_capped(soft_cap),
        block_mask=table,
        enable_gqa=True,
        return_aux=AuxRequest(lse=True),
    )
    return out, further.lse
