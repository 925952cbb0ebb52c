"""A digest depends on every bit, not on the order of computation. Differing replicas are named by tensor and rank."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forge.resilience import digests
from forge.resilience.digests import differing_copies, digest
from tests.support.harness import run_ranks

CPU = torch.device("cpu")
INTEGERS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float64: torch.int64}


@pytest.mark.parametrize("dtype", list(INTEGERS))
@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_any_one_flipped_bit_is_another_digest(dtype: torch.dtype, data) -> None:
    numel = data.draw(st.integers(1, 70))
    tensor = torch.randn(numel, generator=torch.Generator().manual_seed(numel)).to(dtype)
    flipped = flip(tensor.clone(), data.draw(st.integers(0, numel - 1)), data.draw(st.integers(0, 15)))
    assert digest(flipped) != digest(tensor)


def test_the_highest_bit_the_last_element_and_the_sign_of_zero_count(monkeypatch) -> None:
    monkeypatch.setattr(digests, "CHUNK", 8)
    tensor = torch.arange(30.0)
    assert digest(flip(tensor.clone(), 29, 31)) != digest(tensor)
    assert digest(torch.tensor([0.0])) != digest(torch.tensor([-0.0]))


def test_places_count_also_between_chunks(monkeypatch) -> None:
    monkeypatch.setattr(digests, "CHUNK", 8)
    tensor = torch.arange(24.0)
    assert digest(tensor.roll(8)) != digest(tensor)
    assert digest(tensor.flip(0)) != digest(tensor)


def test_empty_tensors_views_and_non_finite_numbers_have_digests() -> None:
    matrix = torch.arange(12.0).view(3, 4)
    assert digest(matrix.T) == digest(matrix.T.contiguous()) != digest(matrix)
    assert digest(torch.empty(0)) == 0
    assert digest(torch.full((3,), torch.nan)) == digest(torch.full((3,), torch.nan))


def flip(tensor: torch.Tensor, element: int, bit: int) -> torch.Tensor:
    bits = tensor.view(INTEGERS[tensor.dtype])
    bits[element] ^= 1 << bit if bit < 8 * tensor.element_size() - 1 else -(1 << bit)
    return tensor


def test_n3_the_rank_differing_from_the_majority_is_named_on_all_ranks() -> None:
    reports = run_ranks(_compare, 4, 2)
    assert reports == [["b on rank 2 differs from the other ranks"]] * 4


def test_n3_both_of_two_copies_are_named_also_on_ranks_without_one() -> None:
    reports = run_ranks(_compare_pair, 4)
    assert reports == [["pair differs between the ranks 1, 2"]] * 4


def test_equal_copies_are_not_reported() -> None:
    assert run_ranks(_compare, 2, -1) == [[]] * 2


def _compare(rank: int, world: int, damaged: int) -> list[str]:
    import torch.distributed as dist

    tensors = {name: torch.arange(10.0) * place for place, name in enumerate("abc", 1)}
    if rank == damaged:
        flip(tensors["b"], 4, 3)
    return differing_copies([(name, tensor, dist.group.WORLD) for name, tensor in tensors.items()], CPU)


def _compare_pair(rank: int, world: int) -> list[str]:
    import torch.distributed as dist

    group = dist.new_group([1, 2])
    copies = [("pair", torch.full((3,), float(rank)), group)] if rank in (1, 2) else []
    return differing_copies(copies, CPU)
