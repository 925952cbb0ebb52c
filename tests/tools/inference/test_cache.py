"""Generation with a cache equals generation that recomputes the whole prefix."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from forge.config.layout import Precision
from forge.model import Transformer
from forge.parallel.float8 import compute_in_float8
from forge.tools.inference import CachedScores, Sampling, generate, recomputed
from tests.support.small_models import VOCAB, small_config, small_model

MOE = {"n_experts": 6, "top_k": 2, "n_shared_experts": 1, "expert_dim": 8}
MLA = {"q_lora_rank": 10, "kv_lora_rank": 8, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5}
YARN = {"kind": "yarn", "factor": 4.0, "original_max_position": 8, "mscale_all_dim": 1.0}
LATENT = {"attention": "mla", "mla": MLA, "rope_scaling": YARN}
MODELS: dict[str, dict[str, Any]] = {
    "dense": {},
    "one kv head": {"n_kv_heads": 1},
    "all heads": {"n_kv_heads": 4, "tie_embeddings": True},
    "window": {"sliding_window": 5},
    "window in some layers": {"sliding_window": 3, "sliding_window_pattern": 2},
    "all kinds of layers": {
        "n_layers": 3,
        "layer_pattern": ["nope", "sliding", "full"],
        "sliding_window": 3,
        "sliding_rope_theta": 9.0,
    },
    "linear layers": {
        "layer_pattern": ["linear", "full"],
        "linear_attention": {"n_key_heads": 2, "n_value_heads": 4, "key_head_dim": 4, "chunk_size": 3},
    },
    "linear layers with a decay for each channel": {
        "layer_pattern": ["linear", "full"],
        "linear_attention": {"kind": "kimi_delta", "n_key_heads": 2, "key_head_dim": 4, "chunk_size": 3},
    },
    "sinks, gates, part of each head rotated": {
        "attention_sinks": True,
        "attention_gate": "element",
        "rope_fraction": 1 / 3,
    },
    "latent attention": LATENT,
    "latent attention with everything": LATENT
    | {
        "mla": MLA | {"q_lora_rank": 0},
        "layer_pattern": ["nope", "sliding"],
        "sliding_window": 3,
        "attention_sinks": True,
        "attention_gate": "head",
        "attention_soft_cap": 2.0,
    },
    "attention residuals": {"n_layers": 5, "residual": "attention", "residual_block_size": 2},
    "the parts of Kimi K3": {
        "n_layers": 4,
        "residual": "attention",
        "residual_block_size": 2,
        "attention": "mla",
        "mla": MLA,
        "attention_gate": "element",
        "layer_pattern": ["linear", "linear", "linear", "nope"],
        "linear_attention": {
            "kind": "kimi_delta",
            "n_key_heads": 2,
            "key_head_dim": 4,
            "chunk_size": 3,
            "full_rank_gate": True,
            "decay_bound": 5.0,
        },
        "moe": MOE | {"latent_dim": 10, "score_function": "sigmoid", "balance": "quantile"},
    },
    "soft caps": {"attention_soft_cap": 2.0, "logit_soft_cap": 3.0, "sliding_window": 4},
    "norms and biases": {"qk_norm": True, "attention_bias": True},
    "yarn": {"rope_scaling": {"kind": "yarn", "factor": 4.0, "original_max_position": 8}},
    "mixture of experts": {"moe": MOE},
    "sigmoid mixture": {"moe": MOE | {"score_function": "sigmoid", "n_dense_layers": 1}},
}
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [2], [7, 18, 2, 8]]
SEQ_LEN = 24


def model_of(name: str) -> Transformer:
    return small_model(small_config(**MODELS[name]), SEQ_LEN)


def whole(model: Transformer) -> Any:
    return recomputed(lambda tokens: model(tokens), model.seq_len)


@pytest.mark.parametrize("recipe", ["blockwise", "mxfp8"])
@pytest.mark.parametrize("name", ["dense", "latent attention", "mixture of experts"])
@torch.no_grad()
def test_scores_in_float8_are_those_without_a_cache(name: str, recipe: str) -> None:
    model = model_of(name)
    exact = whole(model)(PROMPTS)
    compute_in_float8(model, Precision(float8=recipe), "cpu")
    cached, texts = CachedScores(model), [list(prompt) for prompt in PROMPTS]
    assert not torch.allclose(cached(texts), exact, rtol=0, atol=1e-5)
    for step in range(4):
        torch.testing.assert_close(cached(texts), whole(model)(texts), rtol=0, atol=1e-9)
        for text in texts:
            text.append((7 * len(text) + step) % VOCAB)


@pytest.mark.long
@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_scores_are_those_without_a_cache(name: str) -> None:
    model = model_of(name)
    cached, texts = CachedScores(model), [list(prompt) for prompt in PROMPTS]
    for step in range(10):
        torch.testing.assert_close(cached(texts), whole(model)(texts), rtol=0, atol=1e-9)
        for row, text in enumerate(texts):
            if (step + row) % 4:  # now and then a text stays as it is
                text.append((7 * step + row) % VOCAB)


@pytest.mark.long
@pytest.mark.parametrize("name", ["dense", "window", "mixture of experts"])
@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_a_batch_generates_the_same_as_each_text_alone_without_a_cache(name: str, temperature: float) -> None:
    model, sampling = model_of(name), Sampling(temperature, top_k=9, top_p=0.9, seed=3)
    together = _write(CachedScores(model), PROMPTS, sampling)
    assert together == [_write(CachedScores(model), [prompt], sampling)[0] for prompt in PROMPTS]
    assert together == _write(whole(model), PROMPTS, sampling)
    assert len(set(together[0])) > 3, "a model that repeats itself would prove little"


def test_a_text_longer_than_the_context_continues_from_its_last_tokens() -> None:
    model, prompts = model_of("dense"), [list(range(20)), [1, 2]]
    sampling = Sampling()
    assert _write(CachedScores(model), prompts, sampling) == _write(whole(model), prompts, sampling)


def test_only_the_new_token_is_computed() -> None:
    model, seen = model_of("dense"), []
    model.embedding.register_forward_hook(lambda module, inputs, output: seen.append(tuple(inputs[0].shape)))
    _write(CachedScores(model), PROMPTS, Sampling(), max_tokens=3)
    assert seen == [(3, 8), (3, 1), (3, 1)]


def test_other_texts_rebuild_the_cache() -> None:
    model = model_of("dense")
    cached = CachedScores(model)
    cached([[1, 2, 3]])
    for texts in ([[1, 2, 4]], [[9, 2, 3, 4]], [[1, 2]], [[1, 2, 3], [1]], [[1, 2, 3, 4, 5]]):
        torch.testing.assert_close(cached(texts), whole(model)(texts), rtol=0, atol=1e-9)


def test_an_error_clears_the_cache_and_restores_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("dense")
    cached = CachedScores(model)
    before = model.loss, [block.attention.attend for block in model.layers.values()]
    expected = cached([[1, 2, 3, 4]])
    cached([[1, 2, 3]])
    with monkeypatch.context() as patch:
        patch.setattr(model.layers["1"], "forward", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            cached([[1, 2, 3, 4]])
    assert before == (model.loss, [block.attention.attend for block in model.layers.values()])
    assert torch.equal(cached([[1, 2, 3, 4]]), expected)


def test_uninitialised_memory_has_no_effect(monkeypatch: pytest.MonkeyPatch) -> None:
    """Empty cache slots get attention weight 0, but 0 times NaN is NaN."""
    empty = Tensor.new_empty
    monkeypatch.setattr(Tensor, "new_empty", lambda *a, **k: empty(*a, **k).fill_(torch.nan))
    model = model_of("dense")
    cached, texts = CachedScores(model), [[1, 2, 3, 4], [5]]
    for token in range(6):
        assert cached(texts).isfinite().all()
        texts = [[*text, token] for text in texts]


def _write(
    next_scores: Any, prompts: Sequence[Sequence[int]], sampling: Sampling, max_tokens: int = 12
) -> list[list[int]]:
    steps = list(generate(next_scores, prompts, max_tokens, sampling))
    return [[step[row] for step in steps] for row in range(len(prompts))]  # type: ignore[misc]


def test_of_latent_attention_only_the_latents_are_kept() -> None:
    cached = CachedScores(model_of("latent attention"))
    cached([[1, 2, 3, 4]])
    kept = {tuple(part.shape) for layer in cached._layers for part in (layer._keys, layer._values)}
    assert kept == {(1, 1, 4, MLA["kv_lora_rank"]), (1, 1, 4, MLA["qk_rope_head_dim"])}
