"""What every test has: random numbers of its own, no GPU, no process left behind, the marker `processes`, its room's seconds.

And what every test of a fault has: a diagnosis of the runs that it leaves names the fault.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings

from tests.support import diagnosed, gpus, processes, rooms
from tests.support.harness import end_ranks

# Examples are the same in every run, and none fails for having waited for a processor.
settings.register_profile(
    "forge", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("forge")
# Threads that wait for each other on a busy processor make small operations a hundred times slower. Children inherit this.
os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(1)
# Under nohup it is ignored, and runs of the tests would ignore it too.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
processes.watch()

# Of all tests, that may need a second run.
MAX_RERUNS = 0.002


def pytest_configure(config: pytest.Config) -> None:
    """Hide the GPUs from all tests but those that need one, before a test module asks for them."""
    if not gpus.needs_gpus(config.option.markexpr, config.args):
        gpus.hide()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip tests that need a GPU where there is none, and mark tests that start processes.

    Only the latter are run once more when they fail, unless --reruns sets another number.
    """
    without_gpu = gpus.why_no_gpu()
    for item in items:
        if without_gpu and item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason=without_gpu))
        if processes.starts_processes(item):
            item.add_marker(pytest.mark.processes)
        if item.get_closest_marker("processes") and config.getoption("reruns") is None:
            item.add_marker(pytest.mark.flaky(reruns=1))


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    """Diagnose what a test of docs/reference/faults.md's table has left, once it has passed."""
    result = yield
    folder = pyfuncitem.funcargs.get("tmp_path")
    if isinstance(folder, Path):
        diagnosed.require_named(pyfuncitem, folder)
    return result


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    rooms.add(report.nodeid, report.duration)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail the session when more tests needed a second run than MAX_RERUNS: reruns hide races."""
    reporter: Any = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None:
        return
    again = len(reporter.stats.get("rerun", ()))
    if session.exitstatus == pytest.ExitCode.OK and again > max(3, MAX_RERUNS * session.testscollected):
        reporter.write_line(
            f"\n{again} tests needed a second run: more than {MAX_RERUNS:.1%} of all", red=True
        )
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.section("seconds per room")
    for line in rooms.table():
        terminalreporter.write_line(line)


@pytest.fixture(autouse=True)
def by_itself(request: pytest.FixtureRequest) -> Iterator[None]:
    """Draw the same numbers on one thread whichever tests ran before, and leave no process behind."""
    torch.manual_seed(0)
    torch.set_num_threads(1)  # a benchmark sets those that its options name
    processes.started.clear()
    yield
    end_ranks()
    if processes.started and not request.node.get_closest_marker("processes"):
        pytest.fail(f"starts a process: mark it with pytest.mark.processes ({processes.started})")
