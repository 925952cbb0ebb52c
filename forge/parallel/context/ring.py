"""Context parallelism on a ring: each rank merges attention to the keys and values of all ranks in turn.

A forward makes cp - 1 exchanges per layer. In backward, keys and values travel around the ring again together with
their gradients, until the gradients are back at their owner rank (Liu et al. 2023, "Ring Attention with Blockwise
Transformers for Near-Infinite Context"). A rank holds the keys and values of at most two ranks at a time. Each exchange
overlaps the attention to the keys and values already on the rank.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.attention.flex_attention import BlockMask

from forge.model import AttentionMask
from forge.model.norm import promoted
from forge.model.sdpa import block_part, dense_part, flex_with_lse, has_flex
from forge.parallel.context.sequence import SequenceSplit
from forge.runtime import compat


class Pair(NamedTuple):
    """A chunk of this rank's queries and a chunk of the keys now on this rank. The queries may see some of the keys.

    queries, keys: 0 for the early chunk, 1 for the late chunk. table: mask of the keys visible to each query; None:
    all.
    """

    queries: int
    keys: int
    table: Tensor | BlockMask | None


class RingAttention:
    """Attention of this rank's queries to the keys and values of all ranks, one rank at a time, this rank first.

    kernel: computes attention of a chunk of queries to a chunk of keys. None: flex_attention if it has kernels for the
    device, else `PlainKernel`.
    """

    def __init__(self, split: SequenceSplit, kernel: PlainKernel | FlexKernel | None = None):
        self.split, self._kernel = split, kernel

    def kernel_for(self, x: Tensor) -> PlainKernel | FlexKernel:
        return self._kernel or (FlexKernel() if has_flex(x) else PlainKernel())

    def prepare(self, mask: AttentionMask, x: Tensor) -> AttentionMask:
        """Return `mask` with a table, `list[list[Pair]]`: entry i lists the pairs to compute after i exchanges."""
        split, ranks = self.split, self.split.ranks
        steps = [self._pairs(mask, x, split.chunks((split.rank - step) % ranks)) for step in range(ranks)]
        return mask.with_table(steps)

    def _pairs(self, mask: AttentionMask, x: Tensor, keys: tuple[int, int]) -> list[Pair]:
        size = x.shape[1] // 2
        kernel = self.kernel_for(x)
        pairs = []
        for i, q_chunk in enumerate(self.split.chunks(self.split.rank)):
            for j, k_chunk in enumerate(keys):
                # The smallest and the largest distance from a query back to a key, ignoring documents.
                near, far = (q_chunk - k_chunk) * size - size + 1, (q_chunk - k_chunk) * size + size - 1
                if far < 0 or (mask.window and near >= mask.window):
                    continue  # every key lies in the future or before the window
                if near > 0 and (not mask.window or far < mask.window) and mask.documents is None:
                    pairs.append(Pair(i, j, None))
                    continue
                tokens = torch.arange(size, device=x.device)
                table: Any = kernel.make_table(
                    mask.window, mask.documents, tokens + q_chunk * size, tokens + k_chunk * size
                )
                # Without documents some key is always visible. On CUDA `any` would synchronise with the device, and an
                # empty block mask costs almost nothing.
                if kernel.flex or mask.documents is None or table.any():
                    pairs.append(Pair(i, j, table))
        return pairs

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, sinks: Tensor | None = None
    ) -> Tensor:
        return _Ring.apply(q, k, v, sinks, mask.table, mask.soft_cap, self.split, self.kernel_for(q))


class _Ring(torch.autograd.Function):
    """Autograd function of ring attention.

    q, k, v and sinks have the shapes of `AttentionFunction`, with seq / cp tokens. A sink acts as the first key of
    every row, with a value vector of zero.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        steps: list[list[Pair]],
        soft_cap: float,
        split: SequenceSplit,
        kernel: PlainKernel | FlexKernel,
    ) -> Tensor:
        exact = promoted(q.dtype)
        out = torch.zeros((*q.shape[:-1], v.shape[-1]), dtype=exact, device=q.device)
        lse = torch.full(q.shape[:-1], -torch.inf, dtype=exact, device=q.device)
        if sinks is not None:
            lse.copy_(sinks[:, None])
        kv = torch.cat([k, v], dim=-1)
        for step, pairs in enumerate(steps):
            # Start the next exchange before the computation, so both overlap. Wait before using the received keys and
            # values, because a compiled kernel does not accept the result of a running collective.
            arriving = compat.pass_on(kv, split.group) if step < len(steps) - 1 else kv
            for pair in pairs:
                rows, columns, block = _block_of(pair, q, kv, soft_cap)
                merge(out[:, :, rows], lse[:, :, rows], *kernel.forward(block))
            kv = compat.arrived(arriving)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, sinks, out, lse)
        ctx.rest = steps, soft_cap, split, kernel
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, out, lse = ctx.saved_tensors
        steps, soft_cap, split, kernel = ctx.rest
        exact = promoted(q.dtype)
        delta = (grad.to(exact) * out.to(exact)).sum(-1)
        grad_q = torch.zeros_like(q, dtype=exact)
        grad_sinks = None
        if sinks is not None:
            weights = torch.exp(sinks.to(exact)[:, None] - lse)  # [batch, heads, rows]
            grad_sinks = -(weights * delta).sum((0, 2)).to(sinks.dtype)
        kv = torch.cat([k, v], dim=-1)
        travelling = None
        for step, pairs in enumerate(steps):
            arriving = compat.pass_on(kv, split.group) if step < len(steps) - 1 else kv
            grad_kv = torch.zeros_like(kv, dtype=exact)
            for pair in pairs:
                rows, columns, block = _block_of(pair, q, kv, soft_cap)
                found = kernel.backward(block, grad[:, :, rows], delta[:, :, rows], lse[:, :, rows])
                grad_q[:, :, rows] += found[0]
                grad_kv[:, :, columns] += torch.cat(found[1:], dim=-1)
            # Gradients arrive from the previous holder of these keys and values, and leave with this rank's
            # contribution added. The last exchange returns them to their owner rank.
            if travelling is not None:
                grad_kv += travelling
            travelling = compat.pass_on(grad_kv, split.group)
            kv = compat.arrived(arriving)
        assert travelling is not None
        grad_k, grad_v = travelling.to(k.dtype).split([k.shape[-1], v.shape[-1]], dim=-1)
        return grad_q.to(q.dtype), grad_k, grad_v, grad_sinks, None, None, None, None


