"""The router's choices against hand calculations, and its counts and state."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from forge.config.model import MoEConfig
from forge.model import IGNORE, Router, update_routers
from forge.model.noise import token_noise


def router(**changes: Any) -> Router:
    """Return a router whose logits equal its inputs."""
    config = MoEConfig.model_validate({"n_experts": 4, "top_k": 2, "n_limited_groups": 1} | changes)
    made = Router(config.n_experts, config, layer=0).double()
    made.weight.data.copy_(torch.eye(config.n_experts))
    made.reset_state()
    return made


def route(one: Router, *logits: list[float], labels: Tensor | None = None) -> tuple[list, Tensor]:
    """Return the experts and weights of each token of one sequence."""
    x = torch.tensor([logits], dtype=torch.float64)
    experts, weights = one(x, labels)
    return experts.tolist(), weights.detach()


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
def test_of_equal_scores_the_lower_index_wins(scores: str) -> None:
    experts, _ = route(
        router(score_function=scores), [0, 0, 0, 0], [1, 2, 2, 2], [5, 0, 5, 5], [-1, -9, -9, -9]
    )
    assert experts == [[0, 1], [1, 2], [0, 2], [0, 1]]


def test_ties_among_many_experts_follow_the_index_too() -> None:
    """Rows are long enough to reveal an unstable sort. PyTorch's sort happens to be stable for short rows."""
    experts, _ = route(router(n_experts=256, top_k=8), [0.0] * 256)
    assert experts == [list(range(8))]


def test_softmax_weights_are_the_chosen_shares() -> None:
    logits = [3.0, 1.0, 2.0, 0.0]
    shares = torch.tensor(logits, dtype=torch.float64).softmax(0)
    experts, weights = route(router(normalize_top_k=False, route_scale=2.5), logits)
    assert experts == [[0, 2]]
    assert_close(weights[0], 2.5 * shares[[0, 2]])
    _, weights = route(router(), logits)
    assert_close(weights[0], shares[[0, 2]] / shares[[0, 2]].sum())


def test_one_expert_per_token_keeps_its_score_so_that_the_router_learns() -> None:
    _, weights = route(router(top_k=1, score_function="sigmoid"), [3.0, 1.0, 2.0, 0.0])
    assert_close(weights[0], torch.tensor([3.0], dtype=torch.float64).sigmoid())


def test_all_zero_scores_give_zero_weights() -> None:
    _, weights = route(router(score_function="sigmoid"), [-1e4] * 4)
    assert weights.tolist() == [[0.0, 0.0]]


def test_the_bias_takes_part_in_the_choice_only() -> None:
    one = router(score_function="sigmoid")
    one.bias.copy_(torch.tensor([0.0, 9.0, 0.0, 0.0]))
    experts, weights = route(one, [3.0, -1.0, 2.0, 0.0])
    assert experts == [[1, 0]]
    scores = torch.tensor([-1.0, 3.0], dtype=torch.float64).sigmoid()
    assert_close(weights[0], scores / scores.sum())
    assert not one.bias.requires_grad


def test_a_bias_is_not_used_without_bias_balancing() -> None:
    one = router(balance="none")
    one.bias.copy_(torch.tensor([0.0, 9.0, 0.0, 0.0]))
    assert route(one, [3.0, -1.0, 2.0, 0.0])[0] == [[0, 2]]


GROUPS = {"n_experts": 6, "n_expert_groups": 3, "n_limited_groups": 1}


def test_two_best_scores_choose_the_group_with_a_bias_and_the_best_one_without() -> None:
    logits = [0.0, 3.0, 2.0, 2.0, -9.0, -9.0]  # the best one in the first group, the two best in the second
    assert route(router(balance="bias", **GROUPS), [x / 10 for x in logits])[0] == [[2, 3]]
    assert route(router(balance="none", score_function="sigmoid", **GROUPS), logits)[0] == [[2, 3]]
    assert route(router(balance="none", **GROUPS), logits)[0] == [[1, 0]]


def test_experts_outside_of_the_chosen_groups_never_win() -> None:
    """Even if the scores inside are negative."""
    one = router(score_function="sigmoid", **GROUPS)
    one.bias.copy_(torch.tensor([-3.0, -3.0, -3.0, -3.0, -2.0, -4.5]))
    assert route(one, [0.0] * 6)[0] == [[0, 1]]


