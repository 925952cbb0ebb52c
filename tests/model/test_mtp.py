"""Multi-token prediction against a second, plain implementation, and its boundaries."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.testing import assert_close

from forge.model import IGNORE, flops_per_token, parameter_counts
from forge.model.mtp import look_ahead
from tests.support.reference_model import reference_loss, reference_loss_ahead
from tests.support.small_models import batch, gradients, on_meta, small_config, small_model

TIGHT = {"rtol": 1e-10, "atol": 1e-12}
DOCUMENTS = torch.tensor([[0] * 4 + [1] * 7 + [2], [5] + [6] * 11])
OPTIONS: dict[str, dict[str, Any]] = {
    "one": {"mtp": {"depth": 1, "loss_coef": 0.3}},
    "three": {"mtp": {"depth": 3, "loss_coef": 0.7}},
    "tied": {"mtp": {"depth": 2}, "tie_embeddings": True, "scale_embeddings": True},
    "sandwich": {"mtp": {"depth": 2}, "norm_position": "sandwich", "zero_centered_norms": True},
    "attention residuals": {
        "mtp": {"depth": 2},
        "n_layers": 3,
        "residual": "attention",
        "residual_block_size": 2,
    },
    "kinds of layers": {
        "mtp": {"depth": 2},
        "layer_pattern": ["sliding", "full", "nope"],
        "sliding_window": 3,
    },
}


@pytest.mark.long
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["one document", "documents"])
def test_objective_and_every_gradient_equal_the_plain_form(
    options: dict[str, Any], documents: torch.Tensor | None
) -> None:
    config = small_config(**options)
    model = small_model(config)
    tokens, labels = batch()
    ours = model(tokens, labels, None, documents)
    ours[0].backward()
    parameters = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    main = reference_loss(parameters, config, tokens, labels, documents=documents)
    one = torch.zeros_like(tokens) if documents is None else documents
    ahead = reference_loss_ahead(parameters, config, tokens, labels, one)
    assert config.mtp is not None
    objective = main[0] + config.mtp.loss_coef * ahead
    objective.backward()
    assert_close(ours, torch.stack([objective, *main[1:]]), **TIGHT)
    assert_close(gradients(model), {name: p.grad for name, p in parameters.items()}, **TIGHT)


def test_labels_ahead_end_with_the_document_and_the_sequence() -> None:
    tokens, labels = torch.arange(10, 16)[None], torch.arange(11, 17)[None]
    labels[0, 2] = IGNORE  # the first document's last token has no next one
    found = look_ahead(tokens, labels, torch.tensor([[0, 0, 0, 1, 1, 1]]), 2)
    none = IGNORE
    assert found[0, :, 0].tolist() == [[11, 12], [12, none], [13, none], [14, 15], [15, 16], [0, none]]
    assert found[0, :, 1].tolist() == [[12, none], [13, none], [14, none], [15, 16], [0, none], [0, none]]


def test_without_a_gradient_only_the_next_token_is_predicted() -> None:
    plain, ahead = small_model(small_config()), small_model(small_config(mtp={"depth": 2}))
    tokens, labels = batch()
    with torch.no_grad():
        assert torch.equal(ahead(tokens, labels), plain(tokens, labels))
        assert torch.equal(ahead(tokens), plain(tokens))


def test_parameters_and_operations_are_counted() -> None:
    plain, ahead = on_meta(small_config(), 64), on_meta(small_config(mtp={"depth": 2}), 64)
    block = sum(p.numel() for p in plain.layers["0"].parameters())
    more = parameter_counts(ahead).total - parameter_counts(plain).total
    assert more == 2 * (block + 2 * 24 * 24 + 3 * 24)
    work = flops_per_token(plain.layers["0"], 64) + 6 * (2 * 24 * 24 + 23 * 24)
    assert flops_per_token(ahead, 64) == flops_per_token(plain, 64) + 2 * work


def test_parts_in_a_chain_equal_the_whole_model() -> None:
    config = small_config(n_layers=3, mtp={"depth": 2})
    tokens, labels = batch()
    whole = small_model(config)
    whole(tokens, labels, None, DOCUMENTS)[0].backward()
    first = small_model(config, layers=range(0, 2), head=False)
    last = small_model(config, layers=range(2, 3), embed=False)
    assert whole.is_whole and not last.is_whole
    ahead = look_ahead(tokens, labels, DOCUMENTS, 2)
    losses = last(first(tokens, None, None, DOCUMENTS), labels, None, DOCUMENTS, ahead)
    losses[0].backward()
    assert_close(losses, whole(tokens, labels, None, DOCUMENTS), **TIGHT)
    parts = gradients(first)
    for name, grad in gradients(last).items():
        parts[name] = parts.get(name, 0.0) + grad
    assert_close(parts, gradients(whole), **TIGHT)
