"""Writing text with a model, one token after another. Without a cache: each costs a whole forward."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import torch
from torch import Tensor


def generate(
    model_call: Callable[[Tensor], Tensor],
    prompt_ids: list[int],
    max_tokens: int,
    temperature: float,
    seed: int,
    seq_len: int,
    eos: int | None = None,
) -> list[int]:
    """The tokens that follow `prompt_ids`, at most `max_tokens`; ends after `eos`, which is the last one
    then.

    `model_call` turns tokens int64 CPU `[1, seq]` into logits `[1, seq, vocab]` and sees at most the last
    `seq_len` tokens. Temperature 0 takes the likeliest token (the lowest of equals). Otherwise the draw for
    position n of the text depends on (seed, n) and the logits alone: ranks that see the same logits call this
    together and agree without a word. Raises ValueError for an empty prompt: there is nothing to score the
    first token from.
    """
    if not prompt_ids:
        raise ValueError("the prompt has no tokens; give it at least one")
    text = list(prompt_ids)
    for _ in range(max_tokens):
        logits = model_call(torch.tensor([text[-seq_len:]]))[0, -1]
        text.append(choose(logits, temperature, seed, position=len(text)))
        if text[-1] == eos:
            break
    return text[len(prompt_ids) :]


def choose(logits: Tensor, temperature: float, seed: int, position: int) -> int:
    """One token from `logits` `[vocab]`: the likeliest, or a draw from softmax(logits / temperature)."""
    # On the CPU in float64: the same choice whatever the device.
    scores = logits.detach().to(device="cpu", dtype=torch.float64)
    if temperature == 0.0:
        return int(scores.argmax())
    probabilities = (scores / temperature).softmax(-1)
    key = hashlib.blake2b(f"{seed}:sample:{position}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(key, "little") >> 1)
    return int(torch.multinomial(probabilities, 1, generator=generator))
