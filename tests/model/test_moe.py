"""The mixture of experts in a whole model, against its plain form in float64 and over training steps."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from forge.config.model import ModelConfig
from forge.model import IGNORE, Router, Transformer, update_routers
from forge.parallel.blocks import Recomputed
from tests.support.reference_model import reference_loss
from tests.support.reference_moe import Mixture, solved
from tests.support.small_models import batch, fill, gradients, small_config

TIGHT = {"rtol": 1e-10, "atol": 1e-11}
BALANCES = ("bias", "quantile", "aux_loss", "sequence_aux_loss", "none")
GROUPS = {"n_expert_groups": 4, "n_limited_groups": 2}
# Coefficients large enough to reveal a wrong gradient.
COEFS = {"aux_loss_coef": 0.3, "z_loss_coef": 0.05, "bias_update_rate": 0.03}


def moe_config(**changes: Any) -> ModelConfig:
    moe = {"n_experts": 8, "top_k": 2, "expert_dim": 6, **COEFS}
    return small_config(n_layers=3, moe={**moe, "n_dense_layers": 1, **changes})


def moe_model(config: ModelConfig) -> Transformer:
    """Return a model whose routers have different biases and previous counts in each layer."""
    model = Transformer(config, 12).double()
    fill(model)
    model.reset_buffers(torch.float64)
    for layer, router in model.routers.items():
        generator = torch.Generator().manual_seed(layer)
        router.bias.copy_(0.2 * torch.randn(router.bias.shape, generator=generator))
        router.previous_counts.copy_(torch.randint(20, router.bias.shape, generator=generator))
    return model


def mixture_of(model: Transformer) -> Mixture:
    assert model.config.moe is not None
    bias = {layer: router.bias.tolist() for layer, router in model.routers.items()}
    previous = {layer: router.previous_counts.tolist() for layer, router in model.routers.items()}
    return Mixture(model.config.moe, bias, previous)


def assert_equals_plain_form(model: Transformer, tokens: Tensor, labels: Tensor) -> None:
    mixture = mixture_of(model)
    losses = model(tokens, labels)
    losses[0].backward()
    parameters = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    plain = reference_loss(parameters, model.config, tokens, labels, mixture=mixture)
    (plain[0] + mixture.loss).backward()
    assert_close(losses, plain, **TIGHT)
    plain_gradients = {
        name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in parameters.items()
    }
    assert_close(gradients(model), plain_gradients, **TIGHT)
    for layer, router in model.routers.items():
        assert router.counts.tolist() == mixture.counts[layer]
        assert_close(router.losses, torch.stack([mixture.aux[layer], mixture.z_loss[layer]]), **TIGHT)


@pytest.mark.parametrize("shared", [0, 2])
@pytest.mark.parametrize("groups", [{}, GROUPS], ids=["one group", "two of four groups"])
@pytest.mark.parametrize(("scores", "balance"), list(product(("softmax", "sigmoid"), BALANCES)))
def test_loss_and_every_gradient_equal_the_plain_form(
    scores: str, balance: str, groups: dict[str, int], shared: int
) -> None:
    config = moe_config(score_function=scores, balance=balance, n_shared_experts=shared, **groups)
    assert_equals_plain_form(moe_model(config), *batch(seq=8))


@pytest.mark.long
@pytest.mark.parametrize(
    "changes",
    [
        {"normalize_top_k": False},
        {"normalize_top_k": False, "score_function": "sigmoid", "route_scale": 2.5},
        {"top_k": 1},
        {"top_k": 8},
        {"n_experts": 3, "top_k": 2},
        {"n_dense_layers": 0},
        {"n_dense_layers": 3},
        {"expert_dim": 7},
        {"n_dense_layers": 0, "every": 2},
        {"expert_bias": True, "router_bias": True},
        {"latent_dim": 5, "n_shared_experts": 1},
        {"latent_dim": 5, "expert_bias": True, "every": 2, "n_dense_layers": 0},
    ],
    ids=str,
)
def test_other_shapes_equal_the_plain_form(changes: dict[str, Any]) -> None:
    assert_equals_plain_form(moe_model(moe_config(balance="sequence_aux_loss", **changes)), *batch(seq=8))


@pytest.mark.parametrize("activation", ["gelu_tanh", "relu2", "clamped_swiglu", "situ"])
def test_other_activations_with_biases_equal_the_plain_form(activation: str) -> None:
    moe = moe_config(n_shared_experts=1, expert_bias=True).moe
    config = small_config(
        n_layers=3, moe=dict(moe or {}), activation=activation, activation_limit=0.5, ffn_bias=True
    )
    assert_equals_plain_form(moe_model(config), *batch(seq=8))


@pytest.mark.long
@pytest.mark.parametrize("balance", BALANCES)
def test_equal_scores_equal_the_plain_form(balance: str) -> None:
    """All experts have equal scores, and one expert is never chosen."""
    model = moe_model(moe_config(balance=balance))
    for router in model.routers.values():
        router.weight.data.zero_()
        router.bias.zero_()
    assert_equals_plain_form(model, *batch(seq=8))
    assert all(router.counts.count_nonzero() == 2 for router in model.routers.values())


@pytest.mark.long
@pytest.mark.parametrize("balance", BALANCES)
def test_all_tokens_on_one_expert_equal_the_plain_form(balance: str) -> None:
    model = moe_model(moe_config(balance=balance, top_k=1, score_function="sigmoid"))
    for router in model.routers.values():
        router.weight.data.zero_()
        router.bias.copy_(torch.eye(8)[5])
    tokens, labels = batch(seq=8)
    assert_equals_plain_form(model, tokens, labels)
    chosen, valid = 5 if balance in ("bias", "quantile") else 0, (labels != IGNORE).sum()
    assert all(router.counts[chosen] == router.counts.sum() == valid for router in model.routers.values())


@pytest.mark.long
@pytest.mark.parametrize("balance", BALANCES)
def test_a_batch_with_one_valid_token_equals_the_plain_form(balance: str) -> None:
    tokens, labels = batch(seq=8)
    one = torch.full_like(labels, IGNORE)
    one[1, 5] = labels[1, 5]
    model = moe_model(moe_config(balance=balance))
    assert_equals_plain_form(model, tokens, one)
    assert all(router.counts.sum() == 2 for router in model.routers.values())


@pytest.mark.parametrize("balance", BALANCES)
def test_a_batch_without_a_valid_token_counts_nothing(balance: str) -> None:
    model = moe_model(moe_config(balance=balance))
    tokens, labels = batch()
    model(tokens, torch.full_like(labels, IGNORE))[0].backward()
    assert all((grad == 0).all() for grad in gradients(model).values())
    assert all(not router.counts.any() and not router.losses.any() for router in model.routers.values())


def test_parts_in_a_chain_equal_the_whole_model() -> None:
    config = moe_config(balance="sequence_aux_loss")
    tokens, labels = batch()
    whole = moe_model(config)
    whole(tokens, labels)[0].backward()
    parts = [Transformer(config, 12, range(2), head=False), Transformer(config, 12, range(2, 3), embed=False)]
    x = tokens
    for part in parts:
        part.double()
        fill(part)
        part.reset_buffers(torch.float64)
        x = part(x, labels)
    x[0].backward()
    assert_close(gradients(parts[0]) | gradients(parts[1]), gradients(whole), **TIGHT)


# --- Over steps of training ---


class Trace:
    """Gradients, biases and previous counts after each step of plain SGD."""

    def __init__(self) -> None:
        self.gradients: list[dict[str, Tensor]] = []
        self.biases: list[Tensor] = []
        self.counts: list[Tensor] = []


def train(
    model: Transformer,
    steps: int = 5,
    microbatches: int = 1,
    skipped: tuple[int, ...] = (),
    between: Callable[[], None] = lambda: None,
) -> Trace:
    """Train with plain SGD. between: called after every backward."""
    trace, routers = Trace(), list(model.routers.values())
    for step in range(steps):
        tokens, labels = batch(sequences=4, seed=step)
        valid = (labels != IGNORE).sum()
        model.set_loss_scale(1 / valid)
        model.zero_grad()
        for part in torch.arange(4).chunk(microbatches):
            (model(tokens[part], labels[part])[0] / valid).backward()
            between()
        trace.gradients.append({name: grad.clone() for name, grad in gradients(model).items()})
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
        counts = torch.stack([router.counts for router in routers])
        quantile = routers[0].config.balance == "quantile"
        required = torch.stack([router.required for router in routers]) if quantile else None
        update_routers(routers, counts, torch.tensor(float(step in skipped)), required)
        trace.biases.append(torch.stack([router.bias.clone() for router in routers]))
        trace.counts.append(torch.stack([router.previous_counts.clone() for router in routers]))
    return trace


def assert_same(one: Trace, other: Trace) -> None:
    for a, b in zip(one.gradients, other.gradients, strict=True):
        assert_close(a, b, rtol=0.0, atol=1e-9)
    assert all(torch.equal(a, b) for a, b in zip(one.biases, other.biases, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(one.counts, other.counts, strict=True))


def assert_microbatches_do_not_matter(config: ModelConfig) -> None:
    assert_same(train(moe_model(config), microbatches=4), train(moe_model(config)))


def assert_recomputation_does_not_matter(config: ModelConfig, *, selective: bool = False) -> None:
    model = moe_model(config)
    for block in model.layers.values():
        block.forward = Recomputed(block.forward, selective=selective)
    assert_same(train(model), train(moe_model(config)))


def assert_evaluation_does_not_matter(config: ModelConfig) -> None:
    model = moe_model(config)

    @torch.no_grad()
    def evaluate() -> None:
        model(*batch(seed=99))

    assert_same(train(model, between=evaluate), train(moe_model(config)))


def assert_bias_moves_by_the_sign(config: ModelConfig) -> None:
    """Assert one change by the rate per step: up for experts with less than an equal share of choices, down for others."""
    model = moe_model(config)
    bias = torch.stack([router.bias for router in model.routers.values()])
    trace = train(model, microbatches=2)
    for after, counts in zip(trace.biases, trace.counts, strict=True):
        assert counts.sum(1).tolist() == [2 * (4 * 12 - 2)] * len(counts)  # each choice once
        for layer, row in enumerate(counts.tolist()):
            for expert, count in enumerate(row):
                share = sum(row) / len(row)
                step = torch.tensor(0.03 * (count < share) - 0.03 * (count > share), dtype=torch.float32)
                bias[layer, expert] += step
        assert torch.equal(after, bias)


def assert_quantiles_are_solved(config: ModelConfig) -> None:
    """Assert biases solved from the required biases of a step's valid tokens, and no leftover for the next step."""
    model, (tokens, labels) = moe_model(config), batch(sequences=4)
    mixture, parameters = mixture_of(model), {name: p.detach() for name, p in model.named_parameters()}
    reference_loss(parameters, config, tokens, labels, mixture=mixture)
    for part in torch.arange(4).chunk(2):
        model(tokens[part], labels[part])[0].backward()
    routers = list(model.routers.values())
    counts = torch.stack([router.counts for router in routers])
    update_routers(routers, counts, torch.tensor(0.0), torch.stack([router.required for router in routers]))
    assert config.moe is not None
    for layer, router in model.routers.items():
        expected = solved(mixture.required[layer], mixture.bias[layer], config.moe.top_k)
        assert_close(router.bias.double(), torch.tensor(expected, dtype=torch.float64), rtol=0.0, atol=1e-7)
        assert not router.required.any()


