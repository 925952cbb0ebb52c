"""Masks and scaled dot-product attention.

Both tables of a mask, dense (CPU) and block (CUDA), follow from its one rule. The attention function is for sequences
that are whole on this process. It chooses PyTorch's kernel by mask and device.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from forge.model.norm import promoted

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


class SdpaAttention:
    """Attention by PyTorch's kernels: causal SDPA for a plain causal mask, else flex_attention on CUDA.

    On a CPU, and for float64 (not supported by flex_attention), SDPA takes a dense table. SDPA has no soft cap and no
    sinks, so these are computed in plain operations instead.
    """

    def prepare(self, mask: AttentionMask, x: Tensor) -> AttentionMask:
        if mask.is_causal(x.shape[1]):
            return mask
        make_table = block_table if has_flex(x) else dense_table
        return mask.with_table(make_table(mask.window, mask.documents, x.shape[1], x.device))

    def prepare_part(self, mask: AttentionMask, queries: Tensor, keys: Tensor, x: Tensor) -> AttentionMask:
        """Return the mask with a table for some queries and keys of a sequence. queries, keys: positions, int64 `[n]`."""
        make_table = block_part if has_flex(x) else dense_part
        return mask.with_table(make_table(mask.window, mask.documents, queries, keys))

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, sinks: Tensor | None = None
    ) -> Tensor:
        if isinstance(mask.table, BlockMask):
            if sinks is None:
                attend = flex_for(q.device.type)
                return attend(
                    q, k, v, score_mod=capped(mask.soft_cap), block_mask=mask.table, enable_gqa=True
                )
            out, lse = flex_with_lse(q, k, v, mask.table, mask.soft_cap)
            # The sink acts as a key with a zero value. The sigmoid is the total softmax weight of all other keys.
            return out * torch.sigmoid(lse - sinks.to(lse.dtype)[:, None]).unsqueeze(-1).to(out.dtype)
        if mask.soft_cap or sinks is not None:
            assert mask.table is not None
            return _plain_attention(q, k, v, mask.table, mask.soft_cap, sinks)
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask.table, is_causal=mask.table is None, enable_gqa=True
        )


sdpa_attention = SdpaAttention()


def has_flex(x: Tensor) -> bool:
    """Return whether flex_attention has kernels for the device and dtype of `x`: CUDA, any dtype except float64."""
    return x.is_cuda and x.dtype != torch.float64


def _plain_attention(
    q: Tensor, k: Tensor, v: Tensor, table: Tensor, soft_cap: float, sinks: Tensor | None
) -> Tensor:
    """Compute attention in plain operations, in the wider of float32 and q's dtype.

    For soft caps and sinks, which SDPA does not support. Shapes as for `AttentionFunction`; table bool `[batch, 1, seq,
    keys]`.
    """
    exact, repeats = promoted(q.dtype), q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeats, dim=1).to(exact), v.repeat_interleave(repeats, dim=1).to(exact)
    scores = q.to(exact) @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    if soft_cap:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    scores = scores.masked_fill(~table, -torch.inf)
    if sinks is not None:
        sink = sinks.to(exact).view(-1, 1, 1).expand(*scores.shape[:-1], 1)
        return (torch.cat([scores, sink], dim=-1).softmax(-1)[..., :-1] @ v).to(q.dtype)
    return (scores.softmax(-1) @ v).to(q.dtype)


def flex_with_lse(
    q: Tensor, k: Tensor, v: Tensor, table: BlockMask, soft_cap: float
) -> tuple[Tensor, Tensor]:
    """Return flex_attention's output, and the logsumexp of each row's scores, float32 `[batch, heads, seq]`."""
    attend = flex_for(q.device.type)
    aux = AuxRequest(lse=True)
    mod = capped(soft_cap)
    out, more = attend(q, k, v, score_mod=mod, block_mask=table, enable_gqa=True, return_aux=aux)
    return out, more.lse


_NARROWEST = 16
"""The fewest values per head that flex_attention's kernels for CUDA accept."""

GRAPHS = 256
"""The limit of graphs for one compiled function; PyTorch's default is 8.

The number needed is a product of three: kinds of layers (by window; a phase's ramp of windows has 16), 2 for forwards with
and without gradients, and kinds of batches (training's, smaller ones, samples of any length).
"""


@functools.cache
def flex_for(device_type: str) -> Callable[..., Any]:
    """Return flex_attention: compiled at first use on CUDA, eager (unfused) elsewhere."""
    if device_type != "cuda":
        return _flex
    if not torch.compiler.is_compiling():  # else part of a block's graph
        # Past the limit flex_attention would silently fall back to holding all scores in memory.
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, GRAPHS)
    return torch.compile(_flex)


def _flex(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
    """Call flex_attention; heads narrower than `_NARROWEST` are padded with zeros, which change no score."""
    scale, width = 1 / math.sqrt(q.shape[-1]), v.shape[-1]
    q, k, v = (F.pad(x, (0, _NARROWEST - x.shape[-1])) if x.shape[-1] < _NARROWEST else x for x in (q, k, v))
    # Below 128 queries, PyTorch would choose its decoding kernel, whose tiles do not divide our blocks of 128.
    options |= {"scale": scale, "kernel_options": {"FORCE_USE_FLEX_ATTENTION": True}}
    found: Any = flex_attention(q, k, v, **options)
    if "return_aux" in options:
        return found[0][..., :width], found[1]
    return found[..., :width]


@functools.cache
def capped(soft_cap: float) -> Callable[..., Tensor] | None:
    """Return flex_attention's score_mod for a soft cap. None: no cap.

    Each cap has one function object, so flex_attention is compiled once per cap.
    """
    if not soft_cap:
        return None

    def cap(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return soft_cap * torch.tanh(score / soft_cap)

    return cap
