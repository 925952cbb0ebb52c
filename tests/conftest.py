"""Give every test its own random seed and no GPU; detect leftover processes; set the marker `processes`; time each folder.

After each fault test, a diagnosis of its runs must name the planted fault.
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

# The same examples in every run, and no deadline, because a busy machine may delay any example.
settings.register_profile(
    "forge", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("forge")
# On a busy machine, threads waiting for each other make small operations a hundred times slower. Children inherit this.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Let torch.cuda.is_available() ask NVML: PyTorch 2.11 calls it in an import, and forked ranks could not use a started CUDA.
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
torch.set_num_threads(1)
# nohup ignores SIGHUP, and the tests' runs would inherit that.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
processes.watch()

# Largest allowed share of tests with a second run.
MAX_RERUNS = 0.002


def pytest_configure(config: pytest.Config) -> None:
    """Hide GPUs unless all chosen tests need one, before any test module initialises CUDA."""
    if not gpus.needs_gpus(config.option.markexpr, config.args):
        gpus.hide()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without a GPU, skip the tests that need one. Mark tests that start processes.

    Only marked tests run once more after a failure, unless --reruns sets another number.
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
    """After a passed test of a row in docs/reference/faults.md, diagnose its run directories."""
    result = yield
    folder = pyfuncitem.funcargs.get("tmp_path")
    if isinstance(folder, Path):
        diagnosed.require_named(pyfuncitem, folder)
    return result


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    rooms.add(report.nodeid, report.duration)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail the session if the share of tests with a second run exceeds MAX_RERUNS, because reruns hide races."""
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
    """Set the seed and one thread before each test, whatever ran before; fail on leftover processes."""
    torch.manual_seed(0)
    torch.set_num_threads(1)  # a benchmark sets its own number
    processes.started.clear()
    yield
    end_ranks()
    # Triton starts a compiler in a test on a GPU.
    may_start = any(map(request.node.get_closest_marker, ("processes", "gpu")))
    if processes.started and not may_start:
        pytest.fail(f"starts a process: mark it with pytest.mark.processes ({processes.started})")
