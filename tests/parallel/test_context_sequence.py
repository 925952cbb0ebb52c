"""The split of a sequence over ranks: chunks by rank, restored order, and each rank's part of a batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.bias import CausalBias
from torch.testing import assert_close

from forge.batch import Batch
from forge.model import AttentionMask
from forge.parallel.context import SequenceSplit
from forge.parallel.context.gathered import causal_chunks, lower_right
from forge.parallel.context.ulysses import UlyssesAttention
from forge.runtime.errors import UserError


class Group:
    def __init__(self, rank: int, ranks: int):
        self.rank, self.size = lambda: rank, lambda: ranks


def splits(ranks: int) -> list[SequenceSplit]:
    groups: list[Any] = [Group(rank, ranks) for rank in range(ranks)]
    return [SequenceSplit(group) for group in groups]


def batch(seq: int, **tensors: Tensor) -> Any:
    rows = torch.arange(2 * seq).view(2, seq)
    return Batch(**({"tokens": rows, "labels": rows + 1} | tensors))


def test_a_rank_holds_an_early_and_a_late_chunk() -> None:
    parts = [split.indices(16, torch.device("cpu")).tolist() for split in splits(4)]
    assert parts[0] == [0, 1, 14, 15] and parts[3] == [6, 7, 8, 9]
    assert sorted(index for part in parts for index in part) == list(range(16))


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_rank_has_the_same_number_of_visible_keys(ranks: int) -> None:
    costs = {int((split.indices(32, torch.device("cpu")) + 1).sum()) for split in splits(ranks)}
    assert len(costs) == 1


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_parts_in_order_are_the_whole_and_back(ranks: int) -> None:
    whole = torch.arange(2 * 3 * 16 * 5).view(2, 3, 16, 5)
    parts = torch.stack([split.part(whole, dim=2) for split in splits(ranks)])
    split = splits(ranks)[0]
    assert torch.equal(split.in_order(parts), whole)
    assert torch.equal(split.by_rank(whole), parts)


def test_one_rank_gets_the_unchanged_batch() -> None:
    given = batch(7)
    found = splits(1)[0].local_part(given)
    assert found.tokens is given.tokens and found.positions is None


def test_a_part_brings_its_positions_and_all_documents() -> None:
    documents = torch.zeros(2, 8, dtype=torch.int32)
    found = splits(2)[1].local_part(batch(8, documents=documents))
    assert found.tokens.tolist() == [[2, 3, 4, 5], [10, 11, 12, 13]]
    assert found.labels.tolist() == [[3, 4, 5, 6], [11, 12, 13, 14]]
    assert found.positions is not None and found.positions.tolist() == [[2, 3, 4, 5]] * 2
    assert found.documents is documents


def test_a_batchs_own_positions_are_kept() -> None:
    positions = torch.arange(8).flip(0).expand(2, 8)
    found = splits(2)[0].local_part(batch(8, positions=positions))
    assert found.positions is not None and found.positions.tolist() == [[7, 6, 1, 0]] * 2


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:Lower right causal bias")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("v_dim", [6, 4, 9])
def test_causal_chunks_are_the_rows_of_causal_attention(
    compiled: bool, v_dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA's path for a plain causal mask equals its CPU definition."""
    seen, kernel = set(), CausalBias._dispatch

    def dispatch(*args, **options):
        seen.add(tuple(x.shape[-1] for x in args[:3]))
        return kernel(*args, **options)

    monkeypatch.setattr(CausalBias, "_dispatch", staticmethod(dispatch))
    attend = torch.compile(causal_chunks, backend="aot_eager", fullgraph=True) if compiled else causal_chunks
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(2, heads, 16, size, generator=generator, dtype=torch.float64)
        for heads, size in ((4, 6), (2, 6), (2, v_dim))
    )
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    for split in splits(2):
        out = attend(split.part(q, dim=2), k, v, lower_right(split, 8))
        assert_close(out, split.part(expected, dim=2), rtol=0, atol=1e-12)
    # FlashAttention requires equal head sizes.
    assert compiled or seen == {(max(6, v_dim),) * 3}


def test_ulysses_refuses_heads_that_cp_does_not_divide() -> None:
    q, mask = torch.zeros(1, 3, 8, 4), AttentionMask()
    with pytest.raises(
        UserError, match=r"cp = 2: must divide the 3 query heads of each rank.*use one of 1, 3, or"
    ):
        UlyssesAttention(splits(2)[0])(q, q, q, mask)