@pytest.mark.parametrize("changes", [{}, {"score_function": "sigmoid", "top_k": 3}, {"top_k": 7}], ids=str)
def test_quantile_balancing_solves_the_biases_of_the_plain_form(changes: dict[str, Any]) -> None:
    assert_quantiles_are_solved(moe_config(balance="quantile", **changes))


def test_quantile_balancing_evens_the_load_of_the_same_tokens() -> None:
    """Even up to the bins' resolution and up to tokens whose cutoff moved with the biases."""
    config = moe_config(balance="quantile", score_function="sigmoid")
    model, (tokens, labels) = moe_model(config), batch(sequences=32)
    routers, spread = list(model.routers.values()), []
    for _ in range(6):
        model(tokens, labels)[0].backward()
        counts = torch.stack([router.counts for router in routers])
        spread.append((counts.max() / counts.double().mean()).item())
        required = torch.stack([router.required for router in routers])
        update_routers(routers, counts, torch.tensor(0.0), required)
    assert spread[0] > 1.5
    assert spread[-1] < 1.15


def test_a_step_without_a_valid_token_keeps_the_biases() -> None:
    model = moe_model(moe_config(balance="quantile"))
    tokens, labels = batch()
    before = [router.bias.clone() for router in model.routers.values()]
    model(tokens, torch.full_like(labels, IGNORE))[0].backward()
    routers = list(model.routers.values())
    counts = torch.stack([router.counts for router in routers])
    update_routers(routers, counts, torch.tensor(0.0), torch.stack([r.required for r in routers]))
    assert all(torch.equal(router.bias, bias) for router, bias in zip(routers, before, strict=True))


