"""Context parallelism on a ring: keys and values travel from rank to rank; each rank merges its attention over each part.

cp - 1 exchanges per layer and forward; in backward keys and values go around again, and their gradients with them until
they are back (Liu et al. 2023, "Ring Attention with Blockwise Transformers for Near-Infinite Context"). Never more than
two ranks' keys and values are held. An exchange runs while the block before it is computed.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.attention.flex_attention import BlockMask

from forge import compat
from forge.model import AttentionMask
from forge.model.mask import block_part, dense_part
from forge.model.precision import promoted
from forge.parallel.context.kernels import AttentionBlock, kernel_for
from forge.parallel.context.sequence import SequenceSplit


class Pair(NamedTuple):
    """A chunk of this rank's queries and a chunk of the keys in hand (0: the early one, 1: the late one) that it sees.

    table: which of the keys each query sees; None: all.
    """

    queries: int
    keys: int
    table: Tensor | BlockMask | None


class RingAttention:
    """This rank's queries against every rank's keys and values in turn, its own first."""

    def __init__(self, split: SequenceSplit):
        self.split = split

    def prepare(self, mask: AttentionMask, x: Tensor) -> AttentionMask:
        """The table becomes the pairs of chunks to compute after 0, 1, ... exchanges: `list[list[Pair]]`."""
        split, ranks = self.split, self.split.ranks
        steps = [self._pairs(mask, x, split.chunks((split.rank - step) % ranks)) for step in range(ranks)]
        return AttentionMask(mask.window, mask.documents, mask.soft_cap, steps)

    def _pairs(self, mask: AttentionMask, x: Tensor, keys: tuple[int, int]) -> list[Pair]:
        size = x.shape[1] // 2
        flex = kernel_for(x).flex
        make_table: Any = block_part if flex else dense_part
        pairs = []
        for i, q_chunk in enumerate(self.split.chunks(self.split.rank)):
            for j, k_chunk in enumerate(keys):
                # The smallest and the largest distance from a query back to a key, documents aside.
                near, far = (q_chunk - k_chunk) * size - size + 1, (q_chunk - k_chunk) * size + size - 1
                if far < 0 or (mask.window and near >= mask.window):
                    continue  # every key lies in the future or behind the window
                if near > 0 and (not mask.window or far < mask.window) and mask.documents is None:
                    pairs.append(Pair(i, j, None))
                    continue
                tokens = torch.arange(size, device=x.device)
                table = make_table(
                    mask.window, mask.documents, tokens + q_chunk * size, tokens + k_chunk * size
                )
                # On CUDA `any` would wait for the device, and an empty block mask costs next to nothing.
                if flex or table.any():
                    pairs.append(Pair(i, j, table))
        return pairs

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> Tensor:
        return _Ring.apply(q, k, v, mask.table, mask.soft_cap, self.split)


class _Ring(torch.autograd.Function):
    """q `[batch, heads, seq / cp, head_dim]`, k and v `[batch, kv_heads, seq / cp, head_dim]` -> shaped like q."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        steps: list[list[Pair]],
        soft_cap: float,
        split: SequenceSplit,
    ) -> Tensor:
        kernel, exact = kernel_for(q), promoted(q.dtype)
        out = torch.zeros_like(q, dtype=exact)
        lse = torch.full(q.shape[:-1], -torch.inf, dtype=exact, device=q.device)
        kv = torch.stack([k, v])
        for step, pairs in enumerate(steps):
            # Start the next exchange before the computation that hides it.
            arriving = compat.pass_on(kv, split.group) if step < len(steps) - 1 else kv
            for pair in pairs:
                rows, columns = _half(q, pair.queries), _half(k, pair.keys)
                keys, values = kv[:, :, :, columns].unbind(0)
                block = AttentionBlock(q[:, :, rows], keys, values, pair.table, soft_cap)
                merge(out[:, :, rows], lse[:, :, rows], *kernel.forward(block))
            kv = arriving
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.rest = steps, soft_cap, split
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        steps, soft_cap, split = ctx.rest
        kernel, exact = kernel_for(q), promoted(q.dtype)
        delta = (grad.to(exact) * out.to(exact)).sum(-1)
        grad_q = torch.zeros_like(q, dtype=exact)
        kv = torch.stack([k, v])
        travelling = None
        for step, pairs in enumerate(steps):
            arriving = compat.pass_on(kv, split.group) if step < len(steps) - 1 else kv
            grad_kv = torch.zeros_like(kv, dtype=exact)
            for pair in pairs:
                rows, columns = _half(q, pair.queries), _half(k, pair.keys)
                keys, values = kv[:, :, :, columns].unbind(0)
                block = AttentionBlock(q[:, :, rows], keys, values, pair.table, soft_cap)
                found = kernel.backward(block, grad[:, :, rows], delta[:, :, rows], lse[:, :, rows])
                grad_q[:, :, rows] += found[0]
                grad_kv[0, :, :, columns] += found[1]
                grad_kv[1, :, :, columns] += found[2]
            # The gradients arrive from the rank that had these keys and values before, and go on with this rank's share.
            # The last exchange brings each back to the rank that it belongs to.
            if travelling is not None:
                grad_kv += travelling
            travelling = compat.pass_on(grad_kv, split.group)
            kv = arriving
        assert travelling is not None
        grad_k, grad_v = travelling.to(k.dtype)
        return grad_q.to(q.dtype), grad_k, grad_v, None, None, None


def merge(out: Tensor, lse: Tensor, new_out: Tensor, new_lse: Tensor) -> None:
    """Add attention over further keys to `out` `[..., rows, head_dim]` and `lse` `[..., rows]`, in place.

    out is normalised over the keys so far and lse is the logarithm of what it was divided by: -inf, with out 0, for a
    row that has seen none. Both results weigh exp(lse); Milakov and Gimelshein 2018, "Online normalizer calculation for
    softmax".
    """
    both = torch.logaddexp(lse, new_lse)
    # Where neither has seen a key, exp(-inf - 0) = 0 keeps out at 0; -inf - -inf would be NaN.
    base = both.masked_fill(both == -torch.inf, 0.0)
    out.mul_(torch.exp(lse - base).unsqueeze(-1)).add_(new_out * torch.exp(new_lse - base).unsqueeze(-1))
    lse.copy_(both)


def _half(x: Tensor, which: int) -> slice:
    size = x.shape[2] // 2
    return slice(which * size, (which + 1) * size)
