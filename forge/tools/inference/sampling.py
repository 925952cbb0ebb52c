"""Generate texts token by token: sampling, the loop, and incremental decoding."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from forge.data.tokenizer import Tokenizer

NextScores = Callable[[Sequence[Sequence[int]]], Tensor]
"""Texts, none of them empty -> logits `[texts, vocab]` of the next token of each."""


@dataclass(frozen=True)
class Sampling:
    """The rule by which a token is chosen from its scores.

    `temperature` 0 takes the likeliest token, and among equals the lowest id. Otherwise a token is drawn from
    softmax(logits / temperature). The draw is restricted first to the `top_k` likeliest tokens (0: all), then to the fewest
    likeliest ones with total probability `top_p`. The draw for position n of a text depends only on (`seed`, n) and the
    scores.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0


def generate(
    next_scores: NextScores,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    sampling: Sampling,
    stop: Callable[[int, list[int]], bool] = lambda row, new: False,
) -> Iterator[list[int | None]]:
    """Continue every prompt by at most `max_tokens` tokens. Yields a list per step, with the new token of each text.

    After each token `stop(row, its new tokens)` is called. If it returns True, the text has ended, and its entry is None
    from then on. A text depends only on its own prompt. Processes that see the same scores choose the same tokens without
    communication.

    Raises ValueError for an empty prompt, and for scores that are not finite.
    """
    if not all(prompts):
        raise ValueError("the prompt has no tokens; give it at least one")
    texts = [list(prompt) for prompt in prompts]
    growing = [True] * len(texts)
    for _ in range(max_tokens):
        if not any(growing):
            return
        # One copy to the host for all of them; in float64 the choice is the same whatever the device.
        scores = next_scores(texts).detach().to("cpu").to(torch.float64)
        chosen: list[int | None] = [None] * len(texts)
        for row, text in enumerate(texts):
            if growing[row]:
                token = choose_token(scores[row], sampling, position=len(text))
                text.append(token)
                chosen[row] = token
                growing[row] = not stop(row, text[len(prompts[row]) :])
        yield chosen


def recomputed(model_call: Callable[[Tensor], Tensor], seq_len: int) -> NextScores:
    """Return a function that runs a whole forward over each text's last `seq_len` tokens: slow, but works on any layout.

    `model_call` maps tokens int64 CPU `[texts, seq]` to logits `[texts, seq, vocab]`.
    """

    def next_scores(texts: Sequence[Sequence[int]]) -> Tensor:
        seen = [text[-seq_len:] for text in texts]
        logits = model_call(padded(seen))
        return logits[torch.arange(len(seen)), torch.tensor([len(text) - 1 for text in seen])]

    return next_scores


def padded(texts: Sequence[Sequence[int]]) -> Tensor:
    """Return the texts as int64 `[texts, longest]`, padded at the end with token 0.

    No token of a text attends to the padding.
    """
    longest = max(map(len, texts))
    return torch.tensor([[*text, *[0] * (longest - len(text))] for text in texts])


def choose_token(scores: Tensor, sampling: Sampling, position: int) -> int:
    """Return a token drawn from `scores` float64 CPU `[vocab]` for this position. ValueError if none is finite."""
    best = int(scores.argmax())
    if not bool(scores[best].isfinite()):
        raise ValueError("the model's scores are not finite; its weights are broken")
    if sampling.temperature == 0.0:
        return best
    scores = scores / sampling.temperature
    order: Tensor | None = None
    if sampling.top_k or sampling.top_p < 1.0:
        # Stable: among equal scores the lower token is likelier.
        scores, order = scores.sort(descending=True, stable=True)
        scores = scores[: sampling.top_k or None]
    cumulative = scores.softmax(-1).cumsum(-1)
    if sampling.top_p < 1.0:
        # Keep the first position at which the sum reaches top_p, so that the likeliest token always stays.
        cumulative = cumulative[: int((cumulative < sampling.top_p).sum()) + 1]
    # A uniform number in [0, 1) from a hash: it does not depend on the version of a random generator.
    key = hashlib.blake2b(f"{sampling.seed}:sample:{position}".encode(), digest_size=8).digest()
    draw = int.from_bytes(key, "little") / 2**64 * float(cumulative[-1])
    place = int(torch.searchsorted(cumulative, draw, right=True))
    place = min(place, len(cumulative) - 1)
    return place if order is None else int(order[place])


class TextStream:
    """The text that new tokens add to a prompt, returned as soon as it is final.

    The text of a token depends on earlier tokens: a character may take several tokens, and a tokenizer may drop a space
    at the start of a text. So the last emitted tokens are decoded together with new ones, and an incomplete character
    waits. If new tokens complete a character that the prompt begins, the character belongs to the new text.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]):
        self._tokenizer = tokenizer
        self._emitted = list(prompt)
        self._waiting: list[int] = []
        self.text = ""

    def add(self, token: int) -> str:
        """Add a token, and return the text that has become final; it may be empty."""
        self._waiting.append(token)
        new = self._new_text()
        return "" if not new or new.endswith("\ufffd") else self._emit(new)

    def end(self) -> str:
        """Return the rest of the text after the last token. An incomplete character becomes U+FFFD."""
        return self._emit(self._new_text()) if self._waiting else ""

    def _new_text(self) -> str:
        before = self._tokenizer.decode(self._emitted)
        whole = self._tokenizer.decode(self._emitted + self._waiting)
        while not whole.startswith(before):
            before = before[:-1]  # U+FFFD, if new tokens complete the character
        return whole[len(before) :]

    def _emit(self, new: str) -> str:
        self._emitted, self._waiting = self._waiting, []
        self.text += new
        return new
