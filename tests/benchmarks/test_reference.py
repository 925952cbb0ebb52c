"""The comparison with the published curve can fail, and compares only runs with the same inputs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from benchmarks import reference
from benchmarks.reference import SOURCES, Curve, compare
from tests.support.trained import prepared

LAST = 10
PUBLISHED = [2.00, 2.02, 2.04]
# 4.28 times the standard deviation of the published runs.
HALF = 3.707 * 0.02 * (4 / 3) ** 0.5


def curve(final: float) -> Curve:
    return {source: {1: 5.0, LAST: final} for source in SOURCES}


@pytest.mark.parametrize(
    ("final", "verdict"), [(2.02 + 0.99 * HALF, "equal"), (2.02 - 1.01 * HALF, "differs")]
)
def test_a_run_is_equal_within_the_interval_of_the_published_runs(final: float, verdict: str) -> None:
    rows = compare(curve(final), 3, [curve(one) for one in PUBLISHED])
    assert [(row[1], row[-1]) for row in rows] == [(source, verdict) for source in SOURCES]


def test_a_loss_of_nan_differs() -> None:
    assert {row[-1] for row in compare(curve(float("nan")), 3, [curve(one) for one in PUBLISHED])} == {
        "differs"
    }


def test_a_missing_corpus_is_one_sentence(capsys, tmp_path: Path) -> None:
    assert reference.main(["--corpus", str(tmp_path / "none")]) == 2
    assert (
        capsys.readouterr().err
        == f"forge: {tmp_path / 'none'}: no corpus; first run make corpus SIZE=small\n"
    )


TINY = (
    *("--ladder.depth=1", "--train.tokens=4096", "--train.seq_len=32", "--train.micro_batch_size=8"),
    *("--evaluate.sequences=2", "--model.vocab_size=512"),
)


@pytest.mark.long
@pytest.mark.processes
def test_a_published_curve_is_found_again(capfd, tmp_path: Path) -> None:
    text, corpus = prepared(tmp_path), tmp_path / "corpus"
    for source in SOURCES:
        for split in ("train", "validation"):
            shutil.copytree(text / split, corpus / source / split)
    folders = ["--corpus", str(corpus), "--runs", str(tmp_path / "runs"), "--output", str(tmp_path)]
    options = [*folders, "--data.tokenizer=bytes", *TINY]

    assert reference.main([*options, "--seeds", "0"]) == 2
    assert "no published curve" in capfd.readouterr().err
    assert reference.main([*options, "--seeds", "0", "0", "1", "--publish"]) == 2
    assert "--publish needs 3 different --seeds, but has 0 0 1" in capfd.readouterr().err
    assert reference.main([*options, "--seeds", "0", "1", "2", "--publish"]) == 0
    (file,) = tmp_path.glob("*-cpu-reference.json")
    curves = json.loads(file.read_text())["results"]["bits_per_byte"]
    assert list(curves) == ["0", "1", "2"] and len(curves["0"]["python"]) >= 10
    assert curves["0"] != curves["1"]
    assert "held-out bits per byte" in file.with_suffix(".svg").read_text()
    capfd.readouterr()

    # The run with this seed is finished, so train.py only reports its end.
    assert reference.main([*options, "--seeds", "0"]) == 0
    assert capfd.readouterr().out.count("| equal |") == len(SOURCES)
    assert reference.main([*options, "--seeds", "0", "--optimizer.eps=1e-6"]) == 2
    assert "was made with optimizer.eps = 1e-08, but now it is 1e-06" in capfd.readouterr().err
    described = corpus / "prose" / "validation" / "dataset.json"
    content = json.loads(described.read_text())
    content["origin"]["input"] = {"stamp": "of a copy in another folder"}
    described.write_text(json.dumps(content))
    assert reference.main([*options, "--seeds", "0"]) == 0
    content["text_bytes"] += 1
    described.write_text(json.dumps(content))
    assert reference.main([*options, "--seeds", "0"]) == 2
    assert "was made with data.validation.prose = " in capfd.readouterr().err
