import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from forge.observe.collector import Collector


class Node:
    """A node of a reference cycle. Only the garbage collector can free the cycle."""

    def __init__(self):
        self.me = self


@contextmanager
def running(interval: int) -> Iterator[Collector]:
    collector = Collector(interval)
    collector.before_run(0)
    yield collector
    collector.after_run()


@pytest.fixture(autouse=True)
def restore():
    yield
    gc.unfreeze()
    gc.enable()


def test_collects_at_multiples_of_the_interval_and_only_then():
    with running(10) as collector:
        assert not gc.isenabled()
        garbage = weakref.ref(Node())
        collector.after_step(9)
        assert garbage() is not None
        collector.after_step(10)
        assert garbage() is None


@pytest.mark.long
def test_objects_from_before_the_run_are_frozen_and_pythons_settings_return_afterwards():
    with running(10):
        assert gc.get_freeze_count() > 0
    assert gc.get_freeze_count() == 0 and gc.isenabled()


def test_a_disabled_collector_stays_disabled():
    gc.disable()
    with running(10):
        pass
    assert not gc.isenabled()


def test_interval_zero_leaves_everything_to_python():
    gc.collect()  # postpones Python's own next collection
    with running(0) as collector:
        garbage = weakref.ref(Node())
        assert gc.isenabled() and gc.get_freeze_count() == 0
        collector.after_step(0)
        assert garbage() is not None


@pytest.mark.long
@pytest.mark.parametrize("interval", [0, 1])
def test_the_time_of_collections_is_counted_wherever_they_start(interval):
    gc.disable()  # otherwise Python may collect in between
    with running(interval) as collector:
        assert collector.take_seconds() == 0
        collector.after_step(1)
        gc.collect()
        assert collector.take_seconds() > 0
        assert collector.take_seconds() == 0
    assert collector._time not in gc.callbacks
