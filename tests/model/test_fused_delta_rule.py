"""fla's kernels as an operator: registration, gradient, documents and compiler, with a stub of fla."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from forge.model import fused_delta_rule as module
from forge.model import linear_attention
from forge.model.delta_rule import recurrent_delta_rule
from forge.model.fused_delta_rule import _gradient, _operator, fused_delta_rule, is_for_kernels
from forge.parallel.context import states
from tests.support import fla

BATCH, SEQ, HEADS, KEY_DIM, VALUE_DIM = 2, 20, 3, 4, 6
BY_HEAD_OR_CHANNEL = pytest.mark.parametrize("decays", [1, KEY_DIM])


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for user in (linear_attention, states):
        monkeypatch.setattr(user, "is_for_kernels", is_for_kernels)  # restored afterwards
    fla.install()
    fla.calls.clear()
    yield
    fla.remove()


def inputs(decays: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Return q, k, v, log_decay, beta and the initial state."""
    generator = torch.Generator().manual_seed(decays)

    def draw(*shape: int) -> Tensor:
        return torch.randn(BATCH, *shape, generator=generator, dtype=torch.float64)

    q, k, v = (draw(SEQ, HEADS, size) for size in (KEY_DIM, KEY_DIM, VALUE_DIM))
    k = k / k.norm(dim=-1, keepdim=True)
    gates = [-draw(SEQ, HEADS, decays).exp(), draw(SEQ, HEADS).sigmoid()]
    found = [q, k, v, *gates, draw(HEADS, KEY_DIM, VALUE_DIM)]
    return [x.to(dtype).requires_grad_() for x in found]


def resets() -> Tensor:
    starts = torch.rand(BATCH, SEQ, generator=torch.Generator().manual_seed(3)) < 0.3
    starts[1, 4:7] = True  # documents of one token
    return starts


def values_and_gradients(results: tuple[Tensor, Tensor], arguments: list[Tensor]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(x.shape, generator=generator, dtype=torch.float64) for x in results]
    total = sum((x * w).sum() for x, w in zip(results, weights, strict=True))
    return [*results, *torch.autograd.grad(total, arguments)]


@BY_HEAD_OR_CHANNEL
@pytest.mark.parametrize("documents", [False, True])
def test_values_and_gradients_equal_the_recurrence(documents: bool, decays: int) -> None:
    arguments, starts = inputs(decays), resets() if documents else None
    *others, state = arguments
    found = values_and_gradients(fused_delta_rule(*others, starts, state), arguments)
    expected = values_and_gradients(recurrent_delta_rule(*others, starts, state), arguments)
    assert fla.calls == [f"decays by {'channel' if decays > 1 else 'head'}"] * 2  # and again in backward
    for ours, plain in zip(found, expected, strict=True):
        assert (ours - plain).abs().max() <= 1e-12


@BY_HEAD_OR_CHANNEL
def test_pytorch_accepts_the_operator_and_its_gradient(decays: int) -> None:
    arguments = inputs(decays)
    torch.library.opcheck(_operator, tuple(arguments))
    plain = [x.detach() for x in arguments]
    torch.library.opcheck(_gradient, (torch.ones_like(plain[2]), torch.ones_like(plain[5]), *plain))


@BY_HEAD_OR_CHANNEL
def test_the_operator_computes_in_bfloat16_from_gates_and_states_in_float32(decays: int) -> None:
    q, k, v, log_decay, beta, _ = inputs(decays, torch.float32)
    out, last = fused_delta_rule(q, k, v.bfloat16(), log_decay, beta)
    assert out.dtype == torch.bfloat16 and last.dtype == torch.float32
    out.float().sum().backward()
    assert all(x.grad is not None and x.grad.dtype == torch.float32 for x in (q, k, v, log_decay, beta))


@pytest.mark.compiles
@BY_HEAD_OR_CHANNEL
def test_documents_are_in_one_graph_with_the_operator(decays: int) -> None:
    recur, arguments = linear_attention.local_recurrence.recur, inputs(decays)[:5]
    mask = linear_attention.AttentionMask(linear_attention.LINEAR, None, table=(~resets()).long())

    def both(*args: Tensor) -> tuple[Tensor, Tensor]:
        out = recur(*args, mask, 4)
        return out, out.square()

    compiled = torch.compile(both, backend="aot_eager", fullgraph=True)
    found = values_and_gradients(compiled(*arguments), arguments)
    assert len(fla.calls) == 2
    for ours, plain in zip(found, values_and_gradients(both(*arguments), arguments), strict=True):
        assert (ours - plain).abs().max() <= 1e-12


@pytest.mark.parametrize(("decays", "major", "used"), [(1, 9, False), (4, 9, True), (1, 8, True)])
def test_a_triton_that_fla_refuses_on_hopper_is_not_used_for_decays_per_head(
    monkeypatch: pytest.MonkeyPatch, decays: int, major: int, used: bool
) -> None:
    monkeypatch.setattr(module, "INSTALLED", True)
    monkeypatch.setattr(module, "WRONG_ON_HOPPER", True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(major=major))
    values: Any = SimpleNamespace(is_cuda=True, dtype=torch.bfloat16, device=torch.device("cuda", 0))
    assert is_for_kernels(torch.zeros(1, 256), values, torch.zeros(1, 1, 1, decays)) == used
    assert not is_for_kernels(torch.zeros(1, 512), values, torch.zeros(1, 1, 1, decays))
