"""Decide whether a command names the origin of a run directory's history."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from forge.checkpoint.manifest import MANIFEST, compose
from forge.config import Config, load_config, to_toml
from forge.data.order import Order
from forge.observe.run_directory import RunDirectory
from forge.run import rollback
from forge.run.origin import Earlier, new_history_because, origin_of, read_earlier
from forge.run.resume import Start
from forge.runtime.errors import UserError
from forge.train.state import Progress, Rollback


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
    assert new_history_because(config(moved), directory, Earlier()) is None
    assert new_history_because(config(first), directory, Earlier(finished=True)) is None
    other = checkpoint(tmp_path / "other", 200)
    assert "another origin" in str(new_history_because(config(other), directory, Earlier()))


def test_a_redirected_link_is_still_the_same_command(tmp_path) -> None:
    latest = tmp_path / "latest"
    latest.symlink_to(checkpoint(tmp_path / "a", 100))
    directory = begun_with(tmp_path, config(latest))
    latest.unlink()
    latest.symlink_to(checkpoint(tmp_path / "b", 200))
    assert new_history_because(config(latest), directory, Earlier()) is None


@pytest.mark.parametrize(
    ("option", "why"),
    [
        ("--resilience.time_limit_s=60", None),
        ("--parallel.tp=2", None),
        ("--checkpoint.interval=7", None),
        ("--train.micro_batch_size=2", None),
        ("--data.cache_dir=/scratch/7", None),
        ("--data.validation=[]", None),
        ("--data.mixture_block=7", "data.mixture_block"),
        ("--optimizer.lr=0.5", "optimizer.lr"),
        ("--train.steps=7", "train.steps"),
        ("--run.seed=7", "run.seed"),
        ("--phase=[{until_tokens=1000,lr=0.1}]", "phase"),
        ("--checkpoint.init=elsewhere", "checkpoint.init"),
    ],
)
def test_resume_none_compares_the_keys_that_affect_results(tmp_path, option: str, why: str | None) -> None:
    directory = begun_with(tmp_path, config("none"))
    because = new_history_because(config("none", option), directory, Earlier())
    assert because is None if why is None else str(because).endswith(f"other settings in {why}")
    assert new_history_because(config("none", option), directory, Earlier(restarted=True)) is None
    assert (
        new_history_because(config("none", option), directory, Earlier(finished=True))
        == "the previous history is finished"
    )


def test_resume_none_continues_after_an_upgrade_that_adds_a_key(tmp_path) -> None:
    directory = begun_with(tmp_path, config("none"))
    lines = directory.config.read_text().splitlines()
    kept = [line for line in lines if not line.startswith("gc_interval")]
    assert len(kept) == len(lines) - 1
    directory.config.write_text("\n".join(kept))
    assert new_history_because(config("none"), directory, Earlier()) is None


def test_resume_none_does_not_begin_again_if_the_record_of_the_settings_cannot_be_read(tmp_path) -> None:
    directory = begun_with(tmp_path, config("none"))
    directory.config.unlink()
    directory.config.mkdir()
    with pytest.raises(UserError, match=r"config.toml cannot be read"):
        new_history_because(config("none"), directory, Earlier())


STARTED, FRESH, FAILED = {"event": "started"}, {"event": "fresh", "step": 0}, {"event": "failed", "step": 0}


ASIDE = {"event": "set_aside", "checkpoints": [".aside-step-00000010"]}
DONE, RESUMED = {"event": "finished"}, {"event": "resumed", "new": False}


def saved(step: int) -> dict[str, object]:
    return {"event": "saved", "step": step}


@pytest.mark.parametrize(
    ("events", "status", "found"),
    [
        ([FRESH, saved(5), saved(10)], {}, 10),
        ([FRESH], {}, 0),
        # The event file is lost, and no or one refused start has begun another.
        ([], {}, 7),
        ([STARTED, FAILED], {}, 7),
        ([STARTED, FAILED, STARTED, FAILED], {"state": "stopped", "step": 6}, 6),
        # A stop during the set-up of a start without a save keeps the step of the start before.
        ([STARTED, FRESH, STARTED], {"state": "stopped", "step": 7}, 0),
        # A roll-back sets later checkpoints aside; one to the origin's checkpoint sets all aside.
        ([FRESH, saved(5), saved(10), {"event": "rolled_back", "to_step": 5}], {}, 5),
        ([{"event": "resumed", "new": True}, saved(105), {"event": "rolled_back", "to_step": 100}], {}, 0),
        ([FRESH, saved(5), {"event": "resumed", "new": False}, STARTED], {}, 5),
        # A start that set the old history aside, and was stopped before it began the new one.
        ([FRESH, saved(5), {"event": "set_aside", "checkpoints": [".aside-step-00000005"]}], {}, 0),
        # The same after earlier checkpoints were pruned, and in a roll-back.
        ([FRESH, saved(5), saved(10), ASIDE | {"kept": -1}], {}, 0),
        ([FRESH, saved(5), saved(10), ASIDE | {"kept": 5}], {}, 5),
    ],
)
def test_the_last_saved_step_is_that_of_the_current_history(tmp_path, events, status, found: int) -> None:
    directory = RunDirectory(tmp_path)
    directory.events.write_text("".join(json.dumps(event) + "\n" for event in events))
    directory.metrics.write_text('{"step": 6}\n{"step": 7}\n')
    assert read_earlier(directory, status).saved == found


@pytest.mark.parametrize(
    ("events", "state", "restarted", "finished"),
    [
        ([STARTED, FRESH, DONE], "finished", False, True),
        # A start after the last step was killed in its set-up, perhaps with a restart by the launcher.
        ([STARTED, FRESH, DONE, STARTED], "running", False, True),
        ([STARTED, FRESH, DONE, STARTED], "running", True, True),
        ([STARTED, FRESH, DONE, STARTED, RESUMED], "running", False, False),
        ([STARTED, FRESH], "failed", False, False),
        # Another rank failed after the last step, and the launcher restarted all.
        ([STARTED, FRESH, DONE], "finished", True, False),
        ([STARTED, FRESH, DONE, STARTED | {"restarted": True}], "running", True, False),
        ([], "finished", False, True),
    ],
)
def test_a_finished_run_stays_finished_until_a_step_of_a_later_start(
    tmp_path, events, state: str, restarted: bool, finished: bool
) -> None:
    directory = RunDirectory(tmp_path)
    directory.events.write_text("".join(json.dumps(event) + "\n" for event in events))
    assert read_earlier(directory, {"state": state}, restarted).finished == finished


def test_a_restart_before_the_first_start_of_a_launch_is_a_new_command(tmp_path) -> None:
    """E.g. a second node joins a new job while the first node's ranks still import PyTorch."""
    directory = RunDirectory(tmp_path)
    events = [STARTED | {"launch": ["first", "job"]}, FRESH, DONE]
    directory.events.write_text("".join(json.dumps(event) + "\n" for event in events))
    status = {"state": "finished"}
    assert read_earlier(directory, status, True, ["second"]).finished
    assert not read_earlier(directory, status, True, ["second"]).restarted
    again = read_earlier(directory, status, True, ["other", "first"])
    assert again.restarted and not again.finished