def merge(out: Tensor, lse: Tensor, new_out: Tensor, new_lse: Tensor) -> None:
    """Add attention over further keys to `out` `[..., rows, head_dim]` and `lse` `[..., rows]`, in place.

    out is normalised over the keys so far, and lse is the logarithm of the normaliser. For a row that has seen no key,
    lse is -inf and out is 0. Both outputs are weighted by exp of their lse. Milakov and Gimelshein 2018, "Online
    normalizer calculation for softmax".
    """
    both = torch.logaddexp(lse, new_lse)
    # If neither side has seen a key, exp(-inf - 0) = 0 keeps `out` at 0; -inf - -inf would be NaN.
    base = both.masked_fill(both == -torch.inf, 0.0)
    out.mul_(torch.exp(lse - base).unsqueeze(-1)).add_(new_out * torch.exp(new_lse - base).unsqueeze(-1))
    lse.copy_(both)


def _block_of(pair: Pair, q: Tensor, kv: Tensor, soft_cap: float) -> tuple[slice, slice, AttentionBlock]:
    """Return the slices of `pair` in the sequence dimensions of q and kv, and its AttentionBlock.

    q `[batch, heads, seq / cp, head_dim]`, kv `[batch, kv_heads, seq / cp, head_dim + v_dim]`.
    """
    size, head_dim = q.shape[2] // 2, q.shape[-1]
    rows, columns = (slice(half * size, (half + 1) * size) for half in (pair.queries, pair.keys))
    keys, values = kv[:, :, columns].split([head_dim, kv.shape[-1] - head_dim], dim=-1)
    return rows, columns, AttentionBlock(q[:, :, rows], keys, values, pair.table, soft_cap)


