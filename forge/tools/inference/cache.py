"""`CachedScores`: next-token logits of growing texts, with a KV cache.

The Transformer is the training model. During a forward, two of its extension points are replaced. Every layer's attention
function stores keys and values. The loss is replaced by a module that returns the logits of the last token of each text.

Shorter texts are padded at the end, so a token's place in the cache is its position in the text. Texts of different
lengths can therefore form one batch, with the model's own attention mask. Later tokens overwrite the padding before any
token attends to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from forge.model import AttentionFunction, AttentionMask, LatentAttention, LinearAttention
from forge.model.loss import head_logits
from forge.model.sdpa import visible
from forge.parallel.float8.layers import BlockFormatLinear
from forge.runtime.errors import UserError
from forge.tools.inference.sampling import padded
from forge.tools.inference.scoring import replaced
from forge.tools.inference.states import Places, StateCache

# A full cache grows by half its size, at least by this many places.
_GROWTH = 128


class CachedScores:
    """Next-token logits (`NextScores`) of `model`, an unsharded Transformer in this process.

    If every text is the same as in the previous call or has one more token, a call computes only the last tokens. Otherwise
    the call rebuilds the cache. The model sees the last `model.seq_len` tokens of a text, at positions 0, 1, ..., as without
    a cache. Each further token of a longer text shifts all positions, so the call rebuilds the cache.

    Memory per text, token and layer: 2 * kv_heads * head_dim numbers, or kv_lora_rank + qk_rope_head_dim with latent
    attention. A linear-attention layer has one state per text and head. Raises UserError for an attention module without
    `attend`.
    """

    def __init__(self, model: Any):
        self._model = model
        attentions: list[Any] = [block.attention for block in model.layers.values()]
        if without := [type(one).__name__ for one in attentions if not hasattr(one, "attend")]:
            raise UserError(
                f"{without[0]} has no `attend`, so its keys and values cannot be cached; generate with --no-cache, or call "
                "self.attend as docs/internals/extending/own-model.md shows"
            )
        self._layers: list[Any] = [
            StateCache(one.attend) if isinstance(one, LinearAttention) else _LatentCache(one.attend)
            for one in attentions
        ]
        self._texts: list[list[int]] = []

    @torch.no_grad()
    def __call__(self, texts: Sequence[Sequence[int]]) -> Tensor:
        """Return the logits of the next token of each text, `[texts, vocab]`.

        Dtype: the wider of float32 and the compute dtype.
        """
        seen = [list(text[-self._model.seq_len :]) for text in texts]
        before, self._texts = self._texts, []  # the cache is invalid if this call fails
        device = next(self._model.parameters()).device
        last = torch.tensor([len(text) - 1 for text in seen], device=device)
        # Whether each text equals its version in the previous call, or is one token longer.
        continues = len(before) == len(seen) and all(
            text == old or text[:-1] == old for old, text in zip(before, seen, strict=True)
        )
        if continues:
            tokens = torch.tensor([[text[-1]] for text in seen], device=device)
            places = Places(last[:, None], max(map(len, seen)))
            logits = self._read(tokens, places, torch.zeros_like(last))
        else:
            logits = self._read(padded(seen).to(device), None, last)
        self._texts = seen
        return logits

    def _read(self, tokens: Tensor, places: Places | None, last: Tensor) -> Tensor:
        """Run the model on tokens `[texts, seq]`. Return the logits at index `last` `[texts]` of each text, `[texts, vocab]`.

        places: positions of the tokens, for one new token per text; None: `tokens` are whole texts.
        """
        for layer in self._layers:
            layer.places, layer.last = places, last
        with replaced(self._model, _LastScores(last, self._model.config.logit_soft_cap), self._layers):
            return self._model(tokens, None, None if places is None else places.of_text)


class KeyValueCache:
    """The attention function of one layer. Stores keys and values, `[texts, kv_heads, places, head_dim]` each.

    places: positions of the next call's tokens, which attend to the stored keys. None: the next call has whole texts.
    The caller may also set `last` or `begin`, as for a linear-attention layer; they have no effect here.
    """

    def __init__(self, inner: AttentionFunction):
        self._inner = inner
        self.places: Places | None = None
        self._keys = self._values = torch.empty(0)

    def back_to(self, place: int) -> int:
        """Return `place`, because a KV cache can continue at any position."""
        return place

    def prepare(self, mask: AttentionMask, x: Tensor) -> AttentionMask:
        if self.places is None:
            return self._inner.prepare(mask, x)
        sees = visible(mask.window, None)
        queries, keys = self.places.of_text[:, None, :, None], torch.arange(self.places.end, device=x.device)
        # Without documents, visibility does not depend on the batch and head indices, so any value serves for them.
        table = sees(queries, queries, queries, keys)  # [texts, 1, n, places]
        return mask.with_table(table)

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, sinks: Tensor | None = None
    ) -> Tensor:
        """Store k and v, and attend from q to all stored keys. Shapes: see `AttentionFunction`."""
        k, v = self._kept(k, v)
        return self._inner(q, k, v, mask, sinks)

    def _kept(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store k and v, `[texts, kv_heads, seq, any size]`. Return all keys and values stored so far, in the same layout."""
        if self.places is None:
            self._keys, self._values = k.contiguous(), v.contiguous()
            return k, v
        places, end = self.places
        self._keys, self._values = _with_room(self._keys, end), _with_room(self._values, end)
        at = (torch.arange(len(places), device=places.device)[:, None], slice(None), places)
        self._keys[at], self._values[at] = k.transpose(1, 2), v.transpose(1, 2)
        return self._keys[:, :, :end], self._values[:, :, :end]


