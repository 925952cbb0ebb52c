"""A run that was stopped, killed or moved to other ranks tells the same history as one that was left alone."""

import json
import os
import signal
import time

import pytest

from forge.checkpoint.folders import step_name
from tests.end_to_end.runs import Run

FLOAT64 = ["--precision.storage=float64", "--precision.compute=float64", "--precision.reduce=float64"]


@pytest.mark.parametrize("world", [1, 2])
def test_n_steps_and_n_more_equal_2n_steps_bit_for_bit(tmp_path, world: int) -> None:
    whole, halves = Run(tmp_path / "whole"), Run(tmp_path / "halves")
    assert whole(world=world) == 0
    assert halves("--train.steps=5", world=world) == 0
    assert halves(world=world) == 0
    assert halves.metrics() == whole.metrics()
    assert digests(halves) == digests(whole)


def test_a_killed_run_resumes_bit_for_bit(tmp_path) -> None:
    whole, killed = Run(tmp_path / "whole"), Run(tmp_path / "killed")
    assert whole(world=2) == 0
    codes = killed.start(world=2, fault="step:7:1").join()
    assert codes[1] == -signal.SIGKILL and codes[0] != 0
    assert killed(world=2) == 0
    assert killed.metrics() == whole.metrics()
    assert digests(killed) == digests(whole)


@pytest.mark.parametrize("point", ["save.between_shards", "save.before_rename", "save.during_prune"])
def test_a_kill_inside_a_save_loses_nothing(tmp_path, point: str) -> None:
    whole, killed = Run(tmp_path / "whole"), Run(tmp_path / "killed", "--checkpoint.keep_last=2")
    assert whole() == 0
    assert killed(fault=f"{point}:8:0") == -signal.SIGKILL
    assert killed() == 0
    assert killed.metrics() == whole.metrics()
    assert digests(killed) == digests(whole)


def test_another_number_of_ranks_reads_the_same_data_on_the_same_curve(tmp_path) -> None:
    whole, moved = Run(tmp_path / "whole", *FLOAT64), Run(tmp_path / "moved", *FLOAT64)
    assert whole() == 0
    assert moved("--train.steps=3", world=2) == 0
    assert moved("--train.steps=6", world=4) == 0
    assert moved() == 0
    for a, b in zip(whole.metrics(), moved.metrics(), strict=True):
        assert a["tokens"] == b["tokens"]
        assert a["loss"] == pytest.approx(b["loss"], rel=0, abs=1e-9)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=0, abs=1e-9)


def test_a_finished_run_started_again_does_nothing(tmp_path) -> None:
    run = Run(tmp_path)
    assert run() == 0
    before = run.metrics(times=True), run.checkpoints()
    assert run() == 0
    assert (run.metrics(times=True), run.checkpoints()) == before
    assert run.status()["state"] == "finished"
    assert "finished" in run.log()


def test_learning_rate_and_logging_may_change_on_resume_and_take_effect(tmp_path) -> None:
    run = Run(tmp_path)
    assert run("--train.steps=5") == 0
    assert run("--optimizer.lr=0.0001", "--metrics.log_interval=5") == 0
    lines = run.metrics()
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 10]
    assert lines[-1]["lr"] == 0.0001 and lines[0]["lr"] != 0.0001
    assert "optimizer.lr" in run.log()


@pytest.mark.parametrize(
    ("option", "key"),
    [
        ("--model.ffn_dim=96", "model.ffn_dim"),
        ("--run.seed=5", "run.seed"),
        ("--train.seq_len=16", "train.seq_len"),
        ("--model.rope_theta=1000.0", "model.rope_theta"),
    ],
)
def test_another_model_or_data_order_is_refused_and_nothing_is_lost(tmp_path, option: str, key: str) -> None:
    run = Run(tmp_path)
    assert run("--train.steps=4") == 0
    before = run.metrics(times=True), run.checkpoints()
    assert run(option) == 2
    assert (run.metrics(times=True), run.checkpoints()) == before
    assert key in run.said() and "Traceback" not in run.said()


