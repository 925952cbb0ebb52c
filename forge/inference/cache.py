"""Scores of growing texts by a model that remembers the keys and values of what it has read.

The Transformer is the one that trains. While it reads for a cache, two of its seams are taken: every layer's attention
function is one that keeps keys and values, and the loss is one that scores the last token of each text only.

A token's place in the cache is its position in the text, so the cached rule of who sees whom is the model's own, for
texts of any lengths side by side: shorter ones are padded at the end, where later tokens overwrite the padding before
anybody sees it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from forge.inference.lend import lent
from forge.inference.sampling import padded
from forge.model import AttentionFunction, AttentionMask
from forge.model.loss import head_logits
from forge.model.mask import visible

# Places are added in steps of at least this many, and by half of what is there.
_GROWTH = 128


class CachedScores:
    """`NextScores` of `model`, a whole Transformer in this process.

    When every text is one of the last call, or that and one token more, only those last tokens are computed; any other
    texts begin anew. Like without a cache the model sees each text's last `model.seq_len` tokens, at positions 0, 1,
    ...; a text that outgrows them is read anew for each further token, because all its positions change.

    Holds per text and token 2 * kv_heads * head_dim numbers for each layer.
    """

    def __init__(self, model: Any):
        self._model = model
        self._layers = [_LayerCache(block.attention.attend) for block in model.layers.values()]
        self._texts: list[list[int]] = []

    @torch.no_grad()
    def __call__(self, texts: Sequence[Sequence[int]]) -> Tensor:
        """Logits `[texts, vocab]` of the next token of each text, in promote(float32, compute)."""
        seen = [list(text[-self._model.seq_len :]) for text in texts]
        before, self._texts = self._texts, []  # nothing is remembered if this call fails
        device = self._model.rope_cos.device
        last = torch.tensor([len(text) - 1 for text in seen], device=device)
        if _continue(before, seen):
            tokens = torch.tensor([[text[-1]] for text in seen], device=device)
            places = _Places(last, max(map(len, seen)))
            logits = self._read(tokens, places, torch.zeros_like(last))
        else:
            logits = self._read(padded(seen).to(device), None, last)
        self._texts = seen
        return logits

    def _read(self, tokens: Tensor, places: _Places | None, last: Tensor) -> Tensor:
        """Logits `[texts, vocab]` at index `last` `[texts]` of tokens `[texts, seq]`, whole texts if places is None."""
        for layer in self._layers:
            layer.places = places
        with lent(self._model, _LastScores(last, self._model.config.logit_soft_cap), self._layers):
            return self._model(tokens, None, None if places is None else places.of_text[:, None])


def _continue(before: list[list[int]], now: list[list[int]]) -> bool:
    return len(before) == len(now) and all(
        new == old or (len(new) == len(old) + 1 and new[:-1] == old)
        for old, new in zip(before, now, strict=True)
    )


class _Places(NamedTuple):
    """Where the one token that each text has now is put, int64 `[texts]`; all are below `end`."""

    of_text: Tensor
    end: int


class _LayerCache:
    """The attention function of one layer that keeps what it is given: keys and values `[texts, kv_heads, places, head_dim]`.

    With `places` None whole texts are read, which is `inner`'s work on them; else one token of each.
    """

    def __init__(self, inner: AttentionFunction):
        self._inner = inner
        self.places: _Places | None = None
        self._keys = self._values = torch.empty(0)

    def prepare(self, mask: AttentionMask, x: Tensor) -> AttentionMask:
        if self.places is None:
            return self._inner.prepare(mask, x)
        sees = visible(mask.window, None)
        queries, keys = self.places.of_text.view(-1, 1, 1, 1), torch.arange(self.places.end, device=x.device)
        table = sees(
            queries, queries, queries, keys
        )  # [texts, 1, 1, places]; no documents, so no text is asked for
        return AttentionMask(mask.window, None, mask.soft_cap, table)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> Tensor:
        if self.places is None:
            self._keys, self._values = k.contiguous(), v.contiguous()
            return self._inner(q, k, v, mask)
        places, end = self.places
        self._keys, self._values = _with_room(self._keys, end), _with_room(self._values, end)
        at = (torch.arange(len(places), device=places.device), slice(None), places)
        self._keys[at], self._values[at] = k[:, :, 0], v[:, :, 0]
        return self._inner(q, self._keys[:, :, :end], self._values[:, :, :end], mask)


def _with_room(kept: Tensor, places: int) -> Tensor:
    """`kept` `[texts, kv_heads, places, head_dim]` itself, or a larger copy that has so many places."""
    there = kept.shape[2]
    if there >= places:
        return kept
    # Zeros: what nobody sees has weight 0, but 0 times what memory may hold is not always 0.
    larger = kept.new_zeros(*kept.shape[:2], there + max(_GROWTH, there // 2), kept.shape[3])
    larger[:, :, :there] = kept
    return larger


class _LastScores(nn.Module):
    """In place of the loss: logits of one place per text, so that those of a whole prompt never exist."""

    def __init__(self, last: Tensor, soft_cap: float):
        super().__init__()
        self._last, self._soft_cap = last, soft_cap

    def forward(self, hidden: Tensor, head_weight: Tensor, labels: Tensor | None) -> Tensor:
        rows = torch.arange(len(self._last), device=hidden.device)
        return head_logits(hidden[rows, self._last], head_weight, self._soft_cap)
