"""A report is one self-contained file. It shows the content of a run's files and names anomalies."""

from __future__ import annotations

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from forge.runtime.errors import UserError
from forge.tools.report.course import marks_of, summary
from forge.tools.report.draw import Mark
from forge.tools.report.findings import findings
from forge.tools.report.page import make_page
from forge.tools.report.read import RunRecord, read_run, read_runs
from forge.tools.report.setting import _planned
from tests.support.recorded import PLAN, write_run

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> str:
    """Return the page of two runs: one with every planted defect, one without."""
    folder = tmp_path_factory.mktemp("page")
    bad = write_run(folder / "bad", bad_layer=2, noise=True, slow=1)
    good = write_run(folder / "good")
    config = good / "config.toml"
    config.write_text(config.read_text().replace("lr = 0.001", "lr = 0.003"))
    runs = [read_run(bad), read_run(good)]
    runs[0].plan, runs[1].plan = PLAN, {"problem": "no class <Own>"}
    return make_page(runs)


def test_every_section_is_there_and_every_figure_has_its_numbers_as_a_table(page: str) -> None:
    titles = re.findall(r"<h2[^>]*>([^<]*)</h2>", page)
    assert [title for title in titles if "(" not in title] == [
        "Summary",
        "What stands out",
        "Learning",
        "Speed and memory",
        "Events",
        "Where the time went",
        "Layout",
        "Memory",
        "Planned and measured",
        "Configuration",
        "Environment",
    ]
    for title in ("Inside the model", "By position", "Experts", "What the model wrote"):
        assert f"{title} (bad)" in titles and f"{title} (good)" in titles
    pictures = re.findall(r"<figure.*?</figure>", page, re.S)
    drawn = [one for one in pictures if "<svg" in one]
    assert len(drawn) > 15
    for one in drawn:
        assert "<figcaption>" in one and "<caption>" in one and "<tbody><tr>" in one
        assert re.search(r'<svg [^>]*role="img" aria-label="\w', one)


def test_a_reason_ending_with_a_full_stop_gets_no_second_one(tmp_path) -> None:
    run = read_run(write_run(tmp_path / "run"))
    run.status.update(state="failed", reason="no checkpoint to return to.")
    assert "The run has failed: no checkpoint to return to. scripts/diagnose.py says more." in findings([run])


def test_the_page_needs_no_other_file_and_no_network(page: str) -> None:
    outside = re.findall(r'(?:src|href)="(?!#|data:)([^"]*)"', page)
    assert outside == [] and "<script" not in page and "@import" not in page and "url(http" not in page