def test_equal_groups_go_by_the_lower_index() -> None:
    assert route(router(**GROUPS), [0.0] * 6, [0.0, 0.0, 1.0, 1.0, 1.0, 1.0])[0] == [[0, 1], [2, 3]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_scores_are_in_float32_at_least(dtype: torch.dtype) -> None:
    one = router().to(dtype)
    one.reset_state()
    x = torch.randn(1, 3, 4, generator=torch.Generator().manual_seed(0)).to(dtype)
    _, weights = one(x)
    exact = torch.promote_types(torch.float32, dtype)
    assert weights.dtype == exact
    assert_close(weights.sum(1), torch.ones(3, dtype=exact), rtol=1e-6, atol=0.0)


def test_a_float32_gate_in_a_bfloat16_stream_computes_in_float32() -> None:
    one = router(normalize_top_k=False).float()
    one.weight.data += 1e-4  # lost in bfloat16
    x = torch.randn(1, 5, 4, generator=torch.Generator().manual_seed(0)).bfloat16()
    _, weights = one(x)
    expected = (x.float() @ one.weight.T).softmax(-1).sort(descending=True).values[0, :, :2]
    assert_close(weights, expected, rtol=0.0, atol=1e-7)


# --- Counts ---

LABELS = torch.tensor([[3, IGNORE, 5, 1]])
TOKENS = ([9.0, 8.0, 0.0, 0.0], [9.0, 8.0, 0.0, 0.0], [9.0, 0.0, 8.0, 0.0], [0.0, 0.0, 0.0, 9.0])


def test_only_valid_tokens_are_counted_and_forwards_add_up() -> None:
    one = router(z_loss_coef=0.1)
    route(one, *TOKENS, labels=LABELS)
    assert one.counts.tolist() == [3, 1, 1, 1]
    route(one, *TOKENS)  # without labels all count
    assert one.counts.tolist() == [7, 3, 2, 2]
    logits = torch.tensor([*(TOKENS[i] for i in (0, 2, 3)), *TOKENS], dtype=torch.float64)
    assert_close(one.losses[1], logits.logsumexp(-1).square().sum())


def test_ignored_tokens_count_nothing_even_if_infinite() -> None:
    one = router(balance="sequence_aux_loss", z_loss_coef=0.1)
    tokens = [list(token) for token in TOKENS]
    tokens[1] = [torch.inf, torch.nan, 0.0, 0.0]
    route(one, *tokens, labels=LABELS)
    assert one.losses.isfinite().all()


def test_nothing_is_counted_without_a_gradient() -> None:
    one = router(balance="aux_loss", z_loss_coef=0.1)
    with torch.no_grad():
        route(one, *TOKENS, labels=LABELS)
    assert not one.counts.any() and not one.losses.any()


@pytest.mark.parametrize("balance", ["aux_loss", "sequence_aux_loss"])
def test_an_even_load_costs_one_per_token(balance: str) -> None:
    one = router(balance=balance)
    route(one, *TOKENS[:3], labels=LABELS[:, :3])
    one.reset_state()
    route(one, [1.0, 0, 0, 0], [0, 1.0, 0, 0], [0, 0, 1.0, 0], [0, 0, 0, 1.0])
    if balance == "aux_loss":  # without a previous step: uniform
        assert_close(one.losses[0].item(), 4.0)
    one.reset_state()
    one.previous_counts.copy_(torch.tensor([5, 5, 5, 5]))
    route(one, [0.0] * 4, [0.0] * 4)
    assert_close(one.losses[0].item(), 2.0)


def test_a_sequence_loss_does_not_depend_on_other_sequences() -> None:
    one, rows = router(balance="sequence_aux_loss"), torch.randn(3, 6, 4, dtype=torch.float64)
    one(rows)
    together = one.losses[0].clone()
    one.reset_state()
    for row in rows:
        one(row.unsqueeze(0))
    assert_close(one.losses[0], together)


def test_counts_of_a_sequence_go_through_the_extension_point() -> None:
    """Given the counts of another process's half of the sequence, the loss is linear in this half."""
    one, x = router(balance="sequence_aux_loss"), torch.randn(2, 6, 4, dtype=torch.float64)
    one(x)
    whole, counts = one.losses[0].clone(), []
    one.sum_over_sequence = lambda own: counts.append(own) or own
    halves = x[:, :2], x[:, 2:]
    for half in halves:
        one(half)
    total = counts[0] + counts[1]
    one.reset_state()
    one.sum_over_sequence = lambda own: total
    for half in halves:
        one(half)
    assert_close(one.losses[0], whole)


def test_state_stays_on_the_device_of_the_computation_when_the_weight_is_offloaded() -> None:
    one = router()
    one.weight = torch.nn.Parameter(one.weight.to("meta"))
    one.reset_state()
    assert {buffer.device.type for buffer in one.buffers()} == {"cpu"}


def test_the_balancing_losses_enter_backward_scaled() -> None:
    one = router(balance="aux_loss", aux_loss_coef=0.5, z_loss_coef=0.25)
    one.previous_counts.copy_(torch.tensor([8, 4, 4, 0]))
    one.loss_scale.fill_(0.125)
    x = torch.tensor([TOKENS], dtype=torch.float64, requires_grad=True)
    _, weights = one(x)
    (weights * 0.0).sum().backward()
    plain = x.detach().clone().requires_grad_()
    aux = (plain.softmax(-1) * torch.tensor([2.0, 1.0, 1.0, 0.0])).sum()
    (0.125 * (0.5 * aux + 0.25 * plain.logsumexp(-1).square().sum())).backward()
    assert_close(x.grad, plain.grad)


# --- Steps ---


def test_a_step_moves_each_bias_by_its_sign_and_resets_the_counts() -> None:
    two = [router(bias_update_rate=0.5), router(bias_update_rate=0.5)]
    for one in two:
        one.bias.copy_(torch.tensor([1.0, 0.0, 0.0, 0.0]))
        route(one, *TOKENS)
    counts = torch.tensor([[6, 2, 4, 4], [1, 1, 1, 1]])
    update_routers(two, counts, torch.tensor(0.0))
    assert two[0].bias.tolist() == [0.5, 0.5, 0.0, 0.0]
    assert two[1].bias.tolist() == [1.0, 0.0, 0.0, 0.0]
    assert two[0].previous_counts.tolist() == [6, 2, 4, 4]
    assert not any(tensor.any() for one in two for tensor in (one.counts, one.losses, one.dropped))


def test_a_skipped_step_only_resets_the_counts() -> None:
    one = router()
    one.previous_counts.copy_(torch.tensor([1, 2, 3, 4]))
    route(one, *TOKENS)
    update_routers([one], torch.tensor([[6, 2, 4, 4]]), torch.tensor(1.0))
    assert not one.bias.any() and one.previous_counts.tolist() == [1, 2, 3, 4] and not one.counts.any()


def test_only_bias_balancing_moves_a_bias() -> None:
    one = router(balance="aux_loss")
    update_routers([one], torch.tensor([[6, 2, 4, 4]]), torch.tensor(0.0))
    assert not one.bias.any() and one.previous_counts.tolist() == [6, 2, 4, 4]


def test_checkpoints_hold_bias_and_previous_counts_only() -> None:
    assert set(router().state_dict()) == {"weight", "bias", "previous_counts"}


# --- Capacity ---


def test_choices_beyond_capacity_are_dropped_by_their_weights() -> None:
    """Six choices over three experts: capacity 2."""
    one = router(n_experts=3, top_k=1, capacity_factor=1.0, score_function="sigmoid")
    tokens = [[2.0, 0, 0], [5.0, 0, 0], [3.0, 0, 0], [0, 1.0, 0], [4.0, 0, 0], [0, 0, 1.0]]
    experts, weights = route(one, *tokens, labels=torch.tensor([[1, 1, 1, 1, 1, 1]]))
    assert experts == [[3], [0], [3], [1], [0], [2]]
    assert one.dropped.item() == 2
    assert one.counts.tolist() == [
        4,
        1,
        1,
    ]  # choices before the capacity limit, the load for balancing to even out


def test_of_equal_weights_the_earlier_token_keeps_its_place() -> None:
    one = router(n_experts=2, top_k=1, capacity_factor=1.0)
    assert route(one, *([[1.0, 0.0]] * 4))[0] == [[0], [0], [2], [2]]


def test_dropped_choices_of_ignored_tokens_are_not_reported() -> None:
    one = router(n_experts=2, top_k=1, capacity_factor=1.0)
    labels = torch.tensor([[1, 1, 1, IGNORE]])
    route(one, *([[1.0, 0.0]] * 4), labels=labels)
    assert one.dropped.item() == 1


def test_without_a_gradient_nothing_is_dropped() -> None:
    one = router(n_experts=2, top_k=1, capacity_factor=0.5)
    with torch.no_grad():
        experts, _ = route(one, *([[1.0, 0.0]] * 4))
    assert experts == [[0]] * 4 and one.dropped.item() == 0


def test_a_capacity_is_rounded_up() -> None:
    one = router(n_experts=2, top_k=1, capacity_factor=1.25)  # 1.25 * 3 / 2 = 1.875
    assert route(one, *([[1.0, 0.0]] * 3))[0] == [[0], [0], [2]]


# --- Noise ---


def test_noise_is_a_function_of_the_token_alone() -> None:
    labels, like = torch.randint(1000, (6, 50)), (8, torch.float64)
    noise = token_noise(labels, 3, *like)
    assert torch.equal(noise, token_noise(labels, 3, *like))
    assert torch.equal(noise[2:4], token_noise(labels[2:4], 3, *like))
    assert not torch.isclose(noise, token_noise(labels, 4, *like)).any()


def test_noise_is_standard_normal_and_independent() -> None:
    noise = token_noise(torch.randint(1000, (40, 100)), 0, 16, torch.float64)
    assert noise.isfinite().all()
    assert abs(noise.mean()) < 0.02 and abs(noise.var() - 1) < 0.02
    assert abs((noise.abs() < 1).double().mean() - 0.6827) < 0.01
    for axis in range(3):
        shifted = noise.roll(1, axis)
        assert abs((noise * shifted).mean()) < 0.02, f"neighbours along axis {axis} depend on each other"


def test_noise_is_added_in_training_only() -> None:
    one, plain = router(router_noise=0.5), router()
    x = torch.randn(2, 6, 4, dtype=torch.float64)
    labels = torch.randint(9, (2, 6))
    with torch.no_grad():
        assert torch.equal(one(x, labels)[1], plain(x, labels)[1])
    weights = one(x, labels)[1]
    expected = (
        (x + 0.5 * token_noise(labels, 0, x.shape[-1], x.dtype))
        .softmax(-1)
        .sort(descending=True)
        .values[..., :2]
    )
    assert_close(weights, (expected / expected.sum(-1, keepdim=True)).flatten(0, 1))


# --- Compiled ---

COMPILED = {
    "biases": {"score_function": "sigmoid", "route_scale": 2.5, "router_bias": True},
    "aux_loss": {"balance": "aux_loss", "z_loss_coef": 0.1},
    "of sequences": {"balance": "sequence_aux_loss", "n_expert_groups": 4, "n_limited_groups": 2},
    "capacity and noise": {"balance": "none", "capacity_factor": 0.5, "router_noise": 0.3},
}
INDUCTOR = [pytest.mark.slow, pytest.mark.processes]


@pytest.mark.compiles
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=INDUCTOR)])
@pytest.mark.parametrize("changes", COMPILED.values(), ids=COMPILED)
def test_a_compiled_router_equals_an_eager_one(changes: dict[str, Any], backend: str) -> None:
    torch.compiler.reset()
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(3, 20, 8, generator=generator, dtype=torch.float64)
    labels = torch.randint(IGNORE, 50, (3, 20), generator=generator)
    labels[:, 4:7] = IGNORE
    found = []
    for compiled in (False, True):
        one = router(n_experts=8, **changes)
        one.previous_counts.copy_(torch.arange(8))
        one.bias.copy_(torch.linspace(0.0, 0.1, 8))
        if one.logit_bias is not None:
            one.logit_bias.data.copy_(torch.linspace(-1.0, 1.0, 8))
        if compiled:
            one.route = torch.compile(one.route, backend=backend, fullgraph=True)  # type: ignore[method-assign]
        x = logits.clone().requires_grad_()
        experts, weights = one(x, labels)
        (weights * torch.linspace(-1, 1, weights.numel()).view_as(weights)).sum().backward()
        found.append((experts, weights, x.grad, one.weight.grad, one.counts, one.losses, one.dropped))
        with torch.no_grad():
            found[-1] += one(x)
    for eager, of_compiler in zip(*found, strict=True):
        assert_close(of_compiler, eager, rtol=1e-12, atol=1e-12)
    assert found[0][4].any()
