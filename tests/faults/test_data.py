"""Data with unnoticed damage, or changed since the last checkpoint."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from forge.checkpoint import read_state
from forge.checkpoint.folders import step_name
from scripts import inspect_data
from tests.support.runs import BASE, Run, refused, sources
from tests.support.trained import prepare_bytes

BYTES = ["--data.tokenizer=bytes", "--model.vocab_size=258"]
# The number of windows in ten steps.
WINDOWS, SEQ_LEN = 80, 32
HERE = "tests.faults.test_data"
NUMBERED = ["--data.tokenizer=none", "--model.vocab_size=256", "--data.mixture_block=8"]


def raw(path: Path) -> str:
    return f'--data.sources=[{{path="{path}",weight=1.0,dtype="uint16"}}]'


NONE = "--data.tokenizer=none"


@pytest.mark.parametrize("window", [3, pytest.param(4, marks=pytest.mark.slow), 50])
def test_d1_an_id_beyond_the_vocabulary_is_found_at_the_batch_with_file_and_byte(
    tmp_path, window: int
) -> None:
    """Only one rank reads the bad id, in an unchecked raw file. All ranks exit, and soon."""
    ids = np.arange(WINDOWS * SEQ_LEN + 1, dtype="<u2") % 64
    ids[window * SEQ_LEN + 5] = 999
    ids.tofile(tmp_path / "ids.bin")
    run = Run(tmp_path, raw(tmp_path / "ids.bin"), NONE)
    codes = run.start(world=2).join()
    assert all(codes) and 2 in codes
    expected = f"ids.bin: token id 999 at byte {2 * (window * SEQ_LEN + 5)}"
    assert expected in run.status()["reason"] and expected in run.output()
    assert run.status()["state"] == "failed"


def test_d1_raw_ids_of_less_than_one_sequence_are_refused_before_training(tmp_path) -> None:
    np.zeros(SEQ_LEN, "<u2").tofile(tmp_path / "ids.bin")
    output = refused(Run(tmp_path), raw(tmp_path / "ids.bin"), NONE, world=2)
    assert "32 tokens" in output and "33" in output


@pytest.fixture
def changed(tmp_path) -> tuple[Run, Path]:
    """Return a run of four steps, and its data folder, whose content has changed since."""
    data, text = tmp_path / "data", tmp_path / "text.txt"
    text.write_text("It was a bright cold day in April. " * 400)
    prepare_bytes(text, data)
    run = Run(tmp_path, sources(data), *BYTES)
    assert run("--train.steps=4", world=2) == 0
    shutil.rmtree(data)
    text.write_text("Something else altogether. " * 500)
    prepare_bytes(text, data)
    return run, data


def test_d2_changed_data_are_refused_on_resume_and_nothing_is_lost(changed) -> None:
    run, _ = changed
    before = run.metrics(times=True), run.checkpoints()
    output = refused(run, world=2)
    assert "data.sources[0].path" in output and "checkpoint.allow_changed_data = true" in output
    assert (run.metrics(times=True), run.checkpoints()) == before


def test_d2_changed_data_are_accepted_on_request_and_then_belong_to_the_run(changed) -> None:
    run, _ = changed
    assert run("--train.steps=6", "--checkpoint.allow_changed_data=true", world=2) == 0
    [event] = run.events("changed_data")
    assert "data.sources[0].path differs from" in event["change"]
    states = [read_state(run.path / "checkpoints" / step_name(step)) for step in (4, 6)]
    assert states[0]["inputs"] != states[1]["inputs"]
    assert states[1]["progress"]["next_sample"] == 6 * 8
    assert run("--train.steps=8", world=2) == 0


def flip_a_bit(content: bytes) -> bytes:
    return content[:100] + bytes([content[100] ^ 1]) + content[101:]


def reverse_tokens(content: bytes) -> bytes:
    return np.frombuffer(content, "<u2")[::-1].tobytes()


@pytest.mark.parametrize("change", [flip_a_bit, pytest.param(reverse_tokens, marks=pytest.mark.slow)])
@pytest.mark.planted("data")
def test_d2_data_changed_in_place_stop_the_run_with_file_and_block(tmp_path, change) -> None:
    """Names, sizes, dataset.json and every token id stay valid. Only block checksums differ."""
    data, text = tmp_path / "data", tmp_path / "text.txt"
    text.write_text("It was a bright cold day in April. " * 400)
    prepare_bytes(text, data)
    run = Run(tmp_path, sources(data), *BYTES)
    assert run("--train.steps=4") == 0
    before = run.checkpoints()
    [tokens] = data.glob("tokens-*.bin")
    tokens.write_bytes(change(tokens.read_bytes()))
    codes = run.start("--checkpoint.allow_changed_data=true", world=2).join()
    assert all(codes) and 2 in codes
    assert f"{tokens}: block 0 (bytes 0 to" in run.output() and "Traceback" not in run.output()
    assert "does not match its recorded checksum" in run.status()["reason"]
    assert run.checkpoints() == before


def test_d2_another_tokenizer_is_always_refused(changed) -> None:
    run, _ = changed
    options = ["--data.sources=[{path='synthetic'}]", "--data.tokenizer=none"]
    output = refused(run, *options, "--checkpoint.allow_changed_data=true", world=2)
    [sentence] = [line for line in output.splitlines() if line.startswith("forge: ")]
    assert "data.tokenizer differs from" in sentence and "allow_changed_data" not in sentence


def test_d4_an_epoch_may_end_within_a_step_and_be_smaller_than_a_batch(tmp_path) -> None:
    """Five windows, batches of eight: each epoch has each window once, in its own order, on any number of ranks."""
    ids = np.arange(5 * SEQ_LEN + 1, dtype="<u2") % 64
    ids.tofile(tmp_path / "ids.bin")
    options = [
        raw(tmp_path / "ids.bin"),
        NONE,
        *(f"--precision.{key}=float64" for key in ("storage", "compute", "reduce")),
    ]
    one, two = Run(tmp_path / "one", *options), Run(tmp_path / "two", *options)
    assert one() == 0 and two(world=2) == 0
    assert one.losses() == pytest.approx(two.losses(), rel=0, abs=1e-9)


def numbered(folder: Path, first: int, windows: int) -> str:
    """Return an entry of data.sources with `windows` windows. Window k repeats the id first + k."""
    ids = np.repeat(np.arange(first, first + windows, dtype="<u2"), SEQ_LEN)
    folder.mkdir(exist_ok=True)
    np.append(ids, ids[-1]).tofile(folder / f"from-{first}.bin")
    return f'{{path="{folder}/from-{first}.bin",weight=1.0,dtype="uint16"}}'


def write_down_what_is_read() -> None:
    """Let each rank write the windows of its batches, step by step, to the run directory."""
    from forge.train.trainer import Trainer

    compute = Trainer.compute_gradients

    def computing(self, batch):
        rank = self.reporter.world.rank
        with (Path(os.environ["RUN_UNDER_TEST"]) / f"read-{rank}.jsonl").open("a") as file:
            file.write(
                json.dumps([self.progress.step + 1, rank, batch.first_sample, batch.tokens[:, 0].tolist()])
                + "\n"
            )
        return compute(self, batch)

    Trainer.compute_gradients = computing


def write_down_and_spoil_32_to_55() -> None:
    from tests.support.spoil import samples_32_to_55

    samples_32_to_55()
    write_down_what_is_read()


def read_by(run: Run) -> list[list[int]]:
    """Return the windows of each step. Repeated steps: of the last repetition."""
    lines = [json.loads(line) for path in run.path.glob("read-*.jsonl") for line in path.open()]
    latest: dict[int, dict[int, list[int]]] = {}
    for step, rank, _, windows in lines:
        latest.setdefault(step, {})[rank] = windows
    return [[w for _, part in sorted(latest[step].items()) for w in part] for step in sorted(latest)]


@pytest.mark.parametrize("worlds", [pytest.param((2, 1, 2), marks=pytest.mark.slow), (1, 2, 1)])
def test_d2_an_added_source_neither_repeats_nor_skips_old_samples(tmp_path, capsys, worlds) -> None:
    """Three steps with one source, four with a second source, two after a resume, on any number of ranks."""
    run = Run(tmp_path, *NUMBERED, "--checkpoint.allow_changed_data=true")
    old, new = numbered(tmp_path / "data", 0, 40), numbered(tmp_path / "data", 100, 24)
    both = f"--data.sources=[{new},{old}]"
    starts = [(f"--data.sources=[{old}]", 3), (both, 7), (both, 9)]
    for (data, steps), world in zip(starts, worlds, strict=True):
        patch = f"{HERE}:write_down_what_is_read"
        assert set(run.start(data, f"--train.steps={steps}", world=world, patch=patch).join()) == {0}
    read = read_by(run)
    assert [len(step) for step in read] == [8] * 9
    windows = [window for step in read for window in step]
    expected = run.metrics()[-1]["epochs"]
    of_old = sum(window < 100 for window in windows)
    assert expected == {
        f"{tmp_path}/data/from-0.bin": of_old / 40,
        f"{tmp_path}/data/from-100.bin": (72 - of_old) / 24,
    }
    assert max(windows[:24]) < 100 and sum(window >= 100 for window in windows[24:]) == 24
    for first, count in ((0, 40), (100, 24)):
        of_source = [window for window in windows if first <= window < first + count]
        assert len(set(of_source[:count])) == len(of_source[:count])
    assert [inspected(capsys, tmp_path, step, both) for step in range(1, 10)] == read


def inspected(capsys, folder: Path, step: int, *options: str) -> list[int]:
    """Return a step's windows from inspect_data.py."""
    run = [*BASE, f"--run.output_dir={folder}", *NUMBERED]
    config, run = run[0].split("="), run[1:]
    assert inspect_data.main([*config, *run, *options, f"--step={step}", "--json"]) == 0
    return [json.loads(line)["tokens"][0] for line in capsys.readouterr().out.splitlines()]


