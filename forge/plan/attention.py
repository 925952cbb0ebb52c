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

from torch import Tensor

from forge.model import AttentionMask, sdpa_attention
from forge.model.precision import promoted
from forge.parallel.context import ring
from forge.parallel.context.gathered import AllGatherAttention


@contextmanager
def as_on_cards() -> Iterator[None]:
    """In the body attention needs the memory that it needs on a card."""
    with (
        patch.object(sdpa_attention, "prepare", lambda mask, x: AttentionMask()),
        patch.object(AllGatherAttention, "prepare", lambda self, mask, x: AttentionMask()),
        patch.object(ring, "kernel_for", lambda x: FlexStandIn()),
        patch.object(ring, "block_part", lambda *_: None),
    ):
        yield


class FlexStandIn:
    """The shapes of `ring.FlexKernel`."""

    flex = True

    def forward(self, block: ring.AttentionBlock) -> tuple[Tensor, Tensor]:
        exact = promoted(block.q.dtype)
        return block.q.new_empty(block.q.shape, dtype=exact), block.q.new_empty(
            block.q.shape[:-1], dtype=exact
        )

    def backward(self, block: ring.AttentionBlock, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
        exact = promoted(block.q.dtype)
        grad_q, grad_k, grad_v = (x.new_empty(x.shape, dtype=exact) for x in block[:3])
        return grad_q, grad_k, grad_v
