"""Digests of ranks' parts sum to the digest of the whole, and find the first differing tensor."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from forge.config import load_config, to_toml
from forge.runtime.errors import UserError
from forge.tools.verify.borders import BatchPart, Seen
from forge.tools.verify.compare import Comparison
from forge.tools.verify.digests import Expected, compare_digests, digest, held_by
from forge.tools.verify.explain import explain
from forge.tools.verify.in_place import _read_digests
from forge.tools.verify.pieces import TensorPiece, part_of
from forge.tools.verify.record import RankRecord, RankStep, WholeRecord
from forge.tools.verify.shrink import shrink

ORDER = ["embedding", "layers.0", "norm"]


def reference() -> WholeRecord:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    step = {("output", name): draw(4, 8, 6) for name in ORDER}
    step |= {("gradient", f"{name}.weight"): draw(6, 6) for name in ORDER}
    step["loss", "cross-entropy"] = torch.tensor(4.0, dtype=torch.float64)
    return WholeRecord([{("initial", "norm.weight"): draw(6)}, step], ORDER)


def ranks(whole: WholeRecord, spoiled: tuple[str, str] = ("", ""), by: float = 1e-6) -> list[RankRecord]:
    """Return records of two ranks: each has half of the activation rows, and gradient rows 0 to 3 and 4 to 5. All else is
    replicated."""
    found = []
    for rank in (0, 1):
        steps = []
        for tensors in whole.steps:
            step = RankStep(part=BatchPart(2 * rank, tuple(range(8))))
            for key, tensor in tensors.items():
                mine = tensor.clone()
                if key == spoiled and rank == 1:
                    mine.view(-1)[-1] += by
                if key[0] == "output":
                    step.seen.append(Seen(key[1], True, 0, mine[2 * rank : 2 * rank + 2]))
                    continue
                rows = slice(0, 4) if rank == 0 else slice(4, 6)
                place = tuple(slice(0, n) for n in mine.shape)
                if key[0] == "gradient":
                    place = (rows, slice(0, 6))
                step.pieces[key] = [TensorPiece(part_of(mine, place), place)]
            steps.append(step)
        found.append(RankRecord(steps))
    return found


def compared(whole: WholeRecord, own: list[RankRecord]) -> Comparison:
    expected = Expected.of("", whole)
    return compare_digests(expected, [held_by(one, expected) for one in own], 1e-9)


def test_digests_of_parts_sum_to_the_digest_of_the_whole() -> None:
    whole = torch.randn(5, 7, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    everything = digest(whole, (slice(0, 5), slice(0, 7), slice(0, 3)))
    first = (slice(0, 5), (0, 6, 2), slice(0, 3))
    rest = (slice(0, 5), (1, 3, 4, 5), slice(0, 3))
    parts = [digest(part_of(whole, place), place) for place in (first, rest)]
    assert torch.allclose(torch.tensor(everything), torch.tensor(parts).sum(0))
    assert everything != digest(whole.flip(1), (slice(0, 5), slice(0, 7), slice(0, 3)))


def test_equal_numbers_have_equal_digests() -> None:
    result = compared(reference(), ranks(reference()))
    assert not result.differences and not result.unplaced
    assert result.compared == sum(map(len, reference().steps)) and max(result.largest.values()) < 1e-12


@pytest.mark.parametrize(
    "key", [("output", "layers.0"), ("gradient", "norm.weight"), ("loss", "cross-entropy")]
)
def test_a_difference_on_one_rank_is_named(key: tuple[str, str]) -> None:
    result = compared(reference(), ranks(reference(), key))
    (found,) = result.differences
    assert (found.step, found.kind, found.name, found.digest) == (1, *key, True)
    # Both ranks have the loss. The rank with the differing copy is named.
    assert found.rank == (1 if key[0] == "loss" else 0)
    assert explain(result, ORDER).culprit == ("loss" if key[0] == "loss" else key[1])


def test_nan_is_a_difference() -> None:
    result = compared(reference(), ranks(reference(), ("gradient", "norm.weight"), by=float("nan")))
    assert [one.name for one in result.differences] == ["norm.weight"]


@pytest.mark.parametrize("hole", [float("nan"), float("inf")])
def test_digests_that_are_not_finite_in_both_are_equal_and_hide_no_other_difference(hole: float) -> None:
    whole = reference()
    whole.steps[1]["gradient", "embedding.weight"][0, 0] = hole
    assert not compared(whole, ranks(whole)).differences
    (found,) = compared(whole, ranks(whole, ("gradient", "norm.weight"), by=1e-3)).differences
    assert found.name == "norm.weight"


def test_nan_in_the_second_copy_is_a_difference() -> None:
    result = compared(reference(), ranks(reference(), ("loss", "cross-entropy"), by=float("nan")))
    assert [(one.name, one.rank) for one in result.differences] == [("cross-entropy", 1)]


def test_a_part_on_no_rank_is_a_difference() -> None:
    (found,) = compared(reference(), ranks(reference())[:1]).differences[:1]
    assert found.kind == "gradient" and found.rank == -1


def test_a_file_of_other_phases_is_refused(tmp_path: Path) -> None:
    phases = [], ["--phase=[{until_tokens=1000,global_batch_size=8}]"]
    small = [shrink(load_config(["--config=debug", *options]))[0] for options in phases]
    Expected.of(to_toml(small[1]), reference()).write(tmp_path / "digests")
    _read_digests(tmp_path / "digests", small[1])
    with pytest.raises(UserError, match=r"phase is .* in the file and"):
        _read_digests(tmp_path / "digests", small[0])


def test_a_file_reads_back_and_any_other_is_refused(tmp_path: Path) -> None:
    expected = Expected.of("text", reference())
    expected.write(tmp_path / "digests")
    assert Expected.read(tmp_path / "digests") == expected
    (tmp_path / "other").write_text("no digests")
    for name in ("other", "nowhere"):
        with pytest.raises(UserError, match="is not a file of digests"):
            Expected.read(tmp_path / name)
    with pytest.raises(UserError, match="cannot be written"):
        expected.write(tmp_path / "nowhere" / "digests")
