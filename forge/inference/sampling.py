"""Choosing the next token, and writing texts one token after another."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

NextScores = Callable[[Sequence[Sequence[int]]], Tensor]
"""Logits `[texts, vocab]` of the token that follows each of some texts, none of them empty."""


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen from its scores.

    `temperature` 0 takes the likeliest token, the lowest of equals. Else one is drawn from softmax(logits /
    temperature), cut down first to the `top_k` likeliest tokens (0: all), then to the fewest likeliest ones that hold
    `top_p` of the rest. The draw for position n of a text depends on (`seed`, n) and the scores alone.
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
    """Go on with every prompt by at most `max_tokens` tokens; yields one list a step: each text's new token.

    A text ends when `stop(row, its new tokens)` says so, which it is asked after each token; from then on its entry is
    None. A text depends on its own prompt only, not on those beside it. Processes that see the same scores call this
    together and agree without a word.

    Raises ValueError for an empty prompt, which gives nothing to score the first token from, and for scores that are
    not numbers.
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
                token = choose(scores[row], sampling, position=len(text))
                text.append(token)
                chosen[row] = token
                growing[row] = not stop(row, text[len(prompts[row]) :])
        yield chosen


def recomputed(model_call: Callable[[Tensor], Tensor], seq_len: int) -> NextScores:
    """Scores by a whole forward over each text's last `seq_len` tokens: slow, but it asks nothing of a model's layout.

    `model_call` turns tokens int64 CPU `[texts, seq]` into logits `[texts, seq, vocab]`.
    """

    def next_scores(texts: Sequence[Sequence[int]]) -> Tensor:
        seen = [text[-seq_len:] for text in texts]
        logits = model_call(padded(seen))
        return logits[torch.arange(len(seen)), torch.tensor([len(text) - 1 for text in seen])]

    return next_scores


def padded(texts: Sequence[Sequence[int]]) -> Tensor:
    """int64 `[texts, longest]`, filled with token 0 at the end, where a causal model's earlier tokens do not see it."""
    longest = max(map(len, texts))
    return torch.tensor([[*text, *[0] * (longest - len(text))] for text in texts])


def choose(scores: Tensor, sampling: Sampling, position: int) -> int:
    """One token from `scores` float64 CPU `[vocab]`, for this position of its text. ValueError if none is a number."""
    best = int(scores.argmax())
    if not bool(scores[best].isfinite()):
        raise ValueError("the model's scores are not finite; its weights are broken")
    if sampling.temperature == 0.0:
        return best
    scores = scores / sampling.temperature
    order: Tensor | None = None
    if sampling.top_k or sampling.top_p < 1.0:
        # Stable: of equal scores the lower token is the likelier one.
        scores, order = scores.sort(descending=True, stable=True)
        scores = scores[: sampling.top_k or None]
    cumulative = scores.softmax(-1).cumsum(-1)
    if sampling.top_p < 1.0:
        # The first place where the sum reaches top_p is still in; the likeliest token always is.
        cumulative = cumulative[: int((cumulative < sampling.top_p).sum()) + 1]
    draw = _uniform(sampling.seed, position) * float(cumulative[-1])
    place = int(torch.searchsorted(cumulative, draw, right=True))
    place = min(place, len(cumulative) - 1)
    return place if order is None else int(order[place])


def _uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that depends on nothing else; no generator's algorithm to change under us."""
    key = hashlib.blake2b(f"{seed}:sample:{position}".encode(), digest_size=8).digest()
    return int.from_bytes(key, "little") / 2**64
