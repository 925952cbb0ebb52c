"""The largest attention logit of each head in a step, over all ranks. QK-clip (forge/optim/muon.py) bounds these logits.

A wrapper around each attention function takes the maximum over this rank's queries in every forward with gradients. One
all-reduce per step takes the maximum over ranks. A maximum does not depend on microbatches, on the split of heads,
sequences and batches, or on recomputation.

The wrapper computes the logits a second time, ROWS queries at a time. This takes half as many FLOPs as attention's
forward, and memory for the logits of ROWS queries against all keys.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from forge.model import (
    AttentionFunction,
    AttentionMask,
    GroupedAttention,
    LatentAttention,
    LinearAttention,
    Transformer,
)
from forge.model.sdpa import dense_part
from forge.parallel.blocks import keeping_nothing
from forge.parallel.context import SequenceSplit
from forge.parallel.layout import Layout
from forge.runtime import compat
from forge.runtime.errors import UserError
from forge.shard import Shard

# Number of queries whose logits are in memory at once.
ROWS = 256


class LargestLogits:
    """The largest logits of the layers in `parts`, this rank's stages. Raises UserError for unknown attention modules.

    by_parameter: name of a query or key projection -> (logits, powers). logits: the largest logit of each head, float64
    `[heads]`, in the order of the parameter's rows; equal on all ranks after `complete`. powers: float64 `[rows of a
    head]`. To multiply a head's logits by c, multiply each row of the head by c ** power, in both projections.
    """

    def __init__(self, parts: Sequence[Transformer], shards: Sequence[Shard], layout: Layout):
        layers = {layer: block for part in parts for layer, block in part.layers.items()}
        heads, kv_heads = layout.model.n_heads, layout.model.n_kv_heads
        self._stage = layout.meshes.stage
        device, of_attention = shards[0].data.device, layout.meshes.tp.device_type
        self._observed = torch.full(
            (len(layers), heads), -torch.inf, dtype=torch.float64, device=of_attention
        )
        # Under parallel.cpu_offload the shards are on the CPU.
        self._largest = self._observed if device.type == of_attention else self._observed.to(device)
        self._split = SequenceSplit(layout.meshes.cp)
        names = {shard.name for shard in shards}
        self.by_parameter: dict[str, tuple[Tensor, Tensor]] = {}
        for number, (layer, block) in enumerate(layers.items()):
            attention: Any = getattr(block, "attention", None)
            if isinstance(attention, LinearAttention):
                continue  # linear attention normalises queries and keys to length 1
            powers = _powers(attention, kv_heads < heads)
            if powers is None:
                kind = type(attention).__name__
                raise UserError(
                    f"optimizer.muon.qk_clip scales query and key projections, but the logits of {kind} in layer {layer} "
                    f"are not products of such projections; set optimizer.muon.qk_clip = 0"
                )
            latent = hasattr(attention.attend, "attend_latent")
            observed = ObservedLatents if latent else ObservedAttention
            attention.attend = observed(attention.attend, self._observed[number], layout, self._split)
            for name, of_rows in powers.items():
                rows = torch.tensor(of_rows, dtype=torch.float64, device=device)
                for leaf in ("weight", "bias"):
                    if (parameter := f"layers.{layer}.attention.{name}.{leaf}") in names:
                        self.by_parameter[parameter] = self._largest[number], rows

    def complete(self) -> None:
        """All-reduce the maxima over all ranks. Collective. Synchronises with the device under parallel.cpu_offload."""
        if self._stage.size() > 1:
            dist.all_reduce(self._observed, dist.ReduceOp.MAX, group=self._stage)
        if self._largest is not self._observed:
            self._largest.copy_(self._observed)

    def reset(self) -> None:
        """Reset all maxima to -inf."""
        self._observed.fill_(-torch.inf)


def _powers(attention: Any, shared_keys: bool) -> dict[str, list[float]] | None:
    """Return projection name -> power of c for each row of a head (c: see `LargestLogits`); None for unknown attention.

    Rows of queries and keys have power 1/2. If query heads share a key, the key has power 0 and stays unchanged, and
    the query has power 1, as in arXiv:2507.20534. Shared keys are the keys of grouped-query attention and the RoPE part
    of latent attention's keys.
    """
    if isinstance(attention, LatentAttention):
        nope, rope, v = attention.nope_dim, attention.rope_dim, attention.v_dim
        queries = "wq" if attention.wq_a is None else "wq_b"
        return {queries: [0.5] * nope + [1.0] * rope, "wkv_b": [0.5] * nope + [0.0] * v}
    if not isinstance(attention, GroupedAttention):
        return None
    size = attention.head_dim
    return {"wq": [1.0] * size} if shared_keys else {"wq": [0.5] * size, "wk": [0.5] * size}


class ObservedAttention:
    """An attention function that records its largest logits. largest: float64 `[heads]`, over all heads of the model."""

    def __init__(self, attend: AttentionFunction, largest: Tensor, layout: Layout, split: SequenceSplit):
        self._attend, self._largest, self._split, self._tp = attend, largest, split, layout.meshes.tp

    @property
    def split(self) -> SequenceSplit | None:
        """Return the attention function's split of the sequence; None without context parallelism."""
        return getattr(self._attend, "split", None)

    def prepare(self, mask: AttentionMask, x: Tensor) -> AttentionMask:
        return self._attend.prepare(mask, x)

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, sinks: Tensor | None = None
    ) -> Tensor:
        self._add(q, mask, lambda: k)
        return self._attend(q, k, v, mask, sinks)

    def _add(self, q: Tensor, mask: AttentionMask, keys: Callable[[], Tensor]) -> None:
        """Add the logits of a forward with gradients. keys: returns k, as in `_observe`."""
        if not torch.is_grad_enabled():
            return
        # A recomputation in backward runs the same operators again: selective checkpointing counts all operators, kept or
        # not. The compiler keeps nothing that backward does not need.
        with torch.no_grad(), nullcontext() if torch.compiler.is_compiling() else keeping_nothing():
            found = self._observe(q.detach(), keys().detach(), mask)
            own = self._largest[self._own_heads(q.shape[1])]
            own.copy_(torch.maximum(own, found))

    def _own_heads(self, heads: int) -> slice:
        """Return this rank's heads as a slice of the model's heads: all heads, or 1 / tp of them."""
        first = 0 if heads == len(self._largest) else heads * self._tp.get_local_rank()
        return slice(first, first + heads)

    def _observe(self, q: Tensor, k: Tensor, mask: AttentionMask) -> Tensor:
        """Return the largest logit of each head over this rank's queries, float64 `[heads]`.

        Collective over the cp ranks. q `[batch, heads, seq / cp, head_dim]`, k `[batch, kv_heads, seq / cp, head_dim]`.
        """
        batch, heads, queries, head_dim = q.shape
        if self._split.ranks > 1:
            k = self._split.in_order(compat.all_gather(k.unsqueeze(0), self._split.group))
        keys = torch.arange(k.shape[2], device=q.device)
        positions = self._split.part(keys)
        largest = q.new_full((heads,), -torch.inf)
        grouped = q.unflatten(1, (k.shape[1], -1))  # [batch, kv_heads, group, queries, head_dim]
        for start in range(0, queries, ROWS):
            rows = slice(start, start + ROWS)
            # Without context parallelism, no query of this slice sees a key after the slice.
            seen = slice(None) if self._split.ranks > 1 else slice(min(start + ROWS, queries))
            logits = grouped[:, :, :, rows] @ k[:, :, None, seen].mT
            table = dense_part(mask.window, mask.documents, positions[rows], keys[seen])
            logits = logits.masked_fill_(~table.unsqueeze(1), -torch.inf)
            largest = torch.maximum(largest, logits.amax((0, 3, 4)).flatten())
        return largest.double() * head_dim**-0.5


class ObservedLatents(ObservedAttention):
    """Like `ObservedAttention`, for an attention function with `attend_latent`."""

    def attend_latent(
        self, layer: LatentAttention, q: Tensor, latent: Tensor, key: Tensor, mask: AttentionMask
    ) -> Tensor:
        """Record the largest logits, then call the attention function's `attend_latent`."""
        self._add(q, mask, lambda: layer.expand(latent, key)[0])
        inner: Any = self._attend
        return inner.attend_latent(layer, q, latent, key, mask)