@pytest.mark.planted("changed_data", "bad_steps")
def test_d2_a_roll_back_over_the_change_skips_samples_of_both_mixtures(tmp_path, capsys) -> None:
    """The run returns to a checkpoint of the earlier mixture."""
    run = Run(tmp_path, *NUMBERED, "--resilience.max_skipped_steps=3")
    old, new = numbered(tmp_path / "data", 0, 80), numbered(tmp_path / "data", 100, 60)
    alone, both = f"--data.sources=[{old}]", f"--data.sources=[{old},{new}]"
    assert run.start(alone, "--train.steps=4", patch=f"{HERE}:write_down_what_is_read").join() == [0]
    options = [both, "--checkpoint.allow_changed_data=true", "--checkpoint.interval=100"]
    assert run.start(*options, patch=f"{HERE}:write_down_and_spoil_32_to_55").join() == [0]
    [event] = run.events("rolled_back")
    assert (event["to_step"], event["first_sample"], event["end_sample"]) == (4, 32, 56)
    every = [json.loads(line) for line in (run.path / "read-0.jsonl").open()]
    spoiled = {window for _, _, first, windows in every if 32 <= first < 56 for window in windows}
    kept = [window for step in read_by(run) for window in step]
    assert len(spoiled) == 24 and min(spoiled) < 80 < max(spoiled)
    assert len(set(kept)) == 80 and not spoiled & set(kept)
    assert [inspected(capsys, tmp_path, step, both) for step in range(1, 11)] == read_by(run)


def test_d2_weights_with_larger_blocks_are_a_change_like_any_other(tmp_path) -> None:
    run = Run(tmp_path, NONE)
    entries = '{{path="synthetic",weight=1.0}},{{path="synthetic",weight={}}}'
    assert run("--train.steps=2", f"--data.sources=[{entries.format(1.0)}]") == 0
    rare = [f"--data.sources=[{entries.format(0.0001)}]", "--train.steps=4"]
    output = refused(run, *rare)
    assert "allow_changed_data" in output
    assert run(*rare, "--checkpoint.allow_changed_data=true") == 0


@pytest.mark.planted("changed_settings")
def test_d2_another_seed_is_always_refused(tmp_path) -> None:
    """Another seed would reorder the rest of each epoch, and so repeat and skip samples."""
    run = Run(tmp_path)
    assert run("--train.steps=2") == 0
    output = refused(run, "--run.seed=5", "--checkpoint.allow_changed_data=true")
    assert "run.seed" in output