class _LatentCache(KeyValueCache):
    """A KV cache that stores the latents of a `LatentAttention` layer, instead of keys and values."""

    def attend_latent(
        self, layer: LatentAttention, q: Tensor, latent: Tensor, key: Tensor, mask: AttentionMask
    ) -> Tensor:
        """Store the latents, and attend like `LatentAttention` from q to all stored latents.

        A single query per text attends to the cached latents directly (absorbed projections). For whole texts, and under a
        float8 block format, the latents are expanded into keys and values.
        """
        latent, key = (kept.squeeze(1) for kept in self._kept(latent.unsqueeze(1), key.unsqueeze(1)))
        # In float8, the up-projection must quantise latents and weights as in training, so it cannot be absorbed.
        in_float8 = isinstance(layer.wkv_b, BlockFormatLinear) or type(layer.wkv_b).__module__.startswith(
            "torchao."
        )
        if self.places is None or in_float8:
            return self._inner(q, *layer.expand(latent, key), mask, layer.sink_logits())
        return layer.absorbed(self._inner, q, latent, key, mask)


def _with_room(kept: Tensor, places: int) -> Tensor:
    """Return `kept`, `[texts, kv_heads, size, head_dim]`, or a larger copy if its size is less than `places`."""
    size = kept.shape[2]
    if size >= places:
        return kept
    # Fill with zeros: a masked place has weight 0, but 0 times uninitialised memory may be NaN.
    room = max(places, size + max(_GROWTH, size // 2))
    larger = kept.new_zeros(*kept.shape[:2], room, kept.shape[3])
    larger[:, :, :size] = kept
    return larger


class _LastScores(nn.Module):
    """A replacement of the loss. Computes and returns only the logits of token `last` of each text."""

    def __init__(self, last: Tensor, soft_cap: float):
        super().__init__()
        self._last, self._soft_cap = last, soft_cap

    def forward(self, hidden: Tensor, head_weight: Tensor, labels: Tensor | None) -> Tensor:
        """Return logits `[texts, vocab]`, from hidden `[texts, seq, dim]` and head_weight `[vocab, dim]`."""
        rows = torch.arange(len(self._last), device=hidden.device)
        return head_logits(hidden[rows, self._last], head_weight, self._soft_cap)
