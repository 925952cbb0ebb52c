"""Every warning and error of forge has a cause, every cause is used, and docs/reference/faults.md lists them all."""

from __future__ import annotations

import ast
import errno
import re
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from forge.runtime.causes import CAUSES, Cause, tables
from forge.runtime.distributed import cause_of
from forge.runtime.errors import FAILED, NO_CHECKPOINT, UserError, caused_by
from tests.support.diagnosed import PAGE, REPOSITORY

FILES = sorted((REPOSITORY / "forge").rglob("*.py"))


def test_the_page_has_the_tables_of_all_causes() -> None:
    assert tables() in PAGE.read_text("utf-8")


def unmarked(source: str) -> Iterator[int]:
    """Yield the line numbers of warnings and errors logged without a cause."""
    for call in (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)):
        if isinstance(call.func, ast.Attribute) and call.func.attr in (
            "warning",
            "error",
            "exception",
            "log",
        ):
            logs = ast.unparse(call.func.value) in ("log", "logger", "logging.getLogger(__name__)")
            if logs and "extra" not in {keyword.arg for keyword in call.keywords}:
                yield call.lineno


def test_every_warning_and_error_has_a_cause() -> None:
    found = {str(file): lines for file in FILES if (lines := list(unmarked(file.read_text("utf-8"))))}
    assert found == {}
    source = 'log.info("x")\nlog.error("x", extra=Cause.ERROR.mark)\nlog.log(level, "x")\nlogger.error("x")'
    assert list(unmarked(source)) == [3, 4]


def test_every_cause_is_used() -> None:
    texts = "".join(file.read_text("utf-8") for file in FILES if file.name != "causes.py")
    assert {cause.name for cause in Cause} == set(
        re.findall(r"\bCause\.([A-Z_]+)", texts)
    ) & Cause._member_map_.keys()
    assert list(CAUSES) == [cause.name.lower() for cause in Cause]


def test_every_kind_of_event_is_in_the_table_of_events() -> None:
    page = (REPOSITORY / "docs" / "reference" / "metrics.md").read_text("utf-8")
    table = re.search(r"^\| event \|.*\n\|[-|]+\|\n((?:\|.*\n)+)", page, re.M)
    assert table is not None
    listed = set(re.findall(r"`(\w+)`", " ".join(row.split(" | ")[0] for row in table[1].splitlines())))
    texts = "".join(file.read_text("utf-8") for file in FILES)
    kinds = set(re.findall(r'event\(\s*"(\w+)"', texts))
    kinds |= {Cause[name] for name in re.findall(r"event\(\s*Cause\.([A-Z_]+)", texts)}
    assert len(kinds) > 15 and kinds <= listed


GLOO = "[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:4242"


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (UserError(GLOO, FAILED, Cause.DATA), Cause.DATA),
        (OSError(errno.ENOSPC, "full"), Cause.DISK_FULL),
        (PermissionError(errno.EACCES, "no"), Cause.IO_ERROR),
        (RuntimeError(GLOO), Cause.CONNECTION_LOST),
        (dist.DistNetworkError("no route"), Cause.CONNECTION_LOST),
        (RuntimeError("https://peerless.example: No space left on device"), Cause.ERROR),
        (ValueError(GLOO), Cause.ERROR),
    ],
)
def test_an_exceptions_cause_depends_on_its_type_and_only_torchs_text_is_parsed(error, cause) -> None:
    assert cause_of(error) is cause


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (UserError("a mistake"), Cause.CONFIGURATION),
        (UserError("nothing is left", NO_CHECKPOINT), Cause.NO_CHECKPOINT),
        (UserError("an end", FAILED), Cause.ERROR),
        (UserError("full", FAILED, Cause.DISK_FULL), Cause.DISK_FULL),
    ],
)
def test_an_errors_default_cause_comes_from_its_exit_code(error, cause) -> None:
    assert error.cause is cause
    usual = cause in (Cause.CONFIGURATION, Cause.ERROR)
    with pytest.raises(UserError) as raised, caused_by(Cause.DATA):
        raise error
    assert raised.value.cause is (Cause.DATA if usual else cause)
