import math

import pytest

from forge.observe.progress import StepTimes, format_count, format_duration, format_line

FIELDS = {
    "step": 120,
    "loss": 4.3123,
    "grad_norm": 1.234,
    "lr": 3e-3,
    "tokens_per_second": 8123.4,
    "step_time_s": 0.5,
    "data_time_s": 0.001,
    "memory_gib": 1.31,
    "mfu": 0.412,
}


def test_the_line_shows_everything_in_order():
    assert format_line(FIELDS, total_steps=4000, eta_s=192) == (
        "step  120/4000  loss 4.312  grad 1.23  lr 3.0e-03  8,123 tok/s  mfu 41.2%  mem 1.3 GiB  "
        "data 0.2%  eta 3m12s"
    )


def test_what_is_absent_is_left_out():
    assert (
        format_line({"step": 1, "loss": 2.0, "mfu": None}, total_steps=9, eta_s=None)
        == "step 1/9  loss 2.000"
    )


def test_a_skipped_step_says_so_and_shows_numbers_that_are_not_finite():
    line = format_line({"step": 3, "skipped": True, "loss": math.nan, "grad_norm": math.inf}, 9, None)
    assert line == "step 3/9  SKIPPED  loss nan  grad inf"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"),
        (59.4, "59s"),
        (59.6, "1m00s"),
        (192, "3m12s"),
        (7500, "2h05m"),
        (86400 * 3 + 3600 * 4, "3d04h"),
        (-1, "0s"),
        (math.inf, "?"),
        (math.nan, "?"),
    ],
)
def test_durations(seconds, text):
    assert format_duration(seconds) == text


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0"),
        (8123.4, "8,123"),
        (999_999, "999,999"),
        (1_239_000, "1.24M"),
        (12_390_000, "12.4M"),
        (999_600_000, "1.00B"),
        (70e9, "70.0B"),
        (15e12, "15.0T"),
        (15e15, "15,000T"),
        (math.nan, "?"),
    ],
)
def test_counts(number, text):
    assert format_count(number) == text


def test_the_eta_forgets_the_first_step_and_those_long_ago():
    times = StepTimes(window=4)
    assert times.eta(10) is None
    times.add(60.0)
    assert times.eta(10) == 600.0
    times.add(1.0)
    assert times.eta(10) == 10.0
    for _ in range(4):
        times.add(2.0)
    assert times.eta(10) == 20.0
    assert times.eta(-1) == 0.0


def test_garbage_collection_is_shown_where_it_matters():
    assert "gc" not in format_line(FIELDS | {"gc_time_s": 0.004}, 4000, None)
    assert "gc 2.0%" in format_line(FIELDS | {"gc_time_s": 0.01}, 4000, None)
