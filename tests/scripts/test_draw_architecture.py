"""The drawings in docs/architecture.md are those of today's code."""

from __future__ import annotations

from pathlib import Path

from scripts.draw_architecture import main
from tests.support.pages import REPOSITORY


def test_the_drawings_in_the_documentation_are_up_to_date(tmp_path: Path) -> None:
    assert main(["--output", str(tmp_path)]) == 0
    for name in ("batch.svg", "parameter.svg"):
        committed = (REPOSITORY / "docs" / name).read_text()
        assert (tmp_path / name).read_text() == committed, "run python scripts/draw_architecture.py"
