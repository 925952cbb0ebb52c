"""What `scripts/diagnose.py` has to say of the run directories that a fault's own test has left behind."""

from __future__ import annotations

import re
from pathlib import Path

from forge.tools.report.diagnose import diagnose

_TEST = re.compile(r"test_([kpsrnhdxe]\d+)_")
_KILLED = "no report of an end: killed|the processes were killed|a rank was killed, or died"
_STOPPED = "stopped on request|: stopped at step"
# Row of the table -> what a diagnosis calls the fault. A row without a name here is in NOT_NAMED.
NAMES = {
    "K1": _KILLED,
    "K2": _KILLED,
    "K3": _KILLED,
    "K4": "remains of a save that was killed",
    "K5": _KILLED,
    "P1": _STOPPED,
    "P2": _STOPPED,
    "P3": _STOPPED,
    "P4": f"{_STOPPED}|{_KILLED}",
    "P5": _STOPPED,
    "S1": "a damaged checkpoint was passed over|no usable checkpoint",
    "S2": "a save failed|too many saves in a row failed|a disk is full",
    "S3": "the folder of the run cannot be used",
    "S4": "a save failed|too many saves in a row failed",
    "S6": _KILLED,
    "N1": "a step was skipped",
    "N2": "rolled back to an earlier checkpoint|too many bad steps",
    "N3": "copies of the same parameters differ",
    "H1": "a phase outlasted its bound: a rank hangs",
    "H2": "a rank is slow, and all wait for it",
    "H3": "a rank failed, and the others with it|an error in the program on one rank|planted",
    "D1": "damaged data, or of another tokenizer",
    "D2": "data or tokenizer have changed since the checkpoint|the configuration cannot be continued|damaged data",
    "E1": "nodes of an elastic run were lost, or joined",
    "E3": "nodes of an elastic run were lost, or joined",
    "E4": _KILLED,
    "E5": "a state on a node was damaged, or incomplete",
    "E7": "a state on a node was damaged, or incomplete",
    "E11": "nodes of an elastic run were lost, or joined",
    "H4": f"{_STOPPED}|a phase outlasted its bound: a rank hangs",
    "E8": "nodes of an elastic run were lost, or joined",
    "E10": "a slow node has left an elastic run|a rank is slow",
    "X1": "something beside training failed",
    "X2": "out of memory",
}
# Tests of a row in which something else happens.
OTHERS = {
    # The same three nodes continue.
    "test_e11_a_run_waits_for_the_lock_of_a_frozen_rank_and_uses_up_no_restart": _KILLED,
    "test_e3_a_spare_that_is_not_needed_ends_with_the_run": "Nothing ended this run early",
    "test_k1_a_signal_in_the_crash_report_does_not_cut_them_short": "an error in the program on one rank",
    "test_n3_only_what_has_copies_is_compared_and_only_if_asked": "Nothing ended this run early",
    "test_s6_a_second_run_on_the_same_directory_is_refused_and_names_the_first": _STOPPED,
}
# No fault of a run: ways to resume, data that are prepared, a job script; and S5, which no run has. What the others
# refuse or repair is one message.
NOT_NAMED = {"E2", "E6", "E9", "P6", "S5", "R1", "R2", "R3", "R4", "R5", "R6", "D3", "D4"}
NOT_NAMED |= {"E12", "D5", "X3", "S7", "S8", "S9", "S10", "S11", "R7", "R8"}


def row_of(test: str) -> str | None:
    """The row that a test's name gives: K3 of test_k3_...; None if it gives none."""
    match = _TEST.match(test)
    return match[1].upper() if match else None


def require_named(test: str, folder: Path) -> None:
    """Fail if the test of a row has left runs in `folder`, and a diagnosis of none of them names the row's fault."""
    row = row_of(test)
    if row not in NAMES:
        return
    name = OTHERS.get(test.partition("[")[0], NAMES[row])
    runs = sorted({path.parent for path in folder.rglob("events.jsonl")})
    texts = [diagnose(run) for run in runs]
    assert not texts or any(re.search(name, text) for text in texts), "\n".join(texts)
