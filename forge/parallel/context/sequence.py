"""How a sequence is split over the ranks of the cp axis and reassembled.

The sequence is cut into 2 * cp chunks; rank r holds chunk r and chunk 2 * cp - 1 - r:

    cp = 2      chunk      0  1  2  3
                rank       0  1  1  0

Under a causal mask later chunks cost more; one early and one late chunk cost every rank the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import lcm

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from forge.batch import Batch
from forge.model.mtp import look_ahead
from forge.runtime import compat


class SequenceSplit:
    """The split of each sequence over the context-parallel ranks of `group`.

    A rank's part of the sequence is its two chunks. With one rank the part is the whole sequence, and nothing is sent.
    pieces: number of equal pieces into which sequence parallelism (tp) divides each part. depth: number of multi-token
    prediction modules.
    """

    def __init__(self, group: dist.ProcessGroup, pieces: int = 1, depth: int = 0):
        self.group = group
        self.pieces, self.depth = pieces, depth
        self.rank, self.ranks = group.rank(), group.size()

    def chunks(self, rank: int) -> tuple[int, int]:
        """Return the numbers of the two chunks held by `rank`: the early one, then the late one."""
        return rank, 2 * self.ranks - 1 - rank

    def part(self, whole: Tensor, dim: int = -1) -> Tensor:
        """Return this rank's two chunks of `whole`, concatenated.

        dim: the sequence dimension; its size must be a multiple of 2 * cp.
        """
        if self.ranks == 1:
            return whole
        assert whole.shape[dim] % (2 * self.ranks) == 0, (
            f"{whole.shape[dim]} tokens in {2 * self.ranks} chunks"
        )
        chunks = whole.chunk(2 * self.ranks, dim)
        head, tail = self.chunks(self.rank)
        return torch.cat([chunks[head], chunks[tail]], dim)

    def indices(self, seq: int, device: torch.device) -> Tensor:
        """Return this rank's token positions in the whole sequence: int64 `[seq / cp]`."""
        return self.part(torch.arange(seq, device=device))

    def in_order(self, parts: Tensor) -> Tensor:
        """Reassemble the whole sequence from all ranks' parts: `[cp, ..., seq / cp, width]` -> `[..., seq, width]`."""
        heads, tails = parts.chunk(2, dim=-2)
        return torch.cat([*heads.unbind(0), *reversed(tails.unbind(0))], dim=-2)

    def by_rank(self, whole: Tensor) -> Tensor:
        """Undo `in_order`: `[..., seq, width]` -> `[cp, ..., seq / cp, width]`."""
        chunks = whole.chunk(2 * self.ranks, dim=-2)
        heads, tails = chunks[: self.ranks], chunks[self.ranks :]
        return torch.cat([torch.stack(heads), torch.stack(tails[::-1])], dim=-2)

    def local_part(self, batch: Batch) -> Batch:
        """Return the two chunks of `batch` on this rank. All cp ranks pass the same tensors `[batch, seq]`."""
        if self.depth and torch.is_grad_enabled():
            batch = replace(batch, ahead=look_ahead(batch.tokens, batch.labels, batch.documents, self.depth))
        if self.ranks == 1:
            return batch
        positions = batch.positions
        if positions is None:
            positions = torch.arange(batch.tokens.shape[1], device=batch.tokens.device).expand_as(
                batch.tokens
            )
        return replace(
            batch,
            tokens=self.part(batch.tokens),
            labels=self.part(batch.labels),
            positions=self.part(positions),
            ahead=None if batch.ahead is None else self.part(batch.ahead, dim=1),
        )

    def logits(self, model: Callable[[Batch], Tensor], tokens: Tensor) -> Tensor:
        """Return next-token logits `[batch, seq, vocab]` of `tokens` `[batch, seq]`.

        Collective. Every cp rank returns all positions. `seq` may have any value: tokens are padded at the end to a
        multiple of 2 * cp and of cp * pieces. No token attends to padding.
        """
        seq = tokens.shape[1]
        if self.ranks == 1:
            return model(_without_labels(F.pad(tokens, (0, -seq % self.pieces))))[:, :seq]
        tokens = F.pad(tokens, (0, -seq % lcm(2 * self.ranks, self.ranks * self.pieces)))
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        logits = model(_without_labels(self.part(tokens), self.part(positions)))
        return self.in_order(compat.all_gather(logits.unsqueeze(0), self.group))[:, :seq]


def _without_labels(tokens: Tensor, positions: Tensor | None = None) -> Batch:
    """Return a batch without labels; the model then returns logits instead of losses."""
    return Batch(tokens, None, positions)  # type: ignore[arg-type]
