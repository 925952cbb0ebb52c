"""The readable report of failures and differences."""

import torch

from forge.tools.verify.compare import Difference, difference_of
from forge.tools.verify.explain import Finding
from forge.tools.verify.layouts import Case
from forge.tools.verify.pieces import TensorPiece
from forge.tools.verify.report import last_line, outcome_json, summary
from forge.tools.verify.run import Outcome, Report

RAISED = "Traceback (most recent call last):\n  File x\nValueError: no such head"


def test_among_several_ranks_the_raising_one_is_quoted() -> None:
    assert last_line(f"rank 0: no result within 90 s\nrank 1: {RAISED}\n") == "ValueError: no such head"
    assert (
        last_line(f"rank 0: {RAISED}\nrank 1: {RAISED.replace('head', 'tail')}") == "ValueError: no such head"
    )


def test_a_hanging_layout_is_reported_as_such() -> None:
    assert (
        last_line("rank 0: no result within 90 s\nrank 1: no result within 90 s") == "no result within 90 s"
    )


def test_a_difference_is_shown_with_the_part_of_the_rank_and_with_enough_digits() -> None:
    """A cp rank has two parts of the sequence."""
    expected = torch.ones(4, 8, dtype=torch.float64)
    mine = torch.ones(2, 4, dtype=torch.float64)
    mine[1, 3] += 2**-50
    piece = TensorPiece(mine, (slice(2, 4), (0, 1, 6, 7)))
    found = difference_of(Difference(1, "output", "norm", 1, (), 0.0, 0.0, 0.0), expected, [piece], 1.0)
    outcome = Outcome(
        Case.of({"cp": 2}), "different", 1.0, finding=Finding("norm", "its output differs", found)
    )
    lines = summary(Report([outcome], worst=outcome, smallest=outcome)).splitlines()
    assert lines[-1].strip() == (
        "step 1, rank 1, output norm[3, 7] (the rank has [2:4, 0:2 and 6:8]): "
        "1.0000000000000009 instead of 1 (relative difference 8.9e-16)"
    )
    assert outcome_json(outcome)["finding"]["part"] == [[(2, 4)], [(0, 2), (6, 8)]]
