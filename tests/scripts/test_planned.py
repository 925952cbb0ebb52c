"""Plans of existing runs: untrusted runs, and runs of an older version."""

from __future__ import annotations

from pathlib import Path

import pytest

from forge.tools.report.read import read_run
from scripts.planned import Planner
from tests.support.recorded import write_run


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("[model]\n", '[model]\nkind = "stranger_plan:Own"\n'),
        ("[optimizer]\n", '[optimizer]\nname = "stranger_plan:Own"\n'),
        ("[optimizer]\n", '[parallel]\ntp_plan = "stranger_plan:own"\n[optimizer]\n'),
        (
            "[optimizer]\n",
            "[parallel]\ndp_shard = 64\n"
            'fallbacks = ["parallel.dp_shard=-1 parallel.tp_plan=stranger_plan:own"]\n[optimizer]\n',
        ),
    ],
)
def test_a_run_with_import_paths_is_planned_only_with_trust(tmp_path, monkeypatch, old, new) -> None:
    mark = tmp_path / "imported"
    (tmp_path / "stranger_plan.py").write_text(f"from pathlib import Path\nPath({str(mark)!r}).touch()\n")
    monkeypatch.syspath_prepend(tmp_path)
    folder: Path = write_run(tmp_path / "run")
    config = folder / "config.toml"
    assert config.read_text().count(old) == 1
    config.write_text(config.read_text().replace(old, new))
    run = read_run(folder)
    Planner(None).add(run)
    assert run.plan is not None and "--trust" in run.plan["problem"] and not mark.exists()
    Planner(None, trust=True).add(run)
    assert "--trust" not in str(run.plan)


def test_a_run_of_an_older_version_is_planned(tmp_path) -> None:
    """Today a folder must not begin with ~."""
    folder: Path = write_run(tmp_path / "run")
    config = folder / "config.toml"
    config.write_text('[run]\noutput_dir = "~/runs"\n' + config.read_text())
    run = read_run(folder)
    Planner(None).add(run)
    assert run.plan is not None and "problem" not in run.plan, run.plan


def test_a_config_that_is_not_text_is_the_problem_of_the_plan(tmp_path) -> None:
    folder: Path = write_run(tmp_path / "run")
    run = read_run(folder)
    (folder / "config.toml").write_bytes(b"\xff")
    Planner(None).add(run)
    assert run.plan is not None and run.plan["problem"].startswith(f"{folder}/config.toml: cannot be read: ")


def test_a_start_that_was_refused_is_not_planned(tmp_path) -> None:
    """Three processes do not divide the batch."""
    run = read_run(write_run(tmp_path / "run"))
    run.events += [{"event": "started", "world_size": 3}, {"event": "failed", "step": 60}]
    Planner(None).add(run)
    assert run.plan is not None and "problem" not in run.plan, run.plan


def test_a_run_is_planned_with_the_fallback_for_its_processes(tmp_path) -> None:
    folder: Path = write_run(tmp_path / "run")
    config = folder / "config.toml"
    config.write_text(
        '[parallel]\ndp_shard = 64\nfallbacks = ["parallel.dp_shard=-1"]\n' + config.read_text()
    )
    run = read_run(folder)
    Planner(None).add(run)
    assert run.plan is not None and "problem" not in run.plan, run.plan
