"""Every recipe of docs/internals/extending applies, trains with its command, and gives equal results under all layouts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.extension import apply_page, copy_repository
from tests.support.layouts import slow_unless
from tests.support.pages import REPOSITORY

PAGES = sorted(
    path for path in (REPOSITORY / "docs" / "internals" / "extending").glob("*.md") if path.name != "index.md"
)


# Each recipe trains in a copy of the repository for half a minute.
QUICK = ("optimizer",)


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, id=page.stem, marks=slow_unless(page.stem in QUICK)) for page in PAGES],
)
def test_the_recipe_works(page: Path, tmp_path: Path) -> None:
    clone = tmp_path / "clone"
    copy_repository(clone)
    assert apply_page(page, clone), "the page changes nothing"
    command = [sys.executable, "-m", "tests.support.extension", str(page)]
    environment = {**os.environ, "PYTHONPATH": str(clone), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, cwd=clone, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "layouts agree" in done.stdout


def test_an_inapplicable_recipe_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "```diff\n--- a/forge/runtime/errors.py\n+++ b/forge/runtime/errors.py\n@@\n-no such line\n+another\n```\n"
    )
    copy_repository(tmp_path / "clone")
    with pytest.raises(AssertionError, match="0 places"):
        apply_page(page, tmp_path / "clone")
