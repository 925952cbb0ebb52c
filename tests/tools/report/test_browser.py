"""The page in a real browser: it is drawn completely, and screen readers find its tables."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from forge.runtime.errors import FINISHED
from forge.tools.report.page import make_page
from forge.tools.report.read import read_run
from tests.support.browser import BROWSER, print_page, show
from tests.support.recorded import write_run
from tests.support.trained import call


@pytest.mark.processes
@pytest.mark.skipif(BROWSER is None, reason="no chromium: apt-get install chromium")
def test_a_browser_draws_the_page_without_an_error(tmp_path: Path) -> None:
    run, page = write_run(tmp_path / "run", bad_layer=2), tmp_path / "page.html"
    made = call(tmp_path, "report", str(run), "--output", str(page))
    assert made.code == FINISHED and f"wrote {page}" in made.out
    shot = tmp_path / "shot.png"
    browser = show(page, shot, 1240, 3000)
    assert "CONSOLE" not in browser.messages
    assert browser.dom.count("<table>") > 15 and browser.dom.count("<caption>") == browser.dom.count(
        "<table>"
    )
    assert len(re.findall(r"<svg [^>]*role=\"img\"", browser.dom)) > 12
    # Planned by the script itself, from the run's config.toml.
    assert "run: the plan against the run</caption>" in browser.dom
    assert _colors(shot) > 200


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.skipif(BROWSER is None, reason="no chromium: apt-get install chromium")
def test_on_paper_every_table_is_shown_and_every_drawing_has_a_name_for_a_screen_reader(
    tmp_path: Path,
) -> None:
    """A screen reader reads the tags of a PDF. Tables under "The numbers" are folded only on the screen."""
    page = tmp_path / "page.html"
    page.write_text(make_page([read_run(write_run(tmp_path / "run"))]))
    tags = print_page(page, tmp_path / "page.pdf")
    html = page.read_text()
    assert html.count("<details>") > 12
    for tag, element in (("H1", "<h1"), ("H2", "<h2"), ("Table", "<table")):
        assert len(re.findall(rb"/S\s*/%s\b" % tag.encode(), tags)) == html.count(element), tag
    assert len(re.findall(rb"/Alt\b", tags)) >= html.count('role="img"')


def _colors(shot: Path) -> int:
    """Return a picture's number of colours. A blank one has one."""
    from matplotlib.image import imread

    pixels = (imread(shot)[..., :3] * 255).astype(np.uint32)
    assert pixels.shape[:2] == (3000, 1240)
    return len(np.unique(pixels @ np.array([1 << 16, 1 << 8, 1], dtype=np.uint32)))
