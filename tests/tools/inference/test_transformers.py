"""An imported model generates the same text and scores as transformers with the same weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from forge.tools.hf import import_weights
from forge.tools.inference import CachedScores, Sampling, generate, token_scores
from forge.tools.inference.open import open_checkpoint
from tests.support.hf_models import CASES, VOCAB, float32_means, their_model, tokens

pytest.importorskip("transformers")

PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [2], [7, 18, 28, 18]]
NEW = 12
# One of each kind: scaled positions and a tied head, a window, norms on heads, mixtures by softmax and by sigmoid, sinks,
# and states of linear layers.
FAST = {"llama3", "mistral", "qwen3", "mixtral", "glm4_moe", "gpt_oss", "qwen3_next"}


@pytest.mark.long
@pytest.mark.parametrize(
    "case", [case if case in FAST else pytest.param(case, marks=pytest.mark.slow) for case in CASES]
)
def test_greedily_token_for_token_and_in_log_probabilities(case: str, tmp_path: Path) -> None:
    with float32_means(torch.float64):
        theirs = their_model(case, torch.float64)
    theirs.generation_config.eos_token_id = theirs.generation_config.pad_token_id = None
    theirs.save_pretrained(tmp_path / "theirs")
    import_weights(tmp_path / "theirs", tmp_path / "ours")
    ours = open_checkpoint(tmp_path / "ours", torch.device("cpu")).model
    text = tokens()
    with float32_means(torch.float64), torch.no_grad():
        written = [
            theirs.generate(torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False)[
                0, len(prompt) :
            ].tolist()
            for prompt in PROMPTS
        ]
        scores = theirs(text[:, :-1]).logits.log_softmax(-1)
    steps = list(generate(CachedScores(ours), PROMPTS, NEW, Sampling()))
    assert [[step[row] for step in steps] for row in range(len(PROMPTS))] == written
    assert len({token for new in written for token in new}) > 5, (
        "a model that repeats itself would prove little"
    )
    ours_scores, likeliest = token_scores(ours, text[:, :-1], text[:, 1:])
    expected = scores.gather(-1, text[:, 1:, None])[..., 0]
    torch.testing.assert_close(ours_scores, expected, rtol=0, atol=1e-9)
    assert torch.equal(likeliest, scores.argmax(-1) == text[:, 1:])
    assert ours.config.vocab_size == VOCAB
