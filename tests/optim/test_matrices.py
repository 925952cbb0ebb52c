"""Matrices are gathered from parts on many ranks and results sent back, with balanced work and bounded memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.collectives import collectives_of
from forge.optim.matrices import MatrixBatch, WholeMatrices
from forge.shard import Shard
from tests.support.checkpoints import cut, numbers, rows, whole
from tests.support.harness import RankFailed, run_ranks

SHAPES = [(5, 7), (9, 4), (3, 4, 5), (1, 6), (6, 1), (20, 10), (12, 7), (7, 4, 5), (3, 7), (5, 7)]
# Number of matrices in each tensor's rows.
HEADS = [1, 3, 1, 1, 1, 1, 4, 1, 1, 1]
MATRICES = 1 + 3 + 3 + 1 + 1 + 1 + 4 + 7 + 1 + 1
LAYOUTS = {
    "cut": cut,
    "rows": rows,
    "whole": lambda name, full, rank, world: whole(name, full),
    # Two replicas, each in halves.
    "copies": lambda name, full, rank, world: cut(name, full, rank % 2, 2),
}


def mixed(matrices: Tensor) -> Tensor:
    """Map `[n, rows, columns]` to the same shape. Every output element depends on its whole matrix."""
    squares = matrices.square().sum((1, 2), keepdim=True)
    return matrices @ matrices.mT @ matrices / squares + matrices[:, -1:, :1]


def full_tensors() -> list[Tensor]:
    return [numbers(shape, torch.float64).sin() + number for number, shape in enumerate(SHAPES)]


def expected(full: Tensor, heads: int) -> Tensor:
    return mixed(full.reshape(-1, full.shape[-2] // heads, full.shape[-1])).view(full.shape)


def shards_of(layout: str, rank: int, world: int) -> list[Shard]:
    cases = enumerate(full_tensors())
    return [LAYOUTS[layout](f"weight.{number}", full, rank, world) for number, full in cases]


def made(shards: list[Shard], **options: Any) -> WholeMatrices:
    return WholeMatrices(shards, dist.group.WORLD, **{"dtype": torch.float64} | options)


def _replace(rank: int, world: int, layout: str, round_numel: int) -> dict[str, Any]:
    shards = shards_of(layout, rank, world)
    matrices = made(shards, heads=HEADS, round_numel=round_numel)
    tensors = [shard.data.clone() for shard in shards]
    owned: list[tuple[int, ...]] = []

    def function(several: Tensor, batch: MatrixBatch) -> Tensor:
        assert several.shape == (batch.count, *batch.shape)
        owned.append(tuple(several.shape))
        return mixed(several)

    sent = collectives_of(lambda: matrices.replace(tensors, function))
    for shard, tensor, full, heads in zip(shards, tensors, full_tensors(), HEADS, strict=True):
        for box, piece in shard.pieces(tensor):
            here = tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))
            torch.testing.assert_close(piece, expected(full, heads)[here], rtol=0, atol=1e-12)
    return {"owned": owned, "sent": sent.calls, "tensors": tensors}


@pytest.mark.parametrize("round_numel", [1, 60, 1 << 20])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_part_is_replaced_by_the_function_of_the_whole_matrix(layout: str, round_numel: int) -> None:
    found = run_ranks(_replace, 4, layout, round_numel)
    owned = [[count for count, *_ in one["owned"]] for one in found]
    assert sum(map(sum, owned)) == MATRICES, "computed more than once, or not at all"
    if round_numel == 1:
        assert all(count == 1 for one in owned for count in one), "a round has one matrix of each owner"
    if round_numel > 60:
        shapes = [[tuple(shape) for _, *shape in one["owned"]] for one in found]
        assert all(len(set(one)) == len(one) for one in shapes), (
            "matrices of one shape are not computed at once"
        )
    for one in found:
        assert {name for name, _ in one["sent"]} == {"all_to_all"}
        assert len(one["sent"]) == len(found[0]["sent"])
        assert round_numel == 1 or len(one["sent"]) <= 2 * max(map(len, owned))


def test_one_process_sends_nothing() -> None:
    (found,) = run_ranks(_replace, 1, "whole", 60)
    assert found["sent"] == [] and sum(count for count, *_ in found["owned"]) == MATRICES


def test_without_a_group_a_process_computes_all_matrices() -> None:
    shards = shards_of("whole", 0, 1)
    tensors = [shard.data.clone() for shard in shards]
    WholeMatrices(shards, None, dtype=torch.float64, heads=HEADS).replace(
        tensors, lambda several, _: mixed(several)
    )
    for tensor, full, heads in zip(tensors, full_tensors(), HEADS, strict=True):
        torch.testing.assert_close(tensor, expected(full, heads), rtol=0, atol=1e-12)


@pytest.mark.parametrize("layout", ["whole", "copies"])
def test_copies_get_the_same_bits(layout: str) -> None:
    found = [one["tensors"] for one in run_ranks(_replace, 4, layout, 60)]
    for one, other in ((0, 2), (1, 3)):
        assert all(torch.equal(a, b) for a, b in zip(found[one], found[other], strict=True))


def _work(rank: int, world: int, cut: str, shapes: list[tuple[int, ...]]) -> int:
    """Return this rank's multiplications in one step of an orthogonalisation."""
    fulls = enumerate(torch.ones(shape) for shape in shapes)
    shards = [LAYOUTS[cut](f"{number}", full, rank, world) for number, full in fulls]
    return sum(run.work for batch in made(shards).batches for run in batch.runs)


