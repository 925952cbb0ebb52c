"""Attention as it runs on a card, for plans that are made on a CPU.

On a card forge computes windows, documents, soft caps and the blocks of a ring in flex_attention, which keeps what plain
attention keeps: queries, keys, values, the output and its logsumexp. A CPU, which has no such kernel, uses dense tables
and scores. So here plain attention stands for all of them; tables of blocks, which are small, are left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional as F

from forge.model import AttentionMask, sdpa_attention
from forge.model.precision import promoted
from forge.model.sdpa import SdpaAttention
from forge.parallel.context import ring
from forge.parallel.context.gathered import AllGatherAttention


@contextmanager
def as_on_cards() -> Iterator[None]:
    """In the body attention needs the memory that it needs on a card."""
    with (
        patch.object(sdpa_attention, "prepare", lambda mask, x: AttentionMask()),
        patch.object(SdpaAttention, "__call__", _causal),
        patch.object(AllGatherAttention, "prepare", lambda self, mask, x: AttentionMask()),
        patch.object(ring, "kernel_for", lambda x: FlexStandIn()),
        patch.object(ring, "block_part", lambda *_: None),
    ):
        yield


def _causal(
    self: SdpaAttention, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, sinks: Tensor | None = None
) -> Tensor:
    """Plain causal attention; values as wide as keys, because a CPU's kernel takes no others."""
    wide = F.pad(v, (0, k.shape[-1] - v.shape[-1]))
    out = F.scaled_dot_product_attention(q, k, wide, is_causal=True, enable_gqa=True)[..., : v.shape[-1]]
    # On a card the logsumexp, of these sizes, is part of the product.
    return out if sinks is None else out * torch.sigmoid(sinks.view(-1, 1, 1)).to(out.dtype)


class FlexStandIn:
    """The shapes of `ring.FlexKernel`."""

    flex = True

    def forward(self, block: ring.AttentionBlock) -> tuple[Tensor, Tensor]:
        exact = promoted(block.q.dtype)
        rows = block.q.shape[:-1]
        out = block.q.new_empty((*rows, block.v.shape[-1]), dtype=exact)
        return out, block.q.new_empty(rows, dtype=exact)

    def backward(self, block: ring.AttentionBlock, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
        exact = promoted(block.q.dtype)
        grad_q, grad_k, grad_v = (x.new_empty(x.shape, dtype=exact) for x in block[:3])
        return grad_q, grad_k, grad_v
