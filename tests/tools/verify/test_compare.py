"""verify compares element by element, each piece at its place, and names the first difference."""

import pytest
import torch

from forge.tools.verify.borders import BatchPart, Seen
from forge.tools.verify.compare import Comparison, compare_rank, elements, merge
from forge.tools.verify.explain import explain
from forge.tools.verify.pieces import TensorPiece
from forge.tools.verify.record import RankRecord, RankStep, WholeRecord

WHOLE = BatchPart(0, tuple(range(8)))
ORDER = ["embedding", "layers.0.wq", "layers.0", "layers.1.wq", "layers.1", "norm"]


def reference() -> WholeRecord:
    torch.manual_seed(0)
    step = {(kind, name): torch.randn(4, 8, 6) for name in ORDER for kind in ("input", "output")}
    step |= {("gradient", f"{name}.weight"): torch.randn(6, 6) for name in (*ORDER, "head")}
    step |= {("parameter", f"{name}.weight"): torch.randn(6, 6) for name in (*ORDER, "head")}
    step["loss", "cross-entropy"] = torch.tensor(4.0, dtype=torch.float64)
    return WholeRecord([{("initial", "w"): torch.randn(6)}, step], ORDER)


def record(whole: WholeRecord) -> RankRecord:
    """Return a record of one rank with equal results."""
    steps = []
    for step in whole.steps:
        seen = [Seen(name, kind == "output", 0, t.clone()) for (kind, name), t in step.items() if t.ndim == 3]
        pieces = {
            key: [TensorPiece(t.clone(), tuple(slice(0, n) for n in t.shape))]
            for key, t in step.items()
            if t.ndim < 3
        }
        steps.append(RankStep(pieces, seen, WHOLE))
    return RankRecord(steps)


def compared(whole: WholeRecord, *ranks: RankRecord) -> Comparison:
    return merge([compare_rank(whole, n, one) for n, one in enumerate(ranks)], elements(whole))


def damage(mine: RankRecord, kind: str, *names: str, by: float = 1e-3) -> None:
    for one in mine.steps[1].seen:
        if one.name in names and one.output == (kind == "output"):
            one.values[2, 3, 4] += by
    for key, pieces in mine.steps[1].pieces.items():
        if key[0] == kind and key[1] in names:
            pieces[0].values.view(-1)[-1] += by


def test_equal_numbers_are_equal() -> None:
    whole = reference()
    result = compared(whole, record(whole))
    assert not result.differences and result.compared == len(whole.steps[0]) + len(whole.steps[1])


def test_the_place_the_values_and_the_rank_of_a_difference_are_given() -> None:
    whole, mine = reference(), record(reference())
    damage(mine, "output", "norm")
    (found,) = compared(whole, record(whole), mine).differences
    assert (found.name, found.rank, found.index) == ("norm", 1, (2, 3, 4))
    assert found.found - found.expected == pytest.approx(1e-3, rel=1e-3)


def test_the_first_module_whose_input_agrees_is_named() -> None:
    whole, mine = reference(), record(reference())
    damage(mine, "output", "layers.0", "layers.1.wq", "layers.1", "norm")
    damage(mine, "input", "layers.1.wq", "layers.1", "norm")
    damage(mine, "gradient", "embedding.weight")
    finding = explain(compared(whole, mine), ORDER)
    assert finding.culprit == "layers.0" and "input agrees" in finding.why


def test_a_difference_between_modules_is_named_by_its_outermost_receiver() -> None:
    whole, mine = reference(), record(reference())
    damage(mine, "output", "layers.1.wq", "layers.1")
    damage(mine, "input", "layers.1.wq", "layers.1")
    assert explain(compared(whole, mine), ORDER).culprit == "layers.1"


def test_of_gradients_the_last_module_is_named() -> None:
    whole, mine = reference(), record(reference())
    damage(mine, "gradient", "embedding.weight", "layers.1.wq.weight")
    finding = explain(compared(whole, mine), ORDER)
    assert finding.culprit == "layers.1.wq.weight" and finding.others == ("embedding.weight",)


