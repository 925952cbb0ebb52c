"""Linear attention with a sequence split over ranks equals one rank."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from forge.model import AttentionMask, Recurrence
from forge.model.delta_rule import recurrent_delta_rule
from forge.model.linear_attention import LINEAR, local_recurrence
from forge.parallel.context import SequenceSplit
from forge.parallel.context.states import PassedStates
from tests.support import fla
from tests.support.harness import run_ranks

BATCH, HEADS, CHUNK = 2, 3, 3


def inputs(seq: int, decays: int) -> list[Tensor]:
    """Return the convolution's input and weights, and q, k, v, log_decay and beta."""
    generator = torch.Generator().manual_seed(seq)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    q, k, v = (draw(BATCH, seq, HEADS, size) for size in (4, 4, 5))
    gates = -draw(BATCH, seq, HEADS, decays).exp(), draw(BATCH, seq, HEADS).sigmoid()
    return [draw(BATCH, seq, 6), draw(6, 4), q, k / k.norm(dim=-1, keepdim=True), v, *gates]


def documents(seq: int, kind: str) -> Tensor | None:
    if kind == "one document":
        return None
    borders = torch.rand(BATCH, seq, generator=torch.Generator().manual_seed(1)) < 0.25
    return borders.long().cumsum(1)


def compute(function: Recurrence, own: list[Tensor], numbers: Tensor | None) -> list[Tensor]:
    mask = function.prepare(AttentionMask(LINEAR, numbers), own[0])
    return [function.convolve(*own[:2], mask), function.recur(*own[2:], mask, CHUNK)]


def on_rank(rank: int, world: int, seq: int, kind: str, decays: int) -> None:
    split, whole, numbers = SequenceSplit(dist.group.WORLD), inputs(seq, decays), documents(seq, kind)
    whole = [x.requires_grad_() for x in whole]
    expected = compute(local_recurrence, whole, numbers)
    generator = torch.Generator().manual_seed(2)
    weights = [torch.randn(x.shape, generator=generator, dtype=torch.float64) for x in expected]
    gradients = torch.autograd.grad(sum((x * w).sum() for x, w in zip(expected, weights, strict=True)), whole)
    # Convolution weights are replicated, and their gradients are summed over ranks.
    own = [x.detach() if n == 1 else split.part(x.detach(), 1) for n, x in enumerate(whole)]
    own = [x.clone().requires_grad_() for x in own]
    found = compute(PassedStates(split), own, numbers)
    pairs = zip(found, weights, strict=True)
    partial = torch.autograd.grad(sum((x * split.part(w, 1)).sum() for x, w in pairs), own)
    dist.all_reduce(partial[1])
    for ours, plain in zip(found, expected, strict=True):
        assert (ours - split.part(plain, 1)).abs().max() <= 1e-10
    for n, (ours, plain) in enumerate(zip(partial, gradients, strict=True)):
        assert (ours - (plain if n == 1 else split.part(plain, 1))).abs().max() <= 1e-10


def on_rank_by_kernels(rank: int, world: int, seq: int, kind: str, decays: int) -> None:
    # One process does not use the kernels.
    local_recurrence.recur = _without_kernels  # type: ignore[method-assign]
    fla.install()
    on_rank(rank, world, seq, kind, decays)
    assert len(fla.calls) == 4  # maps and outputs, each once more in backward


def _without_kernels(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, mask: AttentionMask, size: int
) -> Tensor:
    resets = None if mask.table is None else mask.table == 0
    return recurrent_delta_rule(q, k, v, log_decay, beta, resets)[0]


@pytest.mark.parametrize("decays", [1, 4])
@pytest.mark.parametrize("kind", ["one document", "documents"])
def test_states_of_kernels_pass_between_ranks(kind: str, decays: int) -> None:
    run_ranks(on_rank_by_kernels, 2, 40, kind, decays)


def slow(*values: int) -> object:
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize("decays", [1, 4])
@pytest.mark.parametrize("kind", ["one document", "documents"])
@pytest.mark.parametrize(("world", "seq"), [(2, 40), (4, 16), slow(4, 40), slow(2, 4)])
def test_values_and_gradients_equal_one_process(world: int, seq: int, kind: str, decays: int) -> None:
    """Also for a rank's part shorter than the convolution, and with decays by head and by channel."""
    run_ranks(on_rank, world, seq, kind, decays)