class AttentionBlock(NamedTuple):
    """A block of queries, keys and values for a kernel. Kernels also return the logsumexp, for merging blocks.

    q `[batch, heads, rows, head_dim]`, k and v `[batch, kv_heads, columns, head_dim or v_dim]`. Results have the wider
    dtype of float32 and q's. A row without visible keys has out = 0 and lse = -inf. PyTorch's fused CPU kernel is not
    used, because it returns lse = 0 for such a row. `merge` would then treat the row like one visible key with score 0.
    table: a BlockMask for flex_attention, else bool `[batch or 1, 1, rows, columns]`; None: every query sees every key.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    table: Any
    soft_cap: float


class PlainKernel:
    """Attention in plain tensor operations. It holds the scores of all rows and columns of a head in memory."""

    flex = False
    make_table = staticmethod(dense_part)

    def forward(self, block: AttentionBlock) -> tuple[Tensor, Tensor]:
        """Return the output `[batch, heads, rows, v_dim]` and the logsumexp of each row's scores, `[batch, heads, rows]`."""
        q, k, v, table, soft_cap = block
        exact = promoted(q.dtype)
        scores, _ = _scores(_grouped(q, k), k.to(exact), table, soft_cap)
        lse = scores.logsumexp(-1, keepdim=True)
        # exp(-inf - 0) = 0 for rows that see no key; -inf - -inf would be NaN.
        weights = torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0.0))
        out = weights @ v.to(exact)
        return out.view(*q.shape[:-1], v.shape[-1]), lse.view(q.shape[:-1])

    def backward(
        self, block: AttentionBlock, grad: Tensor, delta: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return this block's contribution to the gradients of q, k and v.

        grad: gradient of the output of attention over all keys. lse: logsumexp over all keys. delta `[batch, heads,
        rows]`: grad * output, summed over the elements of a head.
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
        # The query heads of a key/value head are rows of one matrix, so the products sum over these heads.
        return grad_q, grad_scores.mT @ rows, weights.mT @ grad_rows


def _grouped(q: Tensor, k: Tensor) -> Tensor:
    """Stack the query heads of each key/value head as rows.

    Return `[batch, kv_heads, group * rows, head_dim]`, in the wider dtype of float32 and q's.
    """
    return q.to(promoted(q.dtype)).unflatten(1, (k.shape[1], -1)).flatten(2, 3)


def _scores(rows: Tensor, k: Tensor, table: Tensor | None, soft_cap: float) -> tuple[Tensor, Tensor | None]:
    """Return scores `[batch, kv_heads, group * rows, columns]` and the soft cap's derivative (None without a soft cap).

    Scores are -inf outside the table.
    """
    scores, slope = rows @ k.mT * rows.shape[-1] ** -0.5, None
    if soft_cap:
        tanh = torch.tanh(scores / soft_cap)
        scores, slope = soft_cap * tanh, 1.0 - tanh.square()
    if table is not None:
        by_head = scores.unflatten(2, (-1, table.shape[2]))
        scores = by_head.masked_fill(~table.unsqueeze(2), -torch.inf).flatten(2, 3)
    return scores, slope


class FlexKernel:
    """Attention by PyTorch's flex_attention; methods as in `PlainKernel`.

    flex_attention's backward cannot take the `lse` and `delta` of all keys. `backward` therefore recomputes the
    block's output and logsumexp, and backpropagates from both. Their incoming gradients account for the other blocks.
    """

    flex = True
    make_table: Any = staticmethod(block_part)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, table: Any, soft_cap: float) -> tuple[Tensor, Tensor]:
        return flex_with_lse(q, k, v, table, soft_cap)

    def forward(self, block: AttentionBlock) -> tuple[Tensor, Tensor]:
        out, lse = self.attend(*block)
        exact = promoted(block.q.dtype)
        return out.to(exact), lse.to(exact)

    def backward(
        self, block: AttentionBlock, grad: Tensor, delta: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (x.detach().requires_grad_() for x in block[:3])
        with torch.enable_grad():
            out, own_lse = self.attend(q, k, v, block.table, block.soft_cap)
        # The full output is the sum of weight * out over blocks; the weights exp(own_lse - lse) sum to 1.
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
