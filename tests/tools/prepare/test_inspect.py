"""inspect_data shows the batches that the loader hands to training."""

import errno
import json
import os
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from forge.checkpoint.folders import step_name
from forge.checkpoint.manifest import MANIFEST, compose, entry
from forge.config import Phases, load_config
from forge.data.build import build_dataset
from forge.data.dataset import PackedDataset
from forge.data.loader import Loader, steps_from
from forge.data.order import SkippedRange
from forge.data.tokenizer import ByteTokenizer
from forge.runtime.errors import BAD_CONFIG, FAILED, NO_CHECKPOINT, UserError
from forge.tools.prepare.inspect import dataset_of_run, mixture_of_steps, samples_of_step
from tests.support.streams import Counting
from tests.support.trained import call, objects

PHASED = [
    *("--config=debug", "--model.vocab_size=64", "--train.seq_len=32", "--train.global_batch_size=8"),
    "--data.sources=[{path='synthetic',weight=1.0,name='a'},{path='synthetic',weight=0.0,name='b'}]",
    *("--data.validation=[]", "--train.micro_batch_size=1", "--train.steps=12"),
    "--phase=[{until_tokens=500,global_batch_size=8,seq_len=8,document_mask=true},"
    "{until_tokens=2000,ramp='linear',global_batch_size=16,weights=[1.0,3.0]}]",
]


def dataset(**options):
    return PackedDataset(
        [Counting(1000, length=10), Counting(500, length=10)], [0.75, 0.25], 16, 5, 64, **options
    )


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_shown_batches_match_every_ranks_loader(ranks):
    shown = list(samples_of_step(dataset(), None, 3, global_batch_size=8, ranks=ranks, head=16))
    assert [sample.sample for sample in shown] == list(range(16, 24))
    for rank in range(ranks):
        loader = Loader(dataset(), global_batch_size=8, rank=rank, ranks=ranks)
        batch = [next(loader) for _ in range(3)][-1]
        loader.close()
        mine = [sample for sample in shown if sample.rank == rank]
        assert batch.tokens.tolist() == [sample.tokens for sample in mine]
        alone = samples_of_step(dataset(), None, 3, global_batch_size=8, rank=rank, ranks=ranks)
        assert list(alone) == mine


def test_what_a_run_passes_over_is_not_shown():
    """Batches before, across and after the range."""
    order = dataset().order
    passing = dataset().following(order.passing_over([SkippedRange(10, 21, order.between(10, 21))]))
    loader = Loader(passing, global_batch_size=8, rank=0, ranks=1)
    for step in (1, 2, 3):
        shown = samples_of_step(passing, None, step, global_batch_size=8)
        assert next(loader).tokens.tolist() == [sample.tokens for sample in shown]
    loader.close()


def test_steps_of_phases_are_shown_and_counted_as_they_are_read(tmp_path):
    """Over both borders: other batches, lengths, masks and weights."""
    config = load_config([*PHASED, f"--run.output_dir={tmp_path}"])
    phases, found, whole = Phases(config), dataset_of_run(config, 12), build_dataset(config)
    sizes = {"global_batch_size": 8, "ranks": 2}
    loader = Loader(whole, rank=1, plan_at=phases.at, **sizes)
    read = steps_from(whole, phases.at, global_batch_size=8)
    counts = []
    for step in range(1, 13):
        batch, samples = next(loader), set(next(read).rows(0, 1).samples)
        shown = list(samples_of_step(found, None, step, phases=phases, rank=1, head=99, **sizes))
        assert batch.tokens.tolist() == [sample.tokens for sample in shown]
        if batch.documents is not None:
            assert [sample.masked for sample in shown] == (batch.labels == -100).sum(1).tolist()
        counts.append(Counter(found.labels[found.locate(sample)[0]] for sample in samples))
    loader.close()
    for first, last in ((1, 12), (6, 9)):
        readings = mixture_of_steps(found, first, last, 8, phases)
        wanted = sum(counts[first - 1 : last], Counter())
        assert {one.source: one.samples for one in readings} == {"a": wanted["a"], "b": wanted["b"]}
        assert sum(one.share for one in readings) == pytest.approx(1)
    assert sum(counts[8:], Counter())["b"] and not counts[5]["b"]


def test_document_starts_are_places_in_the_sequence():
    for sample in samples_of_step(dataset(), None, 1, global_batch_size=8):
        expected = [place for place in range(16) if (sample.first_token + place) % 10 == 0]
        assert sample.documents == expected and sample.masked == 0


def test_masked_labels_are_counted_as_in_the_batch():
    masked = dataset(document_mask=True)
    loader = Loader(masked, global_batch_size=8, rank=0, ranks=1)
    labels = next(loader).labels
    loader.close()
    shown = samples_of_step(masked, None, 1, global_batch_size=8)
    assert [sample.masked for sample in shown] == (labels == -100).sum(1).tolist()


