"""The attention mask: one rule, from which both the dense table (CPU) and the block table (CUDA) are built."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

# Rows and columns of one tile of the block table: flex_attention's default.
BLOCK = 128


class AttentionMask:
    """The rule: query i sees key j iff 0 <= i - j (and i - j < window, if window > 0), and both are in one document.

    documents: int `[batch, seq]`; None: one document. soft_cap: scores become soft_cap * tanh(scores / soft_cap); 0:
    off. sinks: the softmax has one more logit per head, passed to the attention function. table: built by the attention
    function's `prepare` for this forward, and shared by all layers; None: plain causal.

    Not a dataclass, because FSDP rebuilds dataclasses among a module's inputs and casts the tensors in them.
    """

    def __init__(
        self,
        window: int = 0,
        documents: Tensor | None = None,
        soft_cap: float = 0.0,
        table: Any = None,
        sinks: bool = False,
    ):
        self.window = window
        self.documents = documents
        self.soft_cap = soft_cap
        self.table = table
        self.sinks = sinks

    def with_table(self, table: Any) -> AttentionMask:
        """Return a copy of the mask whose table is `table`."""
        return AttentionMask(self.window, self.documents, self.soft_cap, table, self.sinks)

    def is_causal(self, seq: int) -> bool:
        """Return whether the mask of `seq` tokens is plain causal.

        It then has no documents, no soft cap, no sinks, and no window shorter than `seq`.
        """
        reaches = not self.window or self.window >= seq
        return reaches and self.documents is None and not self.soft_cap and not self.sinks


def visible(window: int, documents: Tensor | None) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """Return the mask's rule as a function of four index tensors: batch, head, query, key.

    The index tensors broadcast. The function returns a bool tensor: true where the query sees the key.
    """

    def sees(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        seen = i >= j
        if window:
            seen = seen & (i - j < window)
        if documents is not None:
            seen = seen & (documents[b, i] == documents[b, j])
        return seen

    return sees


def dense_table(window: int, documents: Tensor | None, seq: int, device: torch.device) -> Tensor:
    """Return the mask as a bool table `[batch, 1, seq, seq]`: true where a query sees a key. batch is 1 without documents.

    Needs seq^2 memory.
    """
    index = torch.arange(seq, device=device)
    return dense_part(window, documents, index, index)


def dense_part(window: int, documents: Tensor | None, queries: Tensor, keys: Tensor) -> Tensor:
    """Return `dense_table` for some queries and keys only: bool `[batch, 1, queries, keys]`.

    queries, keys: positions in the sequence, int64 `[n]`. documents: of the whole sequence, `[batch, seq]`.
    """
    batch = 1 if documents is None else documents.shape[0]
    b = torch.arange(batch, device=queries.device).view(batch, 1, 1, 1)
    return visible(window, documents)(
        b, torch.zeros_like(b), queries.view(1, 1, -1, 1), keys.view(1, 1, 1, -1)
    )


def block_table(window: int, documents: Tensor | None, seq: int, device: torch.device) -> BlockMask:
    """Return the mask as tiles of BLOCK x BLOCK: empty, full or partial.

    flex_attention evaluates the rule only in partial tiles. Tiles are computed from their ranges of indices and
    documents, without a host sync and without a tensor of size seq x seq. Document numbers may be in any order, so a
    tile is skipped only if its ranges prove that it is empty.
    """
    index = torch.arange(seq, device=device)
    return _tiles(window, documents, index, index, visible(window, documents))


def block_part(window: int, documents: Tensor | None, queries: Tensor, keys: Tensor) -> BlockMask:
    """Return `block_table` for some queries and keys of a sequence, in any order. Arguments as for `dense_part`."""
    sees = visible(window, documents)

    def sees_there(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return sees(b, h, queries[i], keys[j])

    return _tiles(window, documents, queries, keys, sees_there)


def _tiles(
    window: int,
    documents: Tensor | None,
    queries: Tensor,
    keys: Tensor,
    rule: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor],
) -> BlockMask:
    q_low, q_high = (end[:, :, None] for end in _ranges(queries[None]))
    k_low, k_high = (end[:, None, :] for end in _ranges(keys[None]))
    some = k_low <= q_high
    every = (k_high <= q_low) & _whole(queries)[:, None] & _whole(keys)
    if window:
        some = some & (q_low - k_high < window)
        every = every & (q_high - k_low < window)
    if documents is not None:
        q_low, q_high = (end[:, :, None] for end in _ranges(documents[:, queries]))
        k_low, k_high = (end[:, None, :] for end in _ranges(documents[:, keys]))
        some = some & (q_low <= k_high) & (k_low <= q_high)
        every = every & (q_low == q_high) & (k_low == k_high) & (q_low == k_low)
    partial_count, partial_index = _ordered(some & ~every)
    full_count, full_index = _ordered(some & every)
    return BlockMask.from_kv_blocks(
        partial_count,
        partial_index,
        full_count,
        full_index,
        BLOCK_SIZE=BLOCK,
        mask_mod=rule,
        seq_lengths=(len(queries), len(keys)),
    )


def _whole(index: Tensor) -> Tensor:
    """Return whether each tile of BLOCK tokens lies wholly within the sequence: bool `[tiles]`.

    index: one element per token; only the length is used. In a tile that reaches past the end of the sequence,
    flex_attention evaluates the mask function for each pair of tokens.
    """
    return torch.arange(BLOCK, len(index) + BLOCK, BLOCK, device=index.device) <= len(index)


def _ranges(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return (minimum, maximum) of each tile of BLOCK tokens of `values` `[batch, tokens]`. Both are `[batch, tiles]`."""
    batch, tokens = values.shape
    # Padding with the last token's value changes neither minimum nor maximum.
    padded = torch.cat([values, values[:, -1:].expand(batch, -tokens % BLOCK)], dim=1).view(batch, -1, BLOCK)
    return padded.amin(-1), padded.amax(-1)


def _ordered(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Convert a choice of tiles, bool `[batch, rows, columns]`, to flex_attention's form: two int32 tensors.

    The first is the number of chosen tiles per row, `[batch, 1, rows]`. The second has each row's column indices,
    `[batch, 1, rows, columns]`, with chosen tiles first.
    """
    index = chosen.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    count = chosen.sum(dim=-1)
    return count[:, None].to(torch.int32), index[:, None].to(torch.int32).contiguous()