@pytest.mark.long
@pytest.mark.parametrize("balance", BALANCES)
def test_microbatches_change_nothing(balance: str) -> None:
    assert_microbatches_do_not_matter(moe_config(balance=balance))


@pytest.mark.long
@pytest.mark.parametrize("balance", BALANCES)
@pytest.mark.parametrize("selective", [False, True], ids=["full", "selective"])
def test_recomputation_changes_nothing(balance: str, selective: bool) -> None:
    assert_recomputation_does_not_matter(moe_config(balance=balance), selective=selective)


@pytest.mark.parametrize("balance", BALANCES)
def test_evaluation_changes_nothing(balance: str) -> None:
    assert_evaluation_does_not_matter(moe_config(balance=balance))


def test_bias_moves_once_per_step_by_the_sign() -> None:
    assert_bias_moves_by_the_sign(moe_config())


@pytest.mark.parametrize("balance", BALANCES)
def test_a_skipped_step_moves_no_state_and_is_not_counted_later(balance: str) -> None:
    model = moe_model(moe_config(balance=balance))
    before = mixture_of(model)
    trace = train(model, steps=2, skipped=(0,))
    assert trace.biases[0].tolist() == list(before.bias.values())
    assert trace.counts[0].tolist() == list(before.previous.values())
    assert trace.counts[1].sum(1).tolist() == [2 * (4 * 12 - 2)] * 2


