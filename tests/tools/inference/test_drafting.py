"""Drafting does not change the text, and saves forwards when drafts are accepted."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from forge.model import Transformer
from forge.tools.inference import CachedScores, DraftedScores, Sampling, generate, recomputed
from tests.support.small_models import VOCAB, small_config, small_model

MODELS: dict[str, dict[str, Any]] = {
    "one module": {"mtp": {"depth": 1}},
    "three modules": {"mtp": {"depth": 3}, "tie_embeddings": True, "n_kv_heads": 1},
    "windows": {"mtp": {"depth": 2}, "layer_pattern": ["sliding", "full", "nope"], "sliding_window": 3},
    "linear layers": {
        "mtp": {"depth": 2},
        "tie_embeddings": True,
        "n_layers": 3,
        "layer_pattern": ["linear", "full"],
        "linear_attention": {"n_key_heads": 2, "key_head_dim": 4, "conv_size": 3, "chunk_size": 4},
    },
    "decays by channel": {
        "mtp": {"depth": 2},
        "layer_pattern": ["linear", "full"],
        "linear_attention": {"kind": "kimi_delta", "n_key_heads": 2, "key_head_dim": 4, "chunk_size": 4},
    },
    "experts": {"mtp": {"depth": 2}, "moe": {"n_experts": 4, "top_k": 2, "expert_dim": 8}},
}
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


def model_of(name: str, seq_len: int = 64) -> Transformer:
    return small_model(small_config(**MODELS[name]), seq_len)


def written(
    scores: Any, sampling: Sampling, prompt: list[int] = PROMPT, tokens: int = 24
) -> list[int | None]:
    return [step[0] for step in generate(scores, [prompt], tokens, sampling)]


@pytest.mark.long
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("prompt", [PROMPT, [2]], ids=["prompt", "one token"])
def test_drafts_change_no_token(name: str, temperature: float, prompt: list[int]) -> None:
    model, sampling = model_of(name), Sampling(temperature, seed=3)
    assert written(DraftedScores(model), sampling, prompt) == written(CachedScores(model), sampling, prompt)


@pytest.mark.long
@torch.no_grad()
@pytest.mark.parametrize("name", ["three modules", "linear layers"])
def test_scores_are_those_without_drafts_wherever_the_text_goes(name: str) -> None:
    model = model_of(name)
    drafted, text = DraftedScores(model), list(PROMPT)
    for step in range(20):
        exact = recomputed(lambda tokens: model(tokens), model.seq_len)([text])
        torch.testing.assert_close(drafted([text]), exact, rtol=0, atol=1e-9)
        # Mostly the likeliest token, for accepted drafts; sometimes another token, or fewer tokens.
        token = int(exact.argmax()) if step % 3 else (7 * step) % VOCAB
        text = [*text, token] if step % 7 != 6 else text[:-3]


def test_a_text_beyond_the_models_length_is_read_again() -> None:
    model, greedy = model_of("one module", seq_len=12), Sampling()
    assert written(DraftedScores(model), greedy) == written(CachedScores(model), greedy)


@pytest.mark.parametrize(("name", "forwards"), [("three modules", 7), ("linear layers", 9)])
def test_accepted_drafts_save_forwards(name: str, forwards: int) -> None:
    """Modules pass on the embedding of the token ahead and the head repeats it, so every draft is accepted."""
    model = model_of(name)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith((".wo.weight", ".w2.weight")):
                parameter.zero_()
            elif name.endswith("norm.weight"):
                parameter.fill_(1.0)
            elif name.endswith("projection.weight"):
                parameter.copy_(torch.eye(24, 48))
    drafted = DraftedScores(model)
    tokens = written(drafted, Sampling(), tokens=24)
    assert tokens == written(CachedScores(model), Sampling(), tokens=24)
    assert len(set(tokens)) == 1 and drafted.forwards == forwards


def test_a_model_without_modules_is_refused() -> None:
    with pytest.raises(ValueError, match=r"\[model.mtp\]"):
        DraftedScores(small_model(small_config(), 12))
