"""Render a page in a real browser; return its DOM and log, and write a screenshot.

`python -m tests.support.browser RUN` draws docs/images/report.png. For another picture, give a page, --output and --height.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from scripts import report

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
PICTURE = Path(__file__).parents[2] / "docs" / "images" / "report.png"


class Shown(NamedTuple):
    """A rendered page. dom: the parsed page. messages: the browser's log, including the console's messages."""

    dom: str
    messages: str


def show(page: Path, picture: Path, width: int, height: int) -> Shown:
    """Open the file `page` in a window of `width` x `height` pixels and write a screenshot to `picture`."""
    assert BROWSER is not None, "no chromium: apt-get install chromium"
    with tempfile.TemporaryDirectory() as profile:
        browser = subprocess.run(
            [
                BROWSER,
                "--headless",
                "--no-sandbox",
                "--disable-gpu",
                "--hide-scrollbars",
                f"--user-data-dir={profile}",
                "--enable-logging=stderr",
                f"--window-size={width},{height}",
                f"--screenshot={picture}",
                "--dump-dom",
                page.resolve().as_uri(),
            ],
            capture_output=True,
            text=True,
            timeout=120,
        )
    assert browser.returncode == 0, browser.stderr
    return Shown(browser.stdout, browser.stderr)


def print_page(page: Path, paper: Path) -> bytes:
    """Print the file `page` to `paper`, a tagged PDF; return the PDF's bytes."""
    assert BROWSER is not None, "no chromium: apt-get install chromium"
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--no-pdf-header-footer"]
    with tempfile.TemporaryDirectory() as profile:
        subprocess.run(
            [
                BROWSER,
                *options,
                f"--user-data-dir={profile}",
                f"--print-to-pdf={paper}",
                page.resolve().as_uri(),
            ],
            capture_output=True,
            timeout=120,
            check=True,
        )
    return paper.read_bytes()


def main() -> int:
    """Draw the top of a page. For a run directory, first build the run's report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path, help="a run's directory, or a page")
    parser.add_argument("--output", type=Path, default=PICTURE, help="the picture (docs/images/report.png)")
    parser.add_argument("--height", type=int, default=1300, help="of the picture, in pixels (%(default)s)")
    given = parser.parse_args()
    if given.source.is_file():
        show(given.source, given.output, 1180, given.height)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "page.html"
        code = report.main([str(given.source), "--output", str(page)])
        if code == 0:
            show(page, given.output, 1180, given.height)
    return code


if __name__ == "__main__":
    sys.exit(main())
