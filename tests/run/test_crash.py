from __future__ import annotations

import threading

import pytest
from torch.distributed import DistStoreError, HashStore

from forge.observe.report import RunPhases
from forge.run.crash import STALLED_CALLS, Listener, RollCall


def test_shared_work_runs_once_on_the_first_rank_and_the_others_wait() -> None:
    store = HashStore()
    first, second = (RollCall(store, rank, 2, "start") for rank in range(2))
    begun, may_end, done = threading.Event(), threading.Event(), []

    def work() -> None:
        begun.set()
        assert may_end.wait(10)
        done.append("first")

    at_work = threading.Thread(target=first.once, args=(work, 10.0))
    at_work.start()
    assert begun.wait(10)
    with pytest.raises(DistStoreError):
        second.once(lambda: done.append("second"), 0.2)
    may_end.set()
    second.once(lambda: done.append("second"), 10.0)
    assert done == ["first"]
    at_work.join()


def test_a_failure_on_the_first_rank_does_not_block_the_others() -> None:
    store = HashStore()
    first, second = (RollCall(store, rank, 2, "start") for rank in range(2))
    with pytest.raises(ZeroDivisionError):
        first.once(lambda: print(1 // 0), 10.0)
    second.once(lambda: None, 0.2)


def test_a_rank_in_a_step_knows_of_a_rank_that_waits_for_data() -> None:
    store = HashStore()
    phases = [RunPhases(), RunPhases()]
    late, waiting = (Listener(RollCall(store, rank, 2, "start"), phases[rank]) for rank in range(2))
    for one in phases:
        one.enter("step", 1)
    phases[0].enter("data", 2)
    phases[1].enter("step", 2)
    for _ in range(STALLED_CALLS + 3):
        assert late() is None and waiting() is None
    waited = waiting.data_waited
    assert waited > 0
    phases[0].enter("step", 2)
    for _ in range(STALLED_CALLS + 3):
        assert late() is None and waiting() is None
    assert waiting.data_waited == waited
