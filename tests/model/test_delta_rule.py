"""The gated delta rule in chunks equals the recurrence token by token: values and gradients, in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from forge.model.delta_rule import affine_scan, chunked_delta_rule, lower_triangle, recurrent_delta_rule

TOLERANCE = 1e-10


KEY_DIM = 4
BY_HEAD_OR_CHANNEL = pytest.mark.parametrize("decays", [1, KEY_DIM])


def inputs(
    seq: int, strength: float = 1.0, dtype: torch.dtype = torch.float64, decays: int = 1
) -> list[Tensor]:
    """Return q, k, v, log_decay and beta of two sequences and three heads; keys have length 1."""
    generator = torch.Generator().manual_seed(seq)

    def draw(*shape: int) -> Tensor:
        return torch.randn(2, seq, 3, *shape, generator=generator, dtype=torch.float64)

    q, k = (draw(KEY_DIM) for _ in range(2))
    k = k / k.norm(dim=-1, keepdim=True)
    found = [q, k, draw(6), -strength * draw(decays).exp(), draw().sigmoid()]
    return [x.to(dtype).requires_grad_() for x in found]


def compare(arguments: list[Tensor], resets: Tensor | None, size: int) -> None:
    results = [
        chunked_delta_rule(*arguments, resets, size),
        recurrent_delta_rule(*arguments, resets),
    ]
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(x.shape, generator=generator, dtype=torch.float64) for x in results[0]]
    gradients = [
        torch.autograd.grad(sum((x * w).sum() for x, w in zip(both, weights, strict=True)), arguments)
        for both in results
    ]
    for chunked, recurrent in zip(*results, strict=True):
        assert (chunked - recurrent).abs().max() <= TOLERANCE
    assert all(x.abs().max() > 0 for x in gradients[1][:3:2])  # gradients of q and v; the others may be 0
    for chunked, recurrent in zip(*gradients, strict=True):
        assert (chunked - recurrent).abs().max() <= TOLERANCE


@BY_HEAD_OR_CHANNEL
@pytest.mark.parametrize("strength", [0.01, 1.0, 300.0])
@pytest.mark.parametrize(("seq", "size"), [(1, 4), (5, 64), (16, 4), (37, 16), (37, 11), (80, 64)])
def test_chunks_compute_the_recurrence(seq: int, size: int, strength: float, decays: int) -> None:
    compare(inputs(seq, strength, decays=decays), None, size)


@BY_HEAD_OR_CHANNEL
@pytest.mark.parametrize("share", [0.1, 0.5, 1.0])
def test_chunks_reset_like_the_recurrence(share: float, decays: int) -> None:
    resets = torch.rand(2, 37, generator=torch.Generator().manual_seed(3)) < share
    compare(inputs(37, decays=decays), resets, 8)


def test_equal_decays_of_all_channels_are_one_decay() -> None:
    q, k, v, log_decay, beta = inputs(37)
    one = chunked_delta_rule(q, k, v, log_decay, beta, None, 16)
    many = chunked_delta_rule(q, k, v, log_decay.expand(-1, -1, -1, KEY_DIM), beta, None, 16)
    assert all((a - b).abs().max() <= TOLERANCE for a, b in zip(one, many, strict=True))


def test_a_reset_hides_everything_before_it() -> None:
    arguments = inputs(20)
    resets = torch.zeros(2, 20, dtype=torch.bool)
    resets[:, 13] = True
    together = chunked_delta_rule(*arguments, resets, 8)[0]
    alone = chunked_delta_rule(*(x[:, 13:] for x in arguments), None, 8)[0]
    assert (together[:, 13:] - alone).abs().max() <= TOLERANCE


def test_a_key_written_with_full_strength_is_read_back() -> None:
    """With beta = 1, a write replaces the old value of a key of length 1."""
    q, k, v, log_decay, beta = (x.detach() for x in inputs(9))
    out, _ = chunked_delta_rule(k, k, v, log_decay, torch.ones_like(beta), None, 4)
    assert (out - v).abs().max() <= TOLERANCE


@BY_HEAD_OR_CHANNEL
def test_float32_stays_finite_if_decays_underflow(decays: int) -> None:
    arguments = inputs(40, 1e4, torch.float32, decays)
    out, state = chunked_delta_rule(*arguments, None, 16)
    found = torch.autograd.grad(out.sum() + state.sum(), arguments)
    assert all(x.isfinite().all() for x in (out, state, *found))


def test_the_scan_and_its_gradients_equal_the_loop() -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = ((5, 2, 3, 3), (5, 2, 3, 4), (2, 3, 4))
    arguments = [
        torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes
    ]
    transition, addition, state = arguments
    states = [state]
    for step in range(5):
        states.append(transition[step] @ states[-1] + addition[step])
    expected, found = torch.stack(states), affine_scan(*arguments)
    weights = torch.randn(expected.shape, generator=generator, dtype=torch.float64)
    assert (found - expected).abs().max() <= TOLERANCE
    pairs = zip(
        torch.autograd.grad((found * weights).sum(), arguments),
        torch.autograd.grad((expected * weights).sum(), arguments),
        strict=True,
    )
    assert all((ours - plain).abs().max() <= TOLERANCE for ours, plain in pairs)


def test_a_triangle_has_its_diagonal_its_quarters_and_zeros_above() -> None:
    diagonal = torch.arange(4.0, dtype=torch.float64).expand(2, 4).contiguous().requires_grad_()
    pairs = (
        torch.tensor([[[10.0]], [[11.0]]], dtype=torch.float64)
        .expand(2, 2, 1, 1)
        .contiguous()
        .requires_grad_()
    )
    corner = (
        torch.tensor([[20.0, 21.0], [22.0, 23.0]], dtype=torch.float64)
        .expand(2, 1, 2, 2)
        .contiguous()
        .requires_grad_()
    )
    expected = [[0, 0, 0, 0], [10, 1, 0, 0], [20, 21, 2, 0], [22, 23, 11, 3]]
    matrix = lower_triangle(diagonal, [pairs, corner])
    assert matrix.tolist() == [expected, expected]
    # Schema, shapes without values, and gradients.
    torch.library.opcheck(lower_triangle, (diagonal, [pairs, corner]))
    assert torch.autograd.gradcheck(
        lambda *parts: lower_triangle(parts[0], parts[1:]), (diagonal, pairs, corner)
    )


@pytest.mark.compiles
@BY_HEAD_OR_CHANNEL
def test_the_compiler_sees_one_graph_for_any_number_of_chunks(decays: int) -> None:
    arguments = inputs(37, decays=decays)
    whole = torch.compile(chunked_delta_rule, backend="aot_eager", fullgraph=True)(*arguments, None, 8)
    plain = chunked_delta_rule(*arguments, None, 8)
    assert (whole[0] - plain[0]).abs().max() <= TOLERANCE
    expected = torch.autograd.grad(plain[0].sum(), arguments)
    found = torch.autograd.grad(whole[0].sum(), arguments)
    assert all((a - b).abs().max() <= TOLERANCE for a, b in zip(found, expected, strict=True))