def test_a_flipped_bit_sends_the_run_to_the_checkpoint_before(tmp_path) -> None:
    whole, damaged = Run(tmp_path / "whole"), Run(tmp_path / "damaged")
    assert whole() == 0
    assert damaged("--train.steps=6") == 0
    flip_a_bit(damaged, 6)
    assert damaged() == 0
    assert ".damaged-step-00000006" in damaged.checkpoints()
    assert [event for event in damaged.events() if event["event"] == "fallback"]
    assert damaged.metrics() == whole.metrics()


def test_only_damaged_checkpoints_is_exit_77_with_one_sentence(tmp_path) -> None:
    run = Run(tmp_path)
    assert run("--train.steps=4") == 0
    for step in (2, 4):
        flip_a_bit(run, step)
    assert run() == 77
    assert run.status()["exit_code"] == 77
    assert "Traceback" not in run.said()


def test_resume_none_begins_anew_and_keeps_the_old_checkpoints_aside(tmp_path) -> None:
    run = Run(tmp_path)
    assert run("--train.steps=4") == 0
    first = run.metrics()
    assert run("--train.steps=4", "--checkpoint.resume=none") == 0
    assert run.metrics() == first
    assert ".aside-step-00000004" in run.checkpoints()


def test_resume_from_a_named_checkpoint_continues_there(tmp_path) -> None:
    whole, run = Run(tmp_path / "whole"), Run(tmp_path / "run")
    assert whole() == 0
    assert run("--train.steps=6") == 0
    assert run(f"--checkpoint.resume={run.path / 'checkpoints' / step_name(2)}") == 0
    assert run.metrics() == whole.metrics()


def test_init_takes_the_weights_and_starts_a_new_history(tmp_path) -> None:
    first, second = Run(tmp_path / "first"), Run(tmp_path / "second")
    assert first("--train.steps=10", "--optimizer.lr=0.003") == 0
    source = first.path / "checkpoints" / step_name(10)
    assert second("--train.steps=2", f"--checkpoint.init={source}", "--run.seed=3") == 0
    lines = second.metrics()
    assert [line["step"] for line in lines] == [1, 2]
    assert lines[0]["loss"] < first.losses()[0] - 0.1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_to_one_rank_stops_all_at_one_step_after_a_save(tmp_path, number: int) -> None:
    run = Run(tmp_path, "--train.steps=100000", "--checkpoint.interval=0")
    ranks = run.start(world=2)
    wait_for(lambda: (run.path / "metrics.jsonl").exists() and len(run.metrics()) > 3)
    os.kill(ranks.pids[1], number)
    assert ranks.join() == [75, 75]
    status = run.status()
    assert status["state"] == "stopped" and status["exit_code"] == 75
    assert run.checkpoints() == [step_name(status["step"])]
    assert run.metrics()[-1]["step"] == status["step"]


def test_a_second_run_on_the_same_directory_is_refused_and_names_the_first(tmp_path) -> None:
    run = Run(tmp_path, "--train.steps=100000")
    ranks = run.start()
    wait_for(lambda: (run.path / "metrics.jsonl").exists() and len(run.metrics()) > 3)
    assert run() == 2
    assert f"process {ranks.pids[0]} on" in run.said()
    os.kill(ranks.pids[0], signal.SIGTERM)
    assert ranks.join() == [75]
    assert run.status()["state"] == "stopped"


def flip_a_bit(run: Run, step: int) -> None:
    """In the middle of the largest file of a checkpoint."""
    folder = run.path / "checkpoints" / step_name(step)
    file = max(folder.rglob("*.distcp"), key=lambda path: path.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def digests(run: Run) -> dict[str, str]:
    """Checksums of the tensor files of the last checkpoint."""
    return tensor_files(run, 10)


def tensor_files(run: Run, step: int) -> dict[str, str]:
    """Name -> checksum of the files of a checkpoint that hold parameters and moments."""
    manifest = json.loads((run.path / "checkpoints" / step_name(step) / "manifest.json").read_text())
    return {name: entry["sha256"] for name, entry in manifest["files"].items() if name.endswith(".distcp")}


def wait_for(condition, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)