@pytest.mark.parametrize(
    ("kind", "by", "equal"), [("gradient", 1e-12, True), ("gradient", 1e-8, False), ("initial", 1e-12, False)]
)
def test_initial_values_are_compared_bit_for_bit_and_others_to_a_tolerance(
    kind: str, by: float, equal: bool
) -> None:
    whole = reference()
    for step in whole.steps:
        for key, tensor in step.items():
            step[key] = tensor.double()
    mine = record(whole)
    damage(mine, kind, "norm.weight", by=by)
    if kind == "initial":
        mine.steps[0].pieces["initial", "w"][0].values[0] += by
    assert (not compared(whole, mine).differences) == equal


def test_a_gradient_of_rounding_size_is_no_difference() -> None:
    whole = reference()
    whole.steps[1]["gradient", "norm.weight"] = torch.full((6, 6), 1e-17)
    mine = record(whole)
    damage(mine, "gradient", "norm.weight", by=1e-16)
    assert not compared(whole, mine).differences


def test_nan_is_a_difference() -> None:
    whole, mine = reference(), record(reference())
    damage(mine, "parameter", "head.weight", by=float("nan"))
    assert [one.name for one in compared(whole, mine).differences] == ["head.weight"]


@pytest.mark.parametrize("hole", [float("nan"), float("inf"), -float("inf")])
def test_elements_that_are_not_finite_in_both_are_equal_and_hide_no_difference(hole: float) -> None:
    whole = reference()
    whole.steps[1]["parameter", "norm.weight"][0, 0] = hole
    mine = record(whole)
    assert not compared(whole, mine).differences
    damage(mine, "parameter", "norm.weight", by=1e-3)
    damage(mine, "parameter", "head.weight", by=1e-3)
    assert {one.name for one in compared(whole, mine).differences} == {"norm.weight", "head.weight"}
    whole.steps[1]["parameter", "norm.weight"][0, 0] = 1.0
    assert "norm.weight" in {one.name for one in compared(whole, mine).differences}


def test_elements_on_no_rank_are_a_difference() -> None:
    whole, mine = reference(), record(reference())
    key = ("parameter", "norm.weight")
    mine.steps[1].pieces[key] = [TensorPiece(whole.steps[1][key][:5].clone(), (slice(0, 5), slice(0, 6)))]
    (found,) = compared(whole, mine).differences
    assert found.name == "norm.weight" and found.rank == -1


def test_a_rank_of_each_axis_knows_its_place() -> None:
    part = BatchPart(first_row=4, positions=(0, 1, 6, 7), tp=2, tp_rank=1)
    whole = torch.Size((8, 8, 6))
    assert part.place(2, torch.Size((1, 4, 6)), whole) == (slice(6, 7), (0, 1, 6, 7), slice(0, 6))
    assert part.place(0, torch.Size((1, 2, 6)), whole) == (slice(4, 5), (6, 7), slice(0, 6))
    assert part.place(0, torch.Size((1, 4, 3)), whole) == (slice(4, 5), (0, 1, 6, 7), slice(3, 6))
    assert part.place(0, torch.Size((1, 3, 6)), whole) is None
    assert part.place(0, torch.Size((1, 4, 5)), whole) is None


def test_a_differing_input_from_outside_the_modules_is_named() -> None:
    """The embedding's second call gets other tokens. A block gets them as its second input, which is not recorded."""
    order = [*ORDER[:-1], "embedding (call 2)", "ahead.norm", "ahead", "norm"]
    whole = reference()
    whole.order[:] = order
    for name in order:
        for kind in ("input", "output"):
            whole.steps[1].setdefault((kind, name), torch.randn(4, 8, 6))
    mine = record(whole)
    damage(mine, "output", "embedding (call 2)", "ahead.norm", "ahead", "norm")
    damage(mine, "input", "embedding (call 2)", "ahead.norm", "norm")
    finding = explain(compared(whole, mine), order)
    assert finding.culprit == "embedding (call 2)" and "its input differs" in finding.why


def test_a_training_difference_is_named_before_the_held_out_loss() -> None:
    whole = reference()
    whole.steps[1]["held-out", "text"] = torch.tensor(4.0, dtype=torch.float64)
    whole.steps.append(reference().steps[1])
    mine = record(whole)
    damage(mine, "held-out", "text")
    alone = explain(compared(whole, mine), ORDER)
    assert alone.culprit == "held-out loss"
    for one in mine.steps[2].seen:
        if one.name == "embedding" and one.output:
            one.values[0] += 1e-3
    finding = explain(compared(whole, mine), ORDER)
    assert finding.culprit == "embedding" and finding.difference.step == 2
