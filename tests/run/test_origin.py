"""Decide whether a command names the origin of a run directory's history."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from forge.checkpoint.manifest import MANIFEST, compose
from forge.config import Config, load_config, to_toml
from forge.observe.run_directory import RunDirectory
from forge.run.origin import new_history_because, origin_of
from forge.runtime.errors import UserError


def config(resume: object, *options: str) -> Config:
    return load_config(["--config=debug.toml", f"--checkpoint.resume={resume}", *options])


def begun_with(folder: Path, before: Config) -> RunDirectory:
    """Return a run directory whose history began with this configuration."""
    directory = RunDirectory(folder / "run")
    directory.root.mkdir()
    directory.origin.write_text(json.dumps(asdict(origin_of(before))))
    directory.config.write_text(to_toml(before))
    return directory


def checkpoint(path: Path, step: int) -> Path:
    path.mkdir()
    (path / MANIFEST).write_text(compose(step, 1, {}, {}))
    return path


def test_a_checkpoint_is_recognised_after_a_move_by_its_path_and_after_its_removal(tmp_path) -> None:
    first = checkpoint(tmp_path / "first", 100)
    directory = begun_with(tmp_path, config(first))
    moved = first.rename(tmp_path / "moved")
    assert new_history_because(config(moved), directory, finished=False) is None
    assert new_history_because(config(first), directory, finished=True) is None
    other = checkpoint(tmp_path / "other", 200)
    assert "another origin" in str(new_history_because(config(other), directory, finished=False))


def test_a_redirected_link_is_still_the_same_command(tmp_path) -> None:
    latest = tmp_path / "latest"
    latest.symlink_to(checkpoint(tmp_path / "a", 100))
    directory = begun_with(tmp_path, config(latest))
    latest.unlink()
    latest.symlink_to(checkpoint(tmp_path / "b", 200))
    assert new_history_because(config(latest), directory, finished=False) is None


@pytest.mark.parametrize(
    ("option", "why"),
    [
        ("--resilience.time_limit_s=60", None),
        ("--parallel.tp=2", None),
        ("--checkpoint.interval=7", None),
        ("--optimizer.lr=0.5", "[optimizer]"),
        ("--train.steps=7", "[train]"),
        ("--run.seed=7", "run.seed"),
        ("--checkpoint.init=elsewhere", "checkpoint.init"),
    ],
)
def test_resume_none_compares_the_keys_that_affect_results(tmp_path, option: str, why: str | None) -> None:
    directory = begun_with(tmp_path, config("none"))
    because = new_history_because(config("none", option), directory, finished=False)
    assert because is None if why is None else str(because).endswith(f"other settings in {why}")
    assert (
        new_history_because(config("none", option), directory, finished=True)
        == "the previous history is finished"
    )


def test_resume_none_accepts_a_history_begun_by_auto_and_reports_an_unreadable_record(tmp_path) -> None:
    directory = begun_with(tmp_path, config("auto"))
    assert "checkpoint.resume = auto" in str(new_history_because(config("none"), directory, finished=False))
    directory.origin.write_text("{")
    with pytest.raises(UserError, match="remove this file"):
        new_history_because(config("none"), directory, finished=False)
