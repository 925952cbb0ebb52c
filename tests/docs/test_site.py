"""The documentation site builds, and no link in it is broken."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from tests.support.pages import REPOSITORY

BUILD = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going"]


def build(source: Path, output: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*BUILD, source, output], capture_output=True, text=True)


def test_the_site_builds_without_a_warning_and_a_broken_link_fails_it(tmp_path: Path) -> None:
    built = build(REPOSITORY / "docs", tmp_path / "site")
    assert built.returncode == 0, built.stderr
    assert (tmp_path / "site" / "guides" / "checkpoints.html").exists()

    small = tmp_path / "docs"
    small.mkdir()
    shutil.copy(REPOSITORY / "docs" / "conf.py", small)
    (small / "index.md").write_text("# A page\n\nSee [nothing](nowhere.md).\n")
    broken = build(small, tmp_path / "broken")
    assert broken.returncode != 0 and "nowhere.md" in broken.stderr
