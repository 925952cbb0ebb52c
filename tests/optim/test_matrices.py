"""Matrices are put together from parts on many ranks and results sent back, with even work and bounded memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from forge.optim.matrices import WholeMatrices
from forge.shard import Shard
from tests.support.checkpoints import cut, numbers, rows, whole
from tests.support.collectives import collectives_of
from tests.support.harness import RankFailed, run_ranks

SHAPES = [(5, 7), (9, 4), (3, 4, 5), (1, 6), (6, 1), (2, 2, 3, 3), (20, 10)]
MATRICES = 1 + 1 + 3 + 1 + 1 + 4 + 1
LAYOUTS = {
    "cut": cut,
    "rows": rows,
    "whole": lambda name, full, rank, world: whole(name, full),
    # Two copies of a tensor in halves.
    "copies": lambda name, full, rank, world: cut(name, full, rank % 2, 2),
}


def mixed(matrix: Tensor) -> Tensor:
    """A function whose every element depends on the whole matrix."""
    return matrix @ matrix.T @ matrix / matrix.square().sum() + matrix[-1, 0]


def full_tensors() -> list[Tensor]:
    return [numbers(shape, torch.float64).sin() for shape in SHAPES]


def expected(full: Tensor) -> Tensor:
    flat = full.reshape(-1, *full.shape[-2:])
    return torch.stack([mixed(matrix) for matrix in flat]).view(full.shape)


def shards_of(layout: str, rank: int, world: int) -> list[Shard]:
    cases = enumerate(full_tensors())
    return [LAYOUTS[layout](f"weight.{number}", full, rank, world) for number, full in cases]


def _replace(rank: int, world: int, layout: str, round_numel: int) -> dict[str, Any]:
    shards = shards_of(layout, rank, world)
    matrices = WholeMatrices(shards, dist.group.WORLD, dtype=torch.float64, round_numel=round_numel)
    tensors = [shard.data.clone() for shard in shards]
    owned: list[int] = []

    def function(matrix: Tensor) -> Tensor:
        owned.append(matrix.numel())
        return mixed(matrix)

    sent = collectives_of(lambda: matrices.replace(tensors, function))
    for shard, tensor, full in zip(shards, tensors, full_tensors(), strict=True):
        for box, piece in shard.pieces(tensor):
            here = tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))
            torch.testing.assert_close(piece, expected(full)[here], rtol=0, atol=1e-12)
    return {"owned": owned, "sent": sent.calls, "tensors": tensors}


@pytest.mark.parametrize("round_numel", [1, 60, 1 << 20])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_part_is_replaced_by_the_function_of_the_whole_matrix(layout: str, round_numel: int) -> None:
    found = run_ranks(_replace, 4, layout, round_numel)
    assert sum(len(one["owned"]) for one in found) == MATRICES, "computed more than once, or not at all"
    # In a round of 1 each owner has one matrix.
    most = max(len(one["owned"]) for one in found)
    rounds = {1: most, 1 << 20: 1}.get(round_numel)
    for one in found:
        assert {name for name, _ in one["sent"]} == {"all_to_all"}
        assert rounds is None or len(one["sent"]) == 2 * rounds


def test_one_process_sends_nothing() -> None:
    (found,) = run_ranks(_replace, 1, "whole", 60)
    assert found["sent"] == [] and len(found["owned"]) == MATRICES


@pytest.mark.parametrize("layout", ["whole", "copies"])
def test_copies_get_the_same_bits(layout: str) -> None:
    found = [one["tensors"] for one in run_ranks(_replace, 4, layout, 60)]
    for one, other in ((0, 2), (1, 3)):
        assert all(torch.equal(a, b) for a, b in zip(found[one], found[other], strict=True))


def _work(rank: int, world: int) -> int:
    """Elements of the matrices that this rank computes."""
    fulls = [torch.ones(20, 10), *torch.ones(10, 10, 10)]
    shards = [rows(f"{number}", full, rank, world) for number, full in enumerate(fulls)]
    seen: list[int] = []
    matrices = WholeMatrices(shards, dist.group.WORLD, dtype=torch.float32)
    matrices.replace([shard.data for shard in shards], lambda matrix: seen.append(matrix.numel()) or matrix)
    return sum(seen)


def test_owners_have_equal_work() -> None:
    assert run_ranks(_work, 3) == [400] * 3


def test_a_matrix_that_one_rank_holds_alone_is_computed_there() -> None:
    assert run_ranks(_experts, 2) == [[0.0, 1.0], [2.0, 3.0]]


def _experts(rank: int, world: int) -> list[float]:
    full = torch.arange(4.0).view(4, 1, 1).expand(4, 3, 3).contiguous()
    shard, seen = rows("experts", full, rank, world), []
    matrices = WholeMatrices([shard], dist.group.WORLD, dtype=torch.float32)
    matrices.replace([shard.data], lambda matrix: seen.append(matrix.max().item()) or matrix)
    return seen


def _memory(rank: int, world: int, round_numel: int) -> int:
    """The most elements that this rank sends or receives at once."""
    shards = [rows(f"{i}", torch.ones(8, 8), rank, world) for i in range(16)]
    matrices = WholeMatrices(shards, dist.group.WORLD, dtype=torch.float32, round_numel=round_numel)
    tensors = [shard.data for shard in shards]
    sent = collectives_of(lambda: matrices.replace(tensors, torch.neg))
    assert all(tensor.eq(-1).all() for tensor in tensors)
    return max(sent.sizes("all_to_all")) // 4


@pytest.mark.parametrize(("round_numel", "most"), [(64, 64), (130, 128), (256, 256), (1 << 20, 512)])
def test_a_round_bounds_what_is_sent_at_once(round_numel: int, most: int) -> None:
    # Of every matrix in a round a rank has half, and there are as many as owners have: so it sends what one owns.
    assert run_ranks(_memory, 2, round_numel) == [most] * 2


def _narrow(rank: int, world: int) -> None:
    shard = cut("weight", torch.full((4, 4), 1 + 2.0**-10), rank, world)
    matrices = WholeMatrices([shard], dist.group.WORLD, dtype=torch.bfloat16)

    def function(matrix: Tensor) -> Tensor:
        assert matrix.dtype == torch.bfloat16 and matrix.eq(1).all()
        return matrix * 3

    matrices.replace([shard.data], function)
    assert shard.data.dtype == torch.float32 and shard.data.eq(3).all()


def test_matrices_are_sent_in_the_chosen_dtype() -> None:
    run_ranks(_narrow, 3)


class Waited(Exception):
    pass


def _no_waiting(rank: int, world: int) -> None:
    """Raise where a number is read back from the device: all ways go through one of these methods."""
    shards = shards_of("cut", rank, world)
    matrices = WholeMatrices(shards, dist.group.WORLD, dtype=torch.float64, round_numel=60)

    def wait(*_: object) -> None:
        raise Waited

    for name in ("item", "tolist", "__bool__", "__float__", "__int__", "cpu", "numpy"):
        setattr(torch.Tensor, name, wait)
    matrices.replace([shard.data for shard in shards], mixed)


def test_nothing_waits_for_the_device() -> None:
    run_ranks(_no_waiting, 2)


def _cut_differently(rank: int, world: int) -> None:
    full = torch.ones(4, 4)
    shard = whole("weight", full) if rank == 0 else cut("weight", full, 1, 2)
    WholeMatrices([shard], dist.group.WORLD, dtype=torch.float32)


def test_copies_that_are_cut_in_different_places_are_refused() -> None:
    with pytest.raises(RankFailed, match="weight: copies are cut in different places"):
        run_ranks(_cut_differently, 2)
