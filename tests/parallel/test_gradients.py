"""The norm counts each element once, in float32 or wider. Clipping scales gradients of every dtype."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from forge.parallel.step.gradients import clip_gradients, report_gradients
from forge.shard import Box, Shard
from tests.support.harness import run_ranks


def shard(
    name: str, grad: torch.Tensor | None, *, dtype: torch.dtype = torch.float32, copies: bool = False
) -> Shard:
    parameter = torch.zeros_like(grad, dtype=dtype) if grad is not None else torch.zeros(3, dtype=dtype)
    parameter.grad = None if grad is None else grad.to(dtype)
    boxes = (Box((0,), (parameter.numel(),)),) if parameter.numel() else ()
    return Shard(name, parameter.shape, boxes, parameter, dist.group.WORLD if copies else None)


def _mixed(rank: int, world: int) -> tuple[float, float, list[list[float]]]:
    shards = [
        shard("mine", torch.tensor([3.0, 4.0]) * (rank + 1)),
        shard("copied", torch.tensor([2.0]), copies=True),
        shard("narrow", torch.tensor([0.5, 0.25]), dtype=torch.bfloat16),
        shard("wide", torch.tensor([1.0 + 2**-40]), dtype=torch.float64),
        shard("empty", torch.zeros(0)),
        shard("without", None),
    ]
    report = report_gradients(shards, torch.tensor(1.0), stop=False)
    clip_gradients(shards, report.norm, report.norm.item() / 4)
    return report.norm.item(), report.skip.item(), [s.grad.tolist() for s in shards if s.grad is not None]


def test_norm_and_clip_over_mixed_dtypes_empty_and_replicated_shards() -> None:
    results = run_ranks(_mixed, 2)
    expected = (25 + 100 + 4 + 2 * (0.25 + 0.0625) + 2 * (1 + 2**-40) ** 2) ** 0.5
    for rank, (norm, skip, grads) in enumerate(results):
        assert norm == pytest.approx(expected, rel=1e-7) and skip == 0.0
        clipped = [[0.75 * (rank + 1), 1.0 * (rank + 1)], [0.5], [0.125, 0.0625], [0.25], []]
        for got, wanted in zip(grads, clipped, strict=True):
            assert got == pytest.approx(wanted, rel=1e-6)


def _narrow(rank: int, world: int) -> tuple[float, list[float]]:
    grads = torch.linspace(1.0, 2.0, 1000).bfloat16()
    shards = [shard("narrow", grads, dtype=torch.bfloat16)]
    report = report_gradients(shards, torch.tensor(1.0), stop=False)
    clip_gradients(shards, report.norm, 1.0)
    return report.norm.item(), shards[0].grad.tolist()


def test_bfloat16_gradients_are_measured_and_scaled_without_rounding_on_the_way() -> None:
    ((norm, clipped),) = run_ranks(_narrow, 1)
    grads = torch.linspace(1.0, 2.0, 1000).bfloat16()
    assert norm == pytest.approx(grads.double().norm().item(), rel=1e-6)
    assert clipped == (grads.float() * (1.0 / (norm + 1e-6))).bfloat16().tolist()
    # A coefficient first rounded to bfloat16 would differ by more.
    rounded = torch.tensor(1.0 / norm).bfloat16().item()
    assert abs(rounded * norm - 1) > 1e-4


@pytest.mark.gpu
def test_on_cuda_the_factor_is_not_rounded_to_bfloat16_either() -> None:
    grads, factor = torch.linspace(1.0, 2.0, 1000).bfloat16(), 0.3337
    shards = [shard("flat", grads.cuda(), dtype=torch.bfloat16)]
    shards.append(shard("matrix", grads.view(20, 50).cuda(), dtype=torch.bfloat16))
    clip_gradients(shards, torch.tensor(1.0 - 1e-6, dtype=torch.float64, device="cuda"), factor)
    for one in shards:
        assert one.grad is not None
        assert torch.equal(one.grad.flatten().cpu(), (grads.float() * factor).bfloat16())


class Waited(Exception):
    pass


def _no_waiting(rank: int, world: int) -> None:
    """Raise on any read of a number from the device. All reads go through these methods."""

    def wait(*_: object) -> None:
        raise Waited

    shards = [shard("a", torch.ones(3)), shard("b", torch.ones(2), dtype=torch.bfloat16)]
    for name in ("item", "tolist", "__bool__", "__float__", "__int__", "cpu", "numpy"):
        setattr(torch.Tensor, name, wait)
    report = report_gradients(shards, torch.tensor(1.0), stop=True)
    clip_gradients(shards, report.norm, 0.1)


def test_nothing_waits_for_the_device() -> None:
    run_ranks(_no_waiting, 2)


def _loss_of_rank_1_is_not_finite(rank: int, world: int) -> float:
    shards = [shard("mine", torch.ones(2))]
    return report_gradients(shards, torch.tensor(float("nan") if rank else 1.0), stop=False).skip.item()


def test_n1_a_non_finite_loss_on_one_rank_makes_all_skip() -> None:
    assert run_ranks(_loss_of_rank_1_is_not_finite, 2) == [1.0, 1.0]


def _one_copy_is_not_finite(rank: int, world: int, bad: int) -> tuple[float, float]:
    gradient = torch.tensor([3.0, torch.inf if rank == bad else 4.0])
    report = report_gradients([shard("copied", gradient, copies=True)], torch.tensor(1.0), stop=False)
    return report.skip.item(), report.norm.item()


def test_n1_a_non_finite_gradient_in_one_replica_makes_all_skip() -> None:
    """Regardless of the replica in the norm."""
    assert run_ranks(_one_copy_is_not_finite, 2, 0) == [(1.0, torch.inf)] * 2
    assert run_ranks(_one_copy_is_not_finite, 2, 1) == [(1.0, 5.0)] * 2
