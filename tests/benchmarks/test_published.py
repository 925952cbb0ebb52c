"""Published runs: every row is a valid configuration with a source, and the split into fitted and held-out rows is fixed."""

import pytest

from benchmarks.published import is_fitted, line, read
from forge.config import check_world


@pytest.mark.long
def test_every_row_is_a_valid_configuration_with_a_source() -> None:
    rows, hardware = read()
    assert len({row.name for row in rows}) == len(rows) >= 20
    for row in rows:
        assert row.source.startswith("https://") and row.hardware in hardware
        assert check_world(row.loaded(), row.gpus).world == row.gpus


def test_every_other_row_by_tokens_per_second_was_fitted() -> None:
    rows, hardware = read()
    speeds = [row.tokens_per_s for row in rows]
    assert speeds == sorted(speeds)
    assert [is_fitted(number) for number in range(4)] == [True, False, True, False]
    assert line(1, rows[1], 1.1 * speeds[1]).endswith("| +10% | held out |")
    slow = hardware["h100-500w"].peak_flops("bfloat16")
    assert slow is not None and slow < (hardware["h100"].peak_flops("bfloat16") or 0)
