"""What a person reads of failures."""

from forge.verify.report import last_line

RAISED = "Traceback (most recent call last):\n  File x\nValueError: no such head"


def test_of_several_ranks_the_one_that_raised_is_quoted() -> None:
    assert last_line(f"rank 0: nothing within 90 s\nrank 1: {RAISED}\n") == "ValueError: no such head"
    assert (
        last_line(f"rank 0: {RAISED}\nrank 1: {RAISED.replace('head', 'tail')}") == "ValueError: no such head"
    )


def test_a_layout_that_hangs_is_reported_as_such() -> None:
    assert last_line("rank 0: nothing within 90 s\nrank 1: nothing within 90 s") == "nothing within 90 s"