def test_drawings_are_well_formed_and_share_no_id(page: str) -> None:
    drawings = re.findall(r"<svg .*?</svg>", page, re.S)
    for drawing in drawings:
        ElementTree.fromstring(drawing)
    ids = re.findall(r' id="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    used = set(re.findall(r'(?:href="|url\()#([\w-]+)', "".join(drawings)))
    assert used <= set(ids)


def test_what_a_model_wrote_is_text_and_not_markup(page: str) -> None:
    assert "def &lt;b&gt;main&lt;/b&gt;():" in page and "<b>main" not in page


def test_only_differing_keys_are_shown(page: str) -> None:
    table = re.search(r"<table><caption>Keys that differ.*?</table>", page, re.S)
    assert table is not None
    assert "optimizer.lr" in table[0] and "0.003" in table[0] and "train.steps" not in table[0]


def test_a_planned_number_stands_beside_the_measured_one(page: str) -> None:
    table = re.search(r"<table><caption>bad: the plan against the run.*?</table>", page, re.S)
    assert table is not None
    cells = {
        row[0]: re.findall(r"<td[^>]*>([^<]*)</td>", row[1])
        for row in re.findall(r'<th scope="row">([^<]*)</th>(.*?)</tr>', table[0])
    }
    assert cells["time of a step, s"] == ["0.04", "0.05"]
    assert cells["parameters, GiB"] == ["0.0625", "0.0625"]
    assert cells["all of these at the peak of a step, GiB"] == ["0.25", "0.25"]
    assert cells["all memory of the process, GiB"] == ["", "0.4"]
    assert "no class &lt;Own&gt;" in page


def test_a_plan_is_compared_with_the_latest_start_that_trained(tmp_path) -> None:
    """Steps 1 to 39 ran on another number of ranks, and the last start was refused."""
    run = read_run(write_run(tmp_path / "run"))
    for line in run.lines:
        if "loss" in line and line["step"] < 40:
            line.update(step_time_s=9.0, memory_gib=9.0)
    again = [
        {"event": "started", "world_size": 4},
        {"event": "resumed", "step": 45},
        {"event": "rolled_back", "from_step": 50, "to_step": 39},
        {"event": "memory", "parameters_bytes": 2**25},
        {"event": "started", "world_size": 3},
        {"event": "failed", "step": 60},
    ]
    run.events += again
    latest = run.latest_training()
    assert latest.events == again[:4] and latest.series("loss")[0] == list(range(40, 61))
    run.plan = PLAN
    (table,) = _planned([run])
    measured = {row[0]: row[2] for row in table.rows}
    assert measured["time of a step, s"] == 0.05 and measured["all memory of the process, GiB"] == 0.4
    assert measured["parameters, GiB"] == 2**25 / 2**30
    assert RunRecord(Path(), "run", events=again[4:]).latest_training().events == []


def test_the_engine_is_the_one_of_the_start_and_not_of_the_configuration(page: str) -> None:
    row = re.search(r"engine</th>(.*?)</tr>", page)
    assert row is not None and set(re.findall(r"<td[^>]*>([^<]*)</td>", row[1])) == {"zero1"}


def test_a_plan_of_no_known_hardware_has_no_time(tmp_path) -> None:
    run = read_run(write_run(tmp_path / "run"))
    run.plan = PLAN | {"time": None}
    row = re.search(r"time of a step, s</th>(.*?)</tr>", make_page([run]))
    assert row is not None and re.findall(r"<td[^>]*>([^<]*)</td>", row[1]) == ["", "0.05"]


def test_planted_defects_are_named_and_a_sound_run_has_none_of_them(tmp_path) -> None:
    bad = findings([read_run(write_run(tmp_path / "bad", bad_layer=2, noise=True, slow=1))])
    good = findings([read_run(write_run(tmp_path / "good"))])
    assert bad[0].startswith("Layer 2: its updates, relative to the weights, are 100 times")
    assert any(one.startswith("Source b: its loss went from 8.300 to 8.300") for one in bad)
    assert any(
        one.startswith("Rank 1 is slow: reported 2 times, its forward took up to 0.5 s") for one in bad
    )
    assert good == ["1 steps were skipped (31)."]


@pytest.mark.parametrize(("kept", "steps"), [(-1, [2]), (5, [4, 2])])
def test_a_replaced_history_has_no_marks_and_no_counts(kept: int, steps: list[int]) -> None:
    """A history from a checkpoint of the replaced one keeps the curves, and so the events, up to this checkpoint."""
    skipped = [{"event": "skipped", "step": step} for step in (4, 8, 2)]
    back = {"event": "rolled_back", "from_step": 9, "to_step": 6, "reason": "bad"}
    begun = {"event": "fresh", "step": 0, "new": True, "replaced_after": kept}
    run = RunRecord(Path(), "run", events=[*skipped[:2], back, begun, skipped[2]])
    assert [mark.step for mark in marks_of(run)] == steps
    assert findings([run]) == [f"{len(steps)} steps were skipped ({', '.join(map(str, steps))})."]
    cells = {row[0]: row[1] for row in summary([run]).rows}
    assert cells["skipped steps"] == len(steps) and cells["roll-backs"] == 0


def test_a_roll_back_is_marked_where_the_run_continued() -> None:
    back = {"event": "rolled_back", "from_step": 9, "to_step": 6, "reason": "bad"}
    assert marks_of(RunRecord(Path(), "run", events=[back])) == [Mark(6.0, "rolled back")]


def test_a_run_killed_at_its_start_has_a_page(tmp_path) -> None:
    """A kill in the first seconds leaves torn lines, no configuration and no status."""
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 5.0, "grad_norm": null}\n{"step": 2, "lo')
    (tmp_path / "events.jsonl").write_text('{"time": "2026-01-01T00:00:00+00:00", "event": "started"}\n{"ti')
    run = read_run(tmp_path)
    assert len(run.lines) == len(run.events) == 1
    page = make_page([run])
    assert "Loss, and what happened" in page and "Nothing in these files stands out" in page


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not the directory of a run"):
        read_run(tmp_path)
    (tmp_path / "status.json").write_text(json.dumps([1]))
    (tmp_path / "metrics.jsonl").write_text("")
    assert read_run(tmp_path).status == {}


def test_runs_of_one_name_are_told_apart(tmp_path) -> None:
    paths = [tmp_path / folder / "debug" for folder in ("a", "b")] + [tmp_path / "other"]
    for path in paths:
        path.mkdir(parents=True)
        (path / "events.jsonl").touch()
    assert [run.name for run in read_runs(paths)] == ["a/debug", "b/debug", "other"]
