"""Data that are damaged where nobody looked, or are not what they were at the last checkpoint."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from forge.checkpoint import read_state
from forge.checkpoint.folders import step_name
from tests.support.runs import Run, refused, sources
from tests.support.trained import prepare_bytes

BYTES = ["--data.tokenizer=bytes", "--model.vocab_size=258"]
# As many windows as ten steps read.
WINDOWS, SEQ_LEN = 80, 32


def raw(path: Path) -> str:
    return f'--data.sources=[{{path="{path}",weight=1.0,dtype="uint16"}}]'


NONE = "--data.tokenizer=none"


@pytest.mark.parametrize("window", [3, 4, 50])
def test_d1_an_id_beyond_the_vocabulary_is_found_at_the_batch_with_file_and_byte(
    tmp_path, window: int
) -> None:
    """By the one rank that reads it, in raw ids that nobody has counted; all ranks end, and soon."""
    ids = np.arange(WINDOWS * SEQ_LEN + 1, dtype="<u2") % 64
    ids[window * SEQ_LEN + 5] = 999
    ids.tofile(tmp_path / "ids.bin")
    run = Run(tmp_path, raw(tmp_path / "ids.bin"), NONE)
    codes = run.start(world=2).join()
    assert all(codes) and 2 in codes
    told = f"ids.bin: token id 999 at byte {2 * (window * SEQ_LEN + 5)}"
    assert told in run.status()["reason"] and told in run.said()
    assert run.status()["state"] == "failed"


def test_d1_raw_ids_of_less_than_one_sequence_are_refused_before_training(tmp_path) -> None:
    np.zeros(SEQ_LEN, "<u2").tofile(tmp_path / "ids.bin")
    said = refused(Run(tmp_path), raw(tmp_path / "ids.bin"), NONE, world=2)
    assert "32 tokens" in said and "33" in said


@pytest.fixture
def changed(tmp_path) -> tuple[Run, Path]:
    """A run of four steps whose data, in the folder, have since become others."""
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
    said = refused(run, world=2)
    assert "data.sources[0].path" in said and "checkpoint.allow_changed_data = true" in said
    assert (run.metrics(times=True), run.checkpoints()) == before


def test_d2_changed_data_are_taken_when_told_so_and_are_the_run_s_own_from_then_on(changed) -> None:
    run, _ = changed
    assert run("--train.steps=6", "--checkpoint.allow_changed_data=true", world=2) == 0
    [event] = run.events("changed_data")
    assert "data.sources[0].path is not what" in event["change"]
    states = [read_state(run.path / "checkpoints" / step_name(step)) for step in (4, 6)]
    assert states[0]["inputs"] != states[1]["inputs"]
    assert states[1]["progress"]["next_sample"] == 6 * 8
    assert run("--train.steps=8", world=2) == 0


def test_d2_another_tokenizer_is_refused_even_so(changed) -> None:
    run, _ = changed
    options = ["--data.sources=[{path='synthetic'}]", "--data.tokenizer=none"]
    said = refused(run, *options, "--checkpoint.allow_changed_data=true", world=2)
    [sentence] = [line for line in said.splitlines() if line.startswith("forge: ")]
    assert "data.tokenizer is not what" in sentence and "allow_changed_data" not in sentence


def test_d4_an_epoch_s_end_in_mid_step_and_fewer_samples_than_a_batch_are_no_event(tmp_path) -> None:
    """Five windows, eight in a batch: every epoch has each once, in an order of its own, on any number of ranks."""
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
