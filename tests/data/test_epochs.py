"""Epochs of the data: counts, log lines and warnings."""

import logging

import pytest

from forge.data.dataset import PackedDataset
from forge.data.epochs import epochs, log_epochs
from forge.data.synthetic import SyntheticSource
from tests.support.streams import Counting, Numbers

LITTLE, MUCH = Numbers("little", 10), Numbers("much", 1000)


def dataset(*sources, weights=None) -> PackedDataset:
    return PackedDataset(sources, weights or [1] * len(sources), 1, seed=0, block=10)


def test_epochs_are_counted_per_source() -> None:
    data = dataset(LITTLE, MUCH, weights=[1, 4])
    assert epochs(data, 0) == {"little": 0, "much": 0}
    assert epochs(data, 500) == {"little": 10.0, "much": 0.4}


def test_a_synthetic_source_has_none_and_the_same_path_again_is_numbered() -> None:
    assert epochs(dataset(SyntheticSource(0, 300)), 100) == {}
    data = dataset(Counting(11), SyntheticSource(0, 300), Counting(11))
    assert epochs(data, 30) == {"counting": 1.0, "counting#2": 1.0}


def test_epochs_continue_across_a_change_of_mixture() -> None:
    before, after = dataset(LITTLE), dataset(MUCH, LITTLE)
    order = after.continuing(before.order, 20)
    assert epochs(after.following(order), 40) == {"much": 0.01, "little": 3.0}


def logged(caplog: pytest.LogCaptureFixture, *numbers: int) -> list[tuple[str, str]]:
    with caplog.at_level(logging.INFO):
        log_epochs(*(epochs(dataset(LITTLE, MUCH), number) for number in numbers))
    return [(record.levelname, record.getMessage()) for record in caplog.records]


def test_planned_epochs_are_logged_and_more_than_four_are_a_warning(caplog) -> None:
    first, second, warning = logged(caplog, 0, 100)
    assert first == ("INFO", "little: 5.00 epochs by the end of the run")
    assert second == ("INFO", "much: 0.05 epochs by the end of the run")
    assert warning[0] == "WARNING" and "reads little 5 times, but" in warning[1] and "much" not in warning[1]


def test_four_epochs_give_no_warning(caplog) -> None:
    assert [level for level, _ in logged(caplog, 0, 80)] == ["INFO", "INFO"]


def test_a_resumed_run_reports_epochs_read_so_far(caplog) -> None:
    assert logged(caplog, 40, 80)[0][1] == "little: 4.00 epochs by the end of the run, 2.00 so far"