OLD, NEW = ({"launch": ["old"]}, {"launch": ["new"]})
AGAIN = {"restarted": True}


@pytest.mark.parametrize(
    ("events", "launch", "restarted"),
    [
        # A requeue after a stop in set-up: the first start of the job may have had other settings.
        ([STARTED | OLD, FRESH, STARTED | NEW], ["new"], False),
        ([STARTED | OLD, FRESH, STARTED | NEW, STARTED | NEW], ["new"], False),
        ([STARTED | OLD, FRESH, STARTED | NEW, FRESH], ["new"], True),
        # A restart was stopped in its set-up, after the first start of the job had begun.
        ([STARTED | NEW, RESUMED, STARTED | NEW | AGAIN], ["new"], True),
        # torchrun's launches have no identity.
        ([STARTED, FRESH, STARTED], [], False),
        ([STARTED, FRESH, STARTED, FRESH], [], True),
        ([STARTED, FRESH, STARTED | AGAIN, STARTED | AGAIN], [], True),
        ([STARTED, FRESH], [], True),
    ],
)
def test_a_launch_counts_as_restarted_once_a_start_of_it_has_begun(
    tmp_path, events, launch: list[str], restarted: bool
) -> None:
    directory = RunDirectory(tmp_path)
    directory.events.write_text("".join(json.dumps(event) + "\n" for event in events))
    assert read_earlier(directory, {"state": "stopped"}, True, launch).restarted == restarted


def test_rollbacks_of_an_abandoned_branch_do_not_count(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(rollback, "on_first_rank", lambda _purpose, work: work())
    directory = RunDirectory(tmp_path)
    kept, dropped = (
        Rollback(first_sample=8 * at, end_sample=8 * at + 8, from_step=at + 1, to_step=at) for at in (30, 60)
    )
    directory.rollbacks.write_text(json.dumps([asdict(kept), asdict(dropped)]))
    for start, expected in (
        (Start(None, kept=40), [kept, dropped]),
        (Start(None, kept=40, replaces=True), [kept]),
        (Start(None, kept=-1), []),
    ):
        progress = Progress(Order.beginning(0, ["text"], [1.0], 64))
        assert rollback.merged_rollbacks(directory, start, progress) == expected


def test_resume_none_accepts_a_history_begun_by_auto_and_reports_an_unreadable_record(tmp_path) -> None:
    directory = begun_with(tmp_path, config("auto"))
    assert "checkpoint.resume = auto" in str(new_history_because(config("none"), directory, Earlier()))
    for record in ("{", '{"resume": "none", "init": "", "step": null}'):
        directory.origin.write_text(record)
        with pytest.raises(UserError, match="remove this file"):
            new_history_because(config("none"), directory, Earlier())
