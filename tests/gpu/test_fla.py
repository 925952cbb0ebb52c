"""The kernels of flash-linear-attention (fla) on a real GPU compute the delta rule, also with documents."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from forge.model.delta_rule import recurrent_delta_rule
from forge.model.fused_delta_rule import INSTALLED, WRONG_ON_HOPPER, fused_delta_rule

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not INSTALLED, reason="fla is not installed")]
BATCH, SEQ, HEADS, KEY_DIM, VALUE_DIM = 2, 200, 3, 64, 128
CUDA = torch.device("cuda", 0)
# Of q, k, v, log_decay, beta and the initial state.
DTYPES = (torch.bfloat16, torch.bfloat16, torch.bfloat16, torch.float32, torch.float32, torch.float32)


@pytest.fixture(autouse=True)
def untuned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Triton compile one configuration of each kernel, not dozens: this test is about values."""
    tuner = pytest.importorskip("triton.runtime.autotuner").Autotuner
    prune = tuner.prune_configs
    monkeypatch.setattr(tuner, "prune_configs", lambda *arguments: prune(*arguments)[:1])


@pytest.mark.parametrize("documents", [False, True], ids=["whole", "documents"])
@pytest.mark.parametrize("decays", [1, KEY_DIM], ids=["gated", "kimi"])
def test_values_and_gradients_equal_the_recurrence_up_to_bfloat16(decays: int, documents: bool) -> None:
    if decays == 1 and WRONG_ON_HOPPER:
        pytest.skip("fla refuses Triton below 3.7.1 on Hopper GPUs")
    exact = inputs(decays)
    starts = torch.rand(BATCH, SEQ, generator=torch.Generator().manual_seed(3)) < 0.05 if documents else None
    rounded = [x.detach().to(CUDA, dtype).requires_grad_() for x, dtype in zip(exact, DTYPES, strict=True)]
    expected = values_and_gradients(exact, starts, recurrent_delta_rule)
    on_gpu = None if starts is None else starts.to(CUDA)
    for ours, plain in zip(values_and_gradients(rounded, on_gpu, fused_delta_rule), expected, strict=True):
        error = (ours.double().cpu() - plain).norm() / plain.norm()
        assert error < 0.02, f"{error:.3f}"


def inputs(decays: int) -> list[Tensor]:
    """Return q, k, v, log_decay, beta and the initial state in float64, q, k and v rounded to bfloat16."""
    generator = torch.Generator().manual_seed(decays)

    def draw(*shape: int) -> Tensor:
        return torch.randn(BATCH, *shape, generator=generator, dtype=torch.float64)

    q, k, v = (draw(SEQ, HEADS, size) for size in (KEY_DIM, KEY_DIM, VALUE_DIM))
    q, k = (x / x.norm(dim=-1, keepdim=True) for x in (q, k))
    gates = [-0.1 * draw(SEQ, HEADS, decays).exp(), draw(SEQ, HEADS).sigmoid()]
    found = [*(x.bfloat16().double() for x in (q, k, v)), *gates, draw(HEADS, KEY_DIM, VALUE_DIM)]
    return [x.requires_grad_() for x in found]


def values_and_gradients(arguments: list[Tensor], starts: Tensor | None, rule: object) -> list[Tensor]:
    *others, state = arguments
    results = rule(*others, starts, state)  # type: ignore[operator]
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(x.shape, generator=generator, dtype=torch.float64) for x in results]
    total = sum((x * w.to(x)).sum() for x, w in zip(results, weights, strict=True))
    return [*results, *torch.autograd.grad(total, arguments)]
