"""Caches of a linear-attention layer. They hold the recurrent state of each text, and the last inputs of the convolution."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from forge.model import AttentionMask, Recurrence
from forge.model.delta_rule import chunked_delta_rule, recurrent_delta_rule
from forge.model.linear_attention import causal_convolution


class Places(NamedTuple):
    """Positions of n new tokens of each text. of_text: int64 `[texts, n]`. end: upper bound (exclusive) of all positions."""

    of_text: Tensor
    end: int


class StateCache:
    """The `Recurrence` of one linear-attention layer, with a cached state per text. The caller sets `places` and `last`.

    places: positions of one new token per text. Forward reads these tokens and advances the cached states. If the position
    of a text has not changed, its state stays. None: forward reads whole texts, padded at the end, and caches the state
    after the last token of each text.

    last: position of the last token of each text, int64 `[texts]`; used for whole texts.
    """

    def __init__(self, inner: Recurrence):
        self._inner = inner
        self.places: Places | None = None
        self.last: Tensor | None = None
        # For each text: position of its last token, [texts, 1]; last inputs of the convolution, [texts, size, channels]; the
        # state after the last token.
        self._seen = self._window = self._state = torch.empty(0)

    def prepare(self, mask: AttentionMask, x: Tensor) -> AttentionMask:
        return self._inner.prepare(mask, x) if self.places is None else mask

    def convolve(self, x: Tensor, weight: Tensor, mask: AttentionMask) -> Tensor:
        if self.places is not None:
            moved = torch.cat([self._window[:, 1:], x], dim=1)
            self._window = torch.where(self._advances(self.places), moved, self._window)
            return causal_convolution(self._window, weight, None)
        assert self.last is not None
        size = weight.shape[1]
        index = self.last[:, None] + torch.arange(1, size + 1, device=x.device)
        padded = F.pad(x, (0, 0, size, 0))
        self._window = padded.gather(1, index.unsqueeze(-1).expand(-1, -1, x.shape[-1]))
        return self._inner.convolve(x, weight, mask)

    def recur(
        self, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, mask: AttentionMask, size: int
    ) -> Tensor:
        # A token with log decay 0 and write strength 0 leaves the state unchanged.
        if self.places is not None:
            stays = ~self._advances(self.places)
            gates = log_decay.masked_fill(stays.unsqueeze(-1), 0.0), beta.masked_fill(stays, 0.0)
            out, self._state = recurrent_delta_rule(q, k, v.to(q.dtype), *gates, state=self._state)
            self._seen = self.places.of_text
            return out
        assert self.last is not None
        padding = (torch.arange(q.shape[1], device=q.device) > self.last[:, None]).unsqueeze(-1)
        gates = log_decay.masked_fill(padding.unsqueeze(-1), 0.0), beta.masked_fill(padding, 0.0)
        out, self._state = chunked_delta_rule(q, k, v.to(q.dtype), *gates, None, size)
        self._seen = self.last[:, None]
        return out

    def _advances(self, places: Places) -> Tensor:
        """Return a mask of the texts with a new token since the previous call, bool `[texts, 1, 1]`."""
        return (places.of_text > self._seen)[..., None]


class TextStates:
    """The `Recurrence` of one linear-attention layer, for one text. Reads tokens from position `begin`.

    Reading starts from the cached state at `begin`. kept: number of most recent tokens whose states are cached. At most
    this many tokens can be taken back.
    """

    def __init__(self, inner: Recurrence, kept: int):
        self._inner, self._kept = inner, kept
        self.begin = 0
        self._inputs = torch.empty(0)  # of the convolution, [1, tokens, channels]
        self._states: dict[int, Tensor] = {}  # number of tokens -> state after them

    def back_to(self, place: int) -> int:
        """Return the last position, at most `place`, with a cached state; 0 if there is none."""
        return max((number for number in self._states if number <= place), default=0)

    def prepare(self, mask: AttentionMask, x: Tensor) -> AttentionMask:
        return mask

    def convolve(self, x: Tensor, weight: Tensor, mask: AttentionMask) -> Tensor:
        self._inputs = torch.cat([self._inputs[:, : self.begin], x], dim=1) if self.begin else x
        before = weight.shape[1] - 1
        padded = F.pad(self._inputs, (0, 0, before, 0))
        return causal_convolution(padded[:, self.begin :], weight, None)

    def recur(
        self, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, mask: AttentionMask, size: int
    ) -> Tensor:
        v = v.to(q.dtype)

        def part(rows: slice) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
            return q[:, rows], k[:, rows], v[:, rows], log_decay[:, rows], beta[:, rows]

        state = self._states.get(self.begin)
        oldest = self.begin - self._kept
        self._states = {n: old for n, old in self._states.items() if oldest < n <= self.begin}
        seq, outs = q.shape[1], []
        body = max(0, seq - self._kept) if state is None else 0
        if body:
            out, state = chunked_delta_rule(*part(slice(body)), None, size)
            outs.append(out)
        for t in range(body, seq):
            out, state = recurrent_delta_rule(*part(slice(t, t + 1)), state=state)
            outs.append(out)
            self._states[self.begin + t + 1] = state
        return torch.cat(outs, dim=1)
