"""Runs that nothing happened to, which the disturbed ones are held against; and the diagnosis of those disturbed."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator

import pytest

from forge.report.diagnose import diagnose
from tests.faults.table import row_of
from tests.support.runs import Run

# Row of the table -> what a diagnosis of the directories that its test leaves calls the fault.
KILLED = "no report of an end: killed|the processes were killed|a rank was killed, or died"
STOPPED = "stopped on request|: stopped at step"
NAMES = {
    "K1": KILLED,
    "K2": KILLED,
    "K3": KILLED,
    "K5": KILLED,
    "P1": STOPPED,
    "P2": STOPPED,
    "P3": STOPPED,
    "P4": STOPPED + "|" + KILLED,
    "P5": STOPPED,
    "S1": "a damaged checkpoint was passed over|no usable checkpoint",
    "S2": "a save failed|too many saves in a row failed",
    "S3": "the folder of the run cannot be used",
    "N1": "a step was skipped",
    "N2": "rolled back to an earlier checkpoint|too many bad steps",
    "N3": "copies of the same parameters differ",
    "H1": "a phase outlasted its bound: a rank hangs",
    "H2": "a rank is slow, and all wait for it",
    "H3": "a rank failed, and the others with it|an error in the program on one rank|planted",
    "D1": "damaged data, or of another tokenizer",
    "D2": "data or tokenizer have changed since the checkpoint",
    "X1": "something beside training failed",
    "X2": "out of memory",
}


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Run]:
    """`undisturbed(*options, world=n)`: the finished run of these options, made once."""

    @functools.cache
    def make(*options: str, world: int = 1) -> Run:
        run = Run(tmp_path_factory.mktemp("undisturbed"), *options)
        assert run(world=world) == 0, run.output()
        return run

    return make


@pytest.fixture(autouse=True)
def the_diagnosis_names_the_fault(request: pytest.FixtureRequest) -> Iterator[None]:
    """After each test of a row: what it left in run directories is diagnosed, and the fault is named."""
    row, folder = row_of(request.node.name), None
    if row in NAMES and "tmp_path" in request.fixturenames:
        folder = request.getfixturevalue("tmp_path")
    yield
    if row is None or folder is None or not request.node.stash.get(PASSED, False):
        return
    runs = sorted({path.parent for path in folder.rglob("events.jsonl")})
    texts = [diagnose(run) for run in runs]
    assert not runs or any(re.search(NAMES[row], text) for text in texts), "\n".join(texts)


PASSED = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Note whether the test itself passed."""
    report = yield
    if report.when == "call":
        item.stash[PASSED] = report.passed
    return report
