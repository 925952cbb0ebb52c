"""The fused head and loss against logits, log_softmax and autograd."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from forge.model import IGNORE, FusedLoss

TIGHT = {"rtol": 1e-11, "atol": 1e-13}
SETTINGS = [(0.0, 0.0), (0.1, 0.0), (0.0, 1.5), (0.1, 1.5)]


def _inputs(
    dtype: torch.dtype = torch.float64, rows: int = 7, vocab: int = 11
) -> tuple[Tensor, Tensor, Tensor]:
    """Return hidden `[2, rows, 5]`, weight `[vocab, 5]` and labels `[2, rows]`, some of them ignored."""
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(2, rows, 5, dtype=torch.float64, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(vocab, 5, dtype=torch.float64, generator=generator).to(dtype).requires_grad_()
    labels = torch.randint(vocab, (2, rows), generator=generator)
    labels[0, :2] = labels[1, -1] = IGNORE
    return hidden, weight, labels


def _plain(hidden: Tensor, weight: Tensor, labels: Tensor, z_loss_coef: float, soft_cap: float) -> Tensor:
    logits = hidden @ weight.T
    if soft_cap:
        logits = soft_cap * torch.tanh(logits / soft_cap)
    cross_entropy = F.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), reduction="sum", ignore_index=IGNORE
    )
    z_loss = logits.logsumexp(-1)[labels != IGNORE].square().sum()
    return torch.stack([cross_entropy + z_loss_coef * z_loss, cross_entropy, z_loss])


@pytest.mark.parametrize("chunk_tokens", [1, 3, 14, 1000])
@pytest.mark.parametrize(("z_loss_coef", "soft_cap"), SETTINGS)
def test_values_and_gradients_equal_the_plain_form(
    z_loss_coef: float, soft_cap: float, chunk_tokens: int
) -> None:
    hidden, weight, labels = _inputs()
    ours = FusedLoss(z_loss_coef, chunk_tokens, soft_cap)(hidden, weight, labels)
    plain = _plain(hidden, weight, labels, z_loss_coef, soft_cap)
    assert_close(ours, plain, **TIGHT)
    scale = torch.tensor(-0.37, dtype=torch.float64)
    found = torch.autograd.grad(ours[0], (hidden, weight), scale)
    assert_close(found, torch.autograd.grad(plain[0], (hidden, weight), scale), **TIGHT)


@pytest.mark.parametrize(("z_loss_coef", "soft_cap"), SETTINGS)
def test_gradcheck(z_loss_coef: float, soft_cap: float) -> None:
    hidden, weight, labels = _inputs(rows=3, vocab=4)
    loss = FusedLoss(z_loss_coef, 2, soft_cap)
    assert torch.autograd.gradcheck(lambda h, w: loss(h, w, labels)[0] * 0.3, (hidden, weight))


def test_only_the_objective_carries_a_gradient() -> None:
    hidden, weight, labels = _inputs()
    losses = FusedLoss(0.1)(hidden, weight, labels)
    grads = torch.autograd.grad(losses[1] + losses[2], (hidden, weight))
    assert all((grad == 0).all() for grad in grads)


@pytest.mark.parametrize("poison", [torch.inf, torch.nan, 1e300])
def test_an_ignored_position_counts_nothing_even_with_non_finite_values(poison: float) -> None:
    hidden, weight, labels = _inputs()
    loss = FusedLoss(0.1, 3)
    clean = loss(hidden, weight, labels)
    poisoned = hidden.detach().clone()
    poisoned[labels == IGNORE] = poison
    poisoned.requires_grad_()
    ours = loss(poisoned, weight, labels)
    assert torch.equal(ours, clean)
    grads = torch.autograd.grad(ours[0], (poisoned, weight))
    assert_close(grads, torch.autograd.grad(clean[0], (hidden, weight)), rtol=0.0, atol=0.0)
    assert (grads[0][labels == IGNORE] == 0).all()


def test_all_ignored_gives_zero_loss_and_zero_gradients() -> None:
    hidden, weight, labels = _inputs()
    losses = FusedLoss(0.1, 3)(hidden, weight, torch.full_like(labels, IGNORE))
    losses[0].backward()
    assert losses.tolist() == [0.0, 0.0, 0.0]
    assert hidden.grad is not None and (hidden.grad == 0).all()
    assert weight.grad is not None and (weight.grad == 0).all()


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_one_input_may_need_no_gradient(frozen: str) -> None:
    hidden, weight, labels = _inputs()
    wanted = torch.autograd.grad(_plain(hidden, weight, labels, 0.0, 0.0)[0], (hidden, weight))
    still, moving, expected = (
        (hidden, weight, wanted[1]) if frozen == "hidden" else (weight, hidden, wanted[0])
    )
    still.requires_grad_(False)
    FusedLoss(chunk_tokens=4)(hidden, weight, labels)[0].backward()
    assert still.grad is None
    assert_close(moving.grad, expected, **TIGHT)


def test_two_backwards_add_up() -> None:
    hidden, weight, labels = _inputs()
    losses = FusedLoss()(hidden, weight, labels)
    losses[0].backward(retain_graph=True)
    once = weight.grad.clone()
    losses[0].backward()
    assert_close(weight.grad, 2 * once, **TIGHT)


class _Shapes(TorchDispatchMode):
    """Record every operator's name and the size of the largest returned tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0
        self.names: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, Tensor):
                self.largest = max(self.largest, tensor.numel())
        self.names.add(func.__name__)
        return out


def test_no_more_than_a_chunk_of_logits_exists_and_the_host_never_waits() -> None:
    hidden = torch.randn(4, 64, 3, requires_grad=True)
    weight = torch.randn(100, 3, requires_grad=True)
    with _Shapes() as seen:
        FusedLoss(0.1, chunk_tokens=16, soft_cap=3.0)(hidden, weight, torch.randint(100, (4, 64)))[
            0
        ].backward()
    assert seen.largest <= 16 * 100
    assert not {name for name in seen.names if "_local_scalar_dense" in name or "nonzero" in name}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_only_the_sums_are_computed(mode) -> None:
    hidden, weight, labels = _inputs()
    with mode(), _Shapes() as seen:
        ours = FusedLoss(0.1, 3)(hidden, weight, labels)
    assert_close(ours, _plain(hidden, weight, labels, 0.1, 0.0).detach(), **TIGHT)
    assert "exp.default" not in seen.names


def test_bfloat16_sums_and_scales_in_float32() -> None:
    """1/3000 is not representable in bfloat16. A rounded scale would change all gradients by the same 0.1 %."""
    hidden, weight, labels = _inputs(torch.bfloat16, rows=200)
    losses = FusedLoss(0.01, 7)(hidden, weight, labels)
    assert losses.dtype == torch.float32
    (losses[0] / 3000).backward()
    exact_hidden, exact_weight = (x.detach().double().requires_grad_() for x in (hidden, weight))
    plain = _plain(exact_hidden, exact_weight, labels, 0.01, 0.0)
    (plain[0] / 3000).backward()
    assert_close(losses.double(), plain, rtol=2e-3, atol=0.0)
    assert weight.grad.dtype == torch.bfloat16
    ratio = (hidden.grad.double() * exact_hidden.grad).sum() / exact_hidden.grad.square().sum()
    assert abs(ratio - 1) < 5e-4
    assert_close(weight.grad.double(), exact_weight.grad, rtol=0.02, atol=1e-3)