def test_text_is_decoded():
    (sample,) = samples_of_step(dataset(), ByteTokenizer(), 1, global_batch_size=1, excerpt=4)
    ids = np.arange(sample.first_token, sample.first_token + 4)
    assert sample.text == ByteTokenizer().decode(ids.tolist())


SYNTHETIC = ["--config", "debug.toml", "--run.name=never-trained", '--data.sources=[{path="synthetic"}]']


def test_the_script_shows_a_step_in_words_and_as_json(tmp_path):
    words = call(tmp_path, "inspect_data", *SYNTHETIC, "--step", 2, "--train.global_batch_size=4")
    assert words.code == 0, words.err
    assert words.out.count("synthetic  epoch 0") == 4
    lines = objects(
        call(tmp_path, "inspect_data", *SYNTHETIC, "--step", 2, "--ranks", 4, "--rank", 3, "--json")
    )
    assert [line["sample"] for line in lines] == [28, 29, 30, 31]


def test_the_script_skips_what_the_runs_roll_backs_skip(tmp_path):
    run = tmp_path / "never-trained"
    run.mkdir()
    rollback = {"from_step": 3, "to_step": 1, "first_sample": 16, "end_sample": 48}
    (run / "rollbacks.json").write_text(json.dumps([rollback]))
    options = (*SYNTHETIC, "--step", 2, "--json", f"--run.output_dir={tmp_path}")
    shown = call(tmp_path, "inspect_data", *options)
    assert [line["sample"] for line in objects(shown)] == list(range(48, 64))
    assert "samples 16 to 47 are skipped" in shown.err
    (line,) = objects(call(tmp_path, "inspect_data", *SYNTHETIC, "--mixture", "--steps=1:2", "--json"))
    (skipping,) = objects(
        call(
            tmp_path,
            "inspect_data",
            *(*SYNTHETIC, "--mixture", "--steps=1:2", "--json", f"--run.output_dir={tmp_path}"),
        )
    )
    assert skipping == line


def test_a_damaged_state_of_the_run_is_one_sentence(tmp_path):
    run = tmp_path / "never-trained"
    run.mkdir()
    options = (*SYNTHETIC, "--step", 2, f"--run.output_dir={tmp_path}")
    (run / "rollbacks.json").write_text('[{"from_step": 3, ')
    found = call(tmp_path, "inspect_data", *options)
    assert found.code == BAD_CONFIG and "rollbacks.json cannot be read as JSON; remove this file" in found.err
    (run / "rollbacks.json").unlink()
    checkpoint = run / "checkpoints" / step_name(2)
    checkpoint.mkdir(parents=True)
    state = checkpoint / "trainer.json"
    state.write_text("{}")
    (checkpoint / MANIFEST).write_text(compose(2, 1, {}, {state.name: entry(state)}))
    state.write_text("{")
    found = call(tmp_path, "inspect_data", *options)
    assert found.code == NO_CHECKPOINT and "Traceback" not in found.err
    assert f"checkpoint {checkpoint} is damaged: trainer.json has a wrong checksum" in found.err


@pytest.mark.parametrize(("number", "code"), [(errno.EACCES, BAD_CONFIG), (errno.ESTALE, FAILED)])
def test_an_unreadable_state_of_the_run_is_not_damaged(tmp_path, monkeypatch, number, code):
    checkpoint = tmp_path / "run" / "checkpoints" / step_name(2)
    checkpoint.mkdir(parents=True)
    state = checkpoint / "trainer.json"
    state.write_text("{}")
    (checkpoint / MANIFEST).write_text(compose(2, 1, {}, {state.name: entry(state)}))

    opened = Path.open

    def fail(path, *args, **options):
        if path == state:
            raise OSError(number, os.strerror(number))
        return opened(path, *args, **options)

    monkeypatch.setattr(Path, "open", fail)
    config = load_config([*PHASED, "--run.name=run", f"--run.output_dir={tmp_path}"])
    with pytest.raises(UserError, match=rf"{checkpoint}: cannot be read: trainer.json") as error:
        dataset_of_run(config, 12)
    assert error.value.exit_code == code


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--step", 0], "must be at least 1"),
        (["--step", 1, "--ranks", 3], "must divide the 16 sequences of the step"),
        (["--step", 1, "--rank", 1], "must be from 0 to 0"),
        (["--step", 1, "--model.dimm=3"], "did you mean model.dim"),
        (["--step", 1, '--data.sources=[{path="/absent"}]'], "/absent: is not a folder"),
        (["--step", 1, '--data.sources=[{path="/absent.bin"}]'], 'dtype = "uint16"'),
    ],
)
def test_an_error_is_one_sentence_and_exit_code_2(options, message, tmp_path):
    result = call(tmp_path, "inspect_data", *SYNTHETIC, *options)
    assert result.code == 2 and message in result.err and "Traceback" not in result.err
