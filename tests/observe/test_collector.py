import gc
import weakref

import pytest

from forge.observe.collector import Collector


class Node:
    """One end of a reference cycle, which only the collector can free."""

    def __init__(self):
        self.me = self


@pytest.fixture(autouse=True)
def restore():
    yield
    gc.unfreeze()
    gc.enable()


def test_collects_at_multiples_of_the_interval_and_only_then():
    with Collector(10) as collector:
        assert not gc.isenabled()
        garbage = weakref.ref(Node())
        collector.collect(9)
        assert garbage() is not None
        collector.collect(10)
        assert garbage() is None


def test_what_exists_on_entry_is_frozen_and_python_s_way_returns_on_exit():
    with Collector(10):
        assert gc.get_freeze_count() > 0
    assert gc.get_freeze_count() == 0 and gc.isenabled()


def test_a_collector_that_was_off_stays_off():
    gc.disable()
    with Collector(10):
        pass
    assert not gc.isenabled()


def test_interval_zero_leaves_everything_to_python():
    gc.collect()  # Python's own next collection is far away
    with Collector(0) as collector:
        garbage = weakref.ref(Node())
        assert gc.isenabled() and gc.get_freeze_count() == 0
        collector.collect(0)
        assert garbage() is not None


@pytest.mark.parametrize("interval", [0, 1])
def test_the_time_of_collections_is_counted_whoever_makes_them(interval):
    gc.disable()  # or Python makes one in between
    with Collector(interval) as collector:
        assert collector.take_seconds() == 0
        collector.collect(1)
        gc.collect()
        assert collector.take_seconds() > 0
        assert collector.take_seconds() == 0
    assert collector._time not in gc.callbacks
