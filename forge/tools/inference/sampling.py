"""Generate texts token by token: sampling, the loop, and incremental decoding."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from forge.data.tokenizer import Tokenizer

NextScores = Callable[[Sequence[Sequence[int]]], Tensor]
"""Maps non-empty texts, as token ids, to the logits of the next token of each text, `[texts, vocab]`."""


@dataclass(frozen=True)
class Sampling:
    """The rule for choosing a token from logits.

    temperature: above 0: draw from softmax(logits / temperature). 0: take the likeliest token; of equally likely
    tokens, the one with the lowest id. top_k: draw only from the k likeliest tokens; 0: all. top_p: of these, draw only
    from the smallest set of likeliest tokens whose total probability is at least top_p. seed: the random number for
    position n of a text depends only on (seed, n).
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
    """Continue every prompt by at most `max_tokens` tokens. Yield, per step, a list with the new token of each text.

    stop: called as stop(row, new tokens of the text) after each token. If it returns True, the text ends, and its later
    entries are None. A text does not depend on the other prompts. Processes with equal scores choose equal tokens without
    communication. Collective if `next_scores` is.

    Raises ValueError for an empty prompt and for scores that are not finite.
    """
    if not all(prompts):
        raise ValueError("the prompt has no tokens; give it at least one")
    texts = [list(prompt) for prompt in prompts]
    growing = [True] * len(texts)
    for _ in range(max_tokens):
        if not any(growing):
            return
        # One copy to the host for all texts. In float64 on the CPU, the choice does not depend on the device.
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
    """Return a `NextScores` without cache. Each call recomputes the last `seq_len` tokens of every text. Works on any layout.

    model_call: maps tokens, int64 on the CPU `[texts, seq]`, to logits `[texts, seq, vocab]`.
    """

    def next_scores(texts: Sequence[Sequence[int]]) -> Tensor:
        seen = [text[-seq_len:] for text in texts]
        logits = model_call(padded(seen))
        return logits[torch.arange(len(seen)), torch.tensor([len(text) - 1 for text in seen])]

    return next_scores


def padded(texts: Sequence[Sequence[int]]) -> Tensor:
    """Return the texts as one tensor, int64 `[texts, longest]`, padded at the end with token 0.

    Attention is causal, so no token of a text attends to the padding.
    """
    longest = max(map(len, texts))
    return torch.tensor([[*text, *[0] * (longest - len(text))] for text in texts])


def choose_token(scores: Tensor, sampling: Sampling, position: int) -> int:
    """Return the token id for position `position`, by the rule `sampling`. scores: logits, float64 on the CPU, `[vocab]`.

    Raises ValueError if the largest score is not finite.
    """
    best = int(scores.argmax())
    if not bool(scores[best].isfinite()):
        raise ValueError("the model's scores are not finite; its weights are broken")
    if sampling.temperature == 0.0:
        return best
    scores = scores / sampling.temperature
    order: Tensor | None = None
    if sampling.top_k or sampling.top_p < 1.0:
        # A stable sort ranks the lower token id first among equal scores.
        scores, order = scores.sort(descending=True, stable=True)
        scores = scores[: sampling.top_k or None]
    cumulative = scores.softmax(-1).cumsum(-1)
    if sampling.top_p < 1.0:
        # Keep the token at which the sum reaches top_p, so that at least the likeliest token stays.
        cumulative = cumulative[: int((cumulative < sampling.top_p).sum()) + 1]
    # Draw a uniform number in [0, 1) from a hash. The numbers of a random generator might change with its version.
    key = hashlib.blake2b(f"{sampling.seed}:sample:{position}".encode(), digest_size=8).digest()
    draw = int.from_bytes(key, "little") / 2**64 * float(cumulative[-1])
    place = int(torch.searchsorted(cumulative, draw, right=True))
    place = min(place, len(cumulative) - 1)
    return place if order is None else int(order[place])


class TextStream:
    """Decode new tokens after a prompt incrementally: return their text as soon as it is final.

    The text of a token depends on earlier tokens: a character may take several tokens, and a tokenizer may drop a space
    at the start of a text. New tokens are therefore decoded together with the last emitted tokens. The text of an
    incomplete character is held back. If the prompt begins a character and new tokens complete it, the character
    belongs to the new text.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]):
        self._tokenizer = tokenizer
        self._emitted = list(prompt)
        self._waiting: list[int] = []
        self.text = ""

    def add(self, token: int) -> str:
        """Add a token. Return the text that is now final, which may be empty."""
        self._waiting.append(token)
        new = self._new_text()
        return "" if not new or new.endswith("\ufffd") else self._emit(new)

    def end(self) -> str:
        """End the text. Return the text held back so far, with U+FFFD for an incomplete character."""
        return self._emit(self._new_text()) if self._waiting else ""

    def _new_text(self) -> str:
        before = self._tokenizer.decode(self._emitted)
        whole = self._tokenizer.decode(self._emitted + self._waiting)
        while not whole.startswith(before):
            before = before[:-1]  # drop a U+FFFD of a character completed by new tokens
        return whole[len(before) :]

    def _emit(self, new: str) -> str:
        self._emitted, self._waiting = self._waiting, []
        self.text += new
        return new
