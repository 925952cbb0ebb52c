"""What docs/recovery.md quotes is what the code says, and what the code says of a fault is in docs/recovery.md."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.table import PAGE, REPOSITORY

# Where faults are reported.
FILES = [
    *sorted((REPOSITORY / "forge" / "resilience").glob("*.py")),
    *sorted((REPOSITORY / "forge" / "checkpoint").glob("*.py")),
    *(
        REPOSITORY / "forge" / "train" / f"{name}.py"
        for name in [
            "anomalies",
            "changes",
            "crash",
            "evaluate",
            "origin",
            "resume",
            "rollback",
            "save",
            "trainer",
        ]
    ),
    *(REPOSITORY / "forge" / "observe" / f"{name}.py" for name in ["run_directory", "json_lines", "report"]),
]
ERRORS = {"UserError", "Alarm", "RollbackRequired", "Damaged", "RanksFailed", "OSError"}
REPORTING = {"warning", "error", "exception", "_say", "_to_stderr", "_end"} | ERRORS
# Stands for what varies.
GAP = "\0"


def quoted() -> list[str]:
    """The messages in the first column of every table of messages."""
    tables = re.findall(r"^\| message \|.*\n\|[-|]+\|\n((?:\|.*\n)+)", PAGE.read_text("utf-8"), re.M)
    cells = [row.split(" | ")[0] for table in tables for row in table.splitlines()]
    return [message for cell in cells for message in re.findall(r"`([^`]+)`", cell)]


def pieces(message: str) -> list[str]:
    """What of a quoted message does not vary: all but `...` and numbers."""
    return [piece for piece in re.split(r"\.\.\.|\d[\d.]*", message) if piece.strip()]


def template(node: ast.expr) -> str | None:
    """A text of the code with gaps where values go; None if `node` is none."""
    if isinstance(node, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else GAP for part in node.values)
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.sub(r"%[.\d]*[a-z]", GAP, node.value)
    return None


def says(text: str, message: str) -> bool:
    """Whether a template has all pieces of a message, in order."""
    place = 0
    for piece in pieces(message):
        place = text.find(piece, place)
        if place < 0:
            return False
        place += len(piece)
    return True


def reported(file: Path) -> Iterator[str]:
    """Templates of the warnings and errors of a file, but for those that are nearly all gaps."""
    for call in (node for node in ast.walk(ast.parse(file.read_text("utf-8"))) if isinstance(node, ast.Call)):
        name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        texts = [text for argument in call.args if (text := template(argument)) is not None]
        if name in REPORTING and texts and len(re.findall("[a-z]", texts[0])) > 8:
            yield texts[0]


@pytest.mark.long
def test_every_message_of_the_page_is_one_of_the_code() -> None:
    texts = set()
    for file in (REPOSITORY / "forge").rglob("*.py"):
        nodes = ast.walk(ast.parse(file.read_text("utf-8")))
        texts |= {
            text for node in nodes if isinstance(node, ast.expr) and (text := template(node)) is not None
        }
    messages = quoted()
    assert len(messages) > 40 and all(len("".join(pieces(message))) > 8 for message in messages)
    assert [message for message in messages if not any(says(text, message) for text in texts)] == []


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_message_about_a_fault_is_on_the_page(file: Path) -> None:
    messages = quoted()
    assert [text for text in reported(file) if not any(says(text, message) for message in messages)] == []


def test_a_message_that_has_changed_or_is_new_would_be_found(tmp_path) -> None:
    text = template(ast.parse('f"step {n} was skipped: {why}"', mode="eval").body)
    assert says(text, "step 120 was skipped: ...") and says(text, "was skipped")
    assert not says(text, "step 120 was left out: ...") and not says(text, "was skipped: step")
    (tmp_path / "x.py").write_text(
        'log.warning("rank %d of %s has lost its way", rank, name)\nlog.info("all is well")'
    )
    assert list(reported(tmp_path / "x.py")) == [f"rank {GAP} of {GAP} has lost its way"]
