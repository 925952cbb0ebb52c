"""Rows of docs/reference/faults.md match the tests named after them, and fault points are documented."""

from __future__ import annotations

import re
from types import SimpleNamespace

from forge.runtime import fault
from forge.runtime.causes import CAUSES
from tests.faults.table import Results, files_of, show
from tests.support.diagnosed import PAGE, REPOSITORY, row_of, rows


def test_every_row_has_a_test_and_known_causes_and_every_such_test_a_row() -> None:
    tested = set()
    for file in (REPOSITORY / "tests").rglob("test_*.py"):
        names = re.findall(r"^def (test_\w+)\(", file.read_text("utf-8"), re.M)
        tested |= {row for name in names if (row := row_of(name))}
    assert tested == {row.name for row in rows()}
    assert {cause for row in rows() for cause in row.causes} <= CAUSES.keys()


def test_every_fault_point_is_documented_where_it_is_defined_and_for_operators() -> None:
    used = set()
    for file in (REPOSITORY / "forge").rglob("*.py"):
        used |= set(re.findall(r'fault_point\("([\w.-]+)"', file.read_text("utf-8")))
    assert used == set(re.findall(r"^    ([a-z][\w.-]*) +(?:every rank|rank 0), ", fault.__doc__ or "", re.M))
    assert used == set(
        re.findall(r"^\| `([\w.-]+)` \| (?:every rank|rank 0) \|", PAGE.read_text("utf-8"), re.M)
    )


def test_a_row_s_result_counts_failed_skipped_and_missing_tests() -> None:
    results = Results({"K1", "K2", "S2", "S3", "S4"}, collected={"K1", "K2", "S2", "S4"})
    for test, outcome in (
        ("test_k1_a", "passed"),
        ("test_k1_b", "rerun"),
        ("test_k1_b", "passed"),
        ("test_k2_a", "passed"),
        ("test_k2_b[1]", "failed"),
        ("test_s2_a", "skipped"),
        ("test_other", "failed"),
    ):
        results.pytest_runtest_logreport(
            SimpleNamespace(
                nodeid=f"tests/x.py::{test}",
                when="call",
                outcome=outcome,
                duration=1.5,
                longrepr=("x.py", 1, "Skipped: no tmpfs"),
            )
        )
    output = [results.of(row) for row in ("K1", "K2", "S2", "S3", "S4")]
    assert output == ["passed (2, 1 repeated)", "FAILED (1 of 2)", "skipped", "NO TEST", "NOT RUN"]
    table = show(results)
    assert re.search(r"^K1   passed \(2, 1 repeated\) +4 s  +SIGKILL", table, re.M)
    assert len(re.findall("^S2 ", table, re.M)) == 1
    assert table.splitlines()[-3:] == [
        "FAILED  tests/x.py::test_k2_b[1]",
        "skipped S2: no tmpfs",
        "5 rows in 9 s: 1 passed, 1 FAILED, 1 skipped, 1 NO TEST, 1 NOT RUN",
    ]


def test_only_files_with_a_test_of_the_row_are_collected() -> None:
    assert [file.name for file in files_of({"P6"})] == ["test_sbatch.py"]
    assert {file.name for file in files_of({"K2", "H2"})} >= {"test_kills.py", "test_time.py"}
