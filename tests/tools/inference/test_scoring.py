"""Log-probabilities of given tokens, against the softmax of the model's own logits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from forge.model import IGNORE, FusedLoss
from forge.tools.inference import token_scores
from tests.support.small_models import VOCAB, batch, small_config, small_model


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("chunk_tokens", [5, 1024])
def test_scores_are_the_log_softmax_at_the_labels(tied: bool, chunk_tokens: int) -> None:
    model = small_model(small_config(tie_embeddings=tied, logit_soft_cap=4.0))
    own = model.loss = FusedLoss(chunk_tokens=chunk_tokens, soft_cap=4.0)
    tokens, labels = batch(3)
    with torch.no_grad():
        logits = model(tokens)
    labels[1] = logits[1].argmax(-1)
    scores, likeliest = token_scores(model, tokens, labels)
    valid = labels != IGNORE
    expected = logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    torch.testing.assert_close(scores, expected.masked_fill(~valid, 0.0), rtol=0, atol=1e-12)
    assert torch.equal(likeliest, logits.argmax(-1) == labels)
    assert likeliest[1].all() and not likeliest.all()
    assert model.loss is own


def test_their_sum_is_the_loss() -> None:
    model = small_model(small_config())
    tokens, labels = batch(3)
    scores, _ = token_scores(model, tokens, labels)
    loss: Tensor = model(tokens, labels)[1]
    torch.testing.assert_close(-scores.sum(), loss.detach(), rtol=1e-12, atol=0)


def test_of_equal_scores_the_lowest_token_is_the_likeliest() -> None:
    model = small_model(small_config())
    model.head.weight.data.zero_()
    labels = torch.arange(VOCAB)[None, :12]
    _, likeliest = token_scores(model, torch.zeros_like(labels), labels)
    assert likeliest[0].tolist() == [True] + [False] * 11