def test_free_matrices_balance_the_owners_work() -> None:
    # The ranks hold 4, 4 and 2 of ten experts, so the last rank gets the matrix shared by all.
    assert run_ranks(_work, 3, "rows", [(20, 10), (10, 10, 10)]) == [12000, 12000, 6000 + 5000]


def test_owners_are_balanced_by_work_not_by_elements() -> None:
    # One matrix has as many elements as the other four together, but a quarter of their work.
    wide, square = 4 * 4 * (2 * 64 + 4), 8 * 8 * (2 * 8 + 8)
    shapes = [(4, 64), *4 * [(8, 8)]]
    assert sorted(run_ranks(_work, 2, "whole", shapes)) == sorted([wide + square, 3 * square])


def test_replicated_experts_are_divided_among_their_ranks() -> None:
    assert len(set(run_ranks(_work, 4, "whole", [(8, 4, 4)]))) == 1


def test_a_matrix_on_one_rank_is_computed_there_and_not_sent() -> None:
    assert run_ranks(_experts, 2) == [[0.0, 1.0], [2.0, 3.0]]


def _experts(rank: int, world: int) -> list[float]:
    full = torch.arange(4.0).view(4, 1, 1).expand(4, 3, 3).contiguous()
    shard, seen = rows("experts", full, rank, world), []
    matrices = made([shard], dtype=torch.float32)
    run = lambda: matrices.replace([shard.data], lambda some, _: seen.extend(some[:, 0, 0].tolist()) or some)  # noqa: E731
    assert not collectives_of(run).calls
    return seen


def _order(rank: int, world: int) -> list[str]:
    """Return the order of this rank's starts: of exchanges (between all ranks) and of computations (local)."""
    shards = [rows(f"{i}", torch.ones(8, 8), rank, world) for i in range(6)]
    matrices = made(shards, round_numel=64)
    events = []
    exchange = dist.all_to_all_single

    def record(*args: Any, **kwargs: Any) -> Any:
        events.append("exchange")
        return exchange(*args, **kwargs)

    dist.all_to_all_single = record
    matrices.replace([s.data.double() for s in shards], lambda some, _: events.append("compute") or some)
    return events


def test_the_next_matrices_travel_while_a_round_is_computed() -> None:
    # Three rounds. Two sends to owners precede the first computation, and each result is sent as soon as it is ready.
    first, middle, last = (
        ["exchange"] * 2 + ["compute"],
        ["exchange"] * 2 + ["compute"],
        ["exchange", "compute", "exchange"],
    )
    assert run_ranks(_order, 2) == [[*first, *middle, *last]] * 2


def _memory(rank: int, world: int, round_numel: int) -> int:
    """Return the largest number of elements sent or received at once by this rank."""
    shards = [rows(f"{i}", torch.ones(8, 8), rank, world) for i in range(16)]
    matrices = made(shards, dtype=torch.float32, round_numel=round_numel)
    tensors = [shard.data for shard in shards]
    sent = collectives_of(lambda: matrices.replace(tensors, lambda some, _: -some))
    assert all(tensor.eq(-1).all() for tensor in tensors)
    return max(sent.sizes("all_to_all")) // 4


@pytest.mark.parametrize(("round_numel", "most"), [(64, 32), (130, 64), (256, 128), (1 << 20, 256)])
def test_a_round_bounds_the_elements_in_flight(round_numel: int, most: int) -> None:
    # A rank sends its half of each matrix owned by the other rank in a round.
    assert run_ranks(_memory, 2, round_numel) == [most] * 2


def _narrow(rank: int, world: int) -> None:
    shard = cut("weight", torch.full((4, 4), 1 + 2.0**-10), rank, world)
    matrices = WholeMatrices([shard], dist.group.WORLD, dtype=torch.bfloat16)

    def function(several: Tensor, _: MatrixBatch) -> Tensor:
        assert several.dtype == torch.bfloat16 and several.eq(1).all()
        return several * 3

    matrices.replace([shard.data], function)
    assert shard.data.dtype == torch.float32 and shard.data.eq(3).all()


def test_matrices_are_sent_in_the_chosen_dtype() -> None:
    run_ranks(_narrow, 3)


class Waited(Exception):
    pass


def _no_waiting(rank: int, world: int) -> None:
    """Raise on any read of a number from the device. All reads go through these methods."""
    shards = shards_of("cut", rank, world)
    matrices = made(shards, heads=HEADS, round_numel=60)

    def wait(*_: object) -> None:
        raise Waited

    for name in ("item", "tolist", "__bool__", "__float__", "__int__", "cpu", "numpy"):
        setattr(torch.Tensor, name, wait)
    matrices.replace([shard.data for shard in shards], lambda several, _: mixed(several))


def test_nothing_waits_for_the_device() -> None:
    run_ranks(_no_waiting, 2)


def _cut_differently(rank: int, world: int) -> None:
    full = torch.ones(4, 4)
    shard = whole("weight", full) if rank == 0 else cut("weight", full, 1, 2)
    WholeMatrices([shard], dist.group.WORLD, dtype=torch.float32)


def test_replicas_cut_in_different_places_are_refused() -> None:
    with pytest.raises(RankFailed, match="weight: copies are cut in different places"):
        run_ranks(_cut_differently, 2)