# --- Each check above fails with its planted defect ---


def moved_in_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plant: the bias moves in every forward by the counts of that forward."""
    balance = Router._balance

    def defect(self: Router, *arguments: Any) -> Any:
        weights, counts, losses = balance(self, *arguments)
        self.bias += 0.03 * (counts.sum() - 8 * counts).sign()
        return weights, counts, losses

    monkeypatch.setattr(Router, "_balance", defect)


def counted_in_recomputation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._C, "_current_graph_task_id", lambda: -1)


def counted_in_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = Router.forward

    def defect(self: Router, *arguments: Any) -> Any:
        with torch.enable_grad():
            return forward(self, *arguments)

    monkeypatch.setattr(Router, "forward", defect)


def moved_in_proportion(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tensor, "sign", lambda self: self.double() / self.abs().max())


def not_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plant: no bias update, e.g. after losing the optimizer's view of a sharded copy."""
    monkeypatch.setattr(torch, "_foreach_add_", lambda *_: None)


@pytest.mark.long
@pytest.mark.parametrize(
    ("put_in", "check"),
    [
        (moved_in_forward, assert_microbatches_do_not_matter),
        (moved_in_forward, assert_bias_moves_by_the_sign),
        (counted_in_recomputation, assert_recomputation_does_not_matter),
        (counted_in_evaluation, assert_evaluation_does_not_matter),
        (moved_in_proportion, assert_bias_moves_by_the_sign),
        (not_moved, assert_bias_moves_by_the_sign),
    ],
)
def test_a_defect_is_found(
    monkeypatch: pytest.MonkeyPatch,
    put_in: Callable[[pytest.MonkeyPatch], None],
    check: Callable[[ModelConfig], None],
) -> None:
    put_in(monkeypatch)
    with pytest.raises(AssertionError):
        check(moe_config())
