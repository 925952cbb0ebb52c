"""evaluate.py, run like a user's command."""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from forge.checkpoint.folders import step_name
from forge.data.format import TokenDataset
from forge.data.tokenizer import ByteTokenizer
from forge.runtime.errors import BAD_CONFIG
from forge.tools.inference.measure import Measured
from forge.tools.inference.open import TrainedModel
from scripts.evaluate import report, report_tasks
from tests.support.runs import Run
from tests.support.trained import Result, call, objects, prepared, refusal, trained


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("evaluate")
    prepared(folder)
    return folder


@pytest.fixture(scope="module")
def run(folder) -> Run:
    return trained(folder)


def evaluate(run: Any, *arguments: object) -> Result:
    return call(run.path.parent, "evaluate", "--checkpoint", run.path, *arguments)


def one_object(result: Result) -> dict[str, Any]:
    (only,) = objects(result)
    return only


MOE = [f"--model.moe.{key}" for key in ("n_experts=4", "top_k=2", "expert_dim=32", "n_dense_layers=1")]
LAYOUTS = {
    "one process": (1, []),
    "two processes, tensor parallel": (2, ["--parallel.tp=2"]),
    "experts on two processes": (2, ["--parallel.ep=2", *MOE]),
    "experts with a capacity": (2, ["--parallel.ep=2", *MOE, "--model.moe.capacity_factor=0.5"]),
    "bfloat16": (1, ["--precision.compute=bfloat16"]),
    "bfloat16 with parts in float32": (
        1,
        ["--precision.compute=bfloat16", '--precision.fp32_modules=["*.router", "*.wo", "head"]', *MOE],
    ),
    "pipeline": (2, ["--parallel.pp=2"]),
    "zero1": (2, ["--parallel.data_parallel=zero1"]),
    "documents apart": (1, ["--data.document_mask=true"]),
    "a phase with another window": (1, ["--model.sliding_window=4", "--phase=[{sliding_window=24}]"]),
    "a phase with documents apart": (1, ["--phase=[{document_mask=true}]"]),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_loss_is_the_trainers(folder, tmp_path, name) -> None:
    """On the same windows, for any layout and precision of the run."""
    world, options = LAYOUTS[name]
    (tmp_path / "data").symlink_to(folder / "data")
    run = trained(tmp_path, *options, world=world)
    (expected,) = [line["eval"]["held"] for line in run.metrics() if "eval" in line]
    found = one_object(
        evaluate(run, "--data", "data/validation", "--sequences", 5, "--batch-size", 2, "--json")
    )
    assert found["loss"] == pytest.approx(expected, abs=1e-4 if "bfloat16" in name else 1e-6)
    assert found["sequences"] == 5 and found["step"] == 6


def test_held_out_losses_use_the_document_mask_of_a_phase(folder, tmp_path) -> None:
    for name in ("whole", "phase"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "data").symlink_to(folder / "data")
    whole, phase = (
        [line["eval"]["held"] for line in trained(tmp_path / name, option).metrics() if "eval" in line]
        for name, option in (
            ("whole", "--data.document_mask=true"),
            ("phase", "--phase=[{document_mask=true}]"),
        )
    )
    assert whole == phase


@pytest.mark.parametrize(
    "recipe", ["blockwise", *(pytest.param(one, marks=pytest.mark.slow) for one in ("mxfp8", "tensorwise"))]
)
def test_a_model_trained_in_float8_is_measured_in_float8_on_request(folder, tmp_path, recipe: str) -> None:
    (tmp_path / "data").symlink_to(folder / "data")
    run = trained(tmp_path, f"--precision.float8={recipe}", *MOE)
    (expected,) = [line["eval"]["held"] for line in run.metrics() if "eval" in line]
    options = ("--data", "data/validation", "--sequences", 5, "--batch-size", 2, "--json")
    same, plain = one_object(evaluate(run, *options, "--float8")), one_object(evaluate(run, *options))
    # A scale per tensor depends on the batch.
    assert same["loss"] == pytest.approx(expected, abs=1e-3 if recipe == "tensorwise" else 1e-5)
    assert abs(plain["loss"] - expected) > 1e-5


def test_float8_of_a_run_without_it_is_refused(run) -> None:
    result = evaluate(run, "--data", "data/validation", "--float8")
    assert result.code == BAD_CONFIG and "was trained with precision.float8 = none" in refusal(result)


def test_a_whole_dataset_with_the_bytes_of_its_text(run, folder) -> None:
    data = TokenDataset(folder / "data" / "validation")
    found = one_object(evaluate(run, "--data", "data/validation", "--json"))
    assert found["tokens"] == data.tokens - 1
    assert (found["text_bytes"], found["text_bytes_from"]) == (data.index.text_bytes, "dataset.json")
    assert found["perplexity"] == pytest.approx(math.exp(found["loss"]))
    bits = found["loss"] * found["tokens"] / math.log(2)
    assert found["bits_per_byte"] == pytest.approx(bits / data.index.text_bytes)


def test_the_text_output_has_a_line_for_each_dataset(run) -> None:
    result = evaluate(run, "--data", "data/validation", "--data", "data/train", "--sequences", 3)
    lines = result.out.splitlines()
    pattern = r"data/\w+: loss [\d.]+, perplexity [\d.]+, bits per byte [\d.]+ \(\d+ bytes of the decoded labels\), 96 tokens"
    assert len(lines) == 2 and all(re.fullmatch(pattern, line) for line in lines), result.out


def test_raw_tokens_and_a_synthetic_stream(run, folder, tmp_path) -> None:
    shard = next((folder / "data" / "validation").glob("*.bin"))
    (tmp_path / "raw.bin").write_bytes(shard.read_bytes())
    by_hand = ("--data", tmp_path / "raw.bin", "--data-dtype", "uint16", "--eos-id", 257, "--json")
    raw, whole = (
        one_object(evaluate(run, *by_hand)),
        one_object(evaluate(run, "--data", "data/validation", "--json")),
    )
    assert raw["loss"] == whole["loss"] and raw["text_bytes"] == whole["text_bytes"]
    assert raw["text_bytes_from"] == "decoding"
    synthetic = one_object(evaluate(run, "--data", "synthetic", "--json"))
    assert synthetic["sequences"] == 5


def test_a_run_on_synthetic_data_is_measured_on_its_own_held_out_stream(tmp_path) -> None:
    run = Run(
        tmp_path,
        "--train.steps=2",
        '--data.validation=[{name="held",path="synthetic"}]',
        "--evaluate.interval=2",
    )
    assert run("--evaluate.sequences=4") == 0
    (expected,) = [line["eval"]["held"] for line in run.metrics() if "eval" in line]
    found = one_object(evaluate(run, "--data", "synthetic", "--json"))
    assert found["loss"] == pytest.approx(expected, abs=1e-6) and found["bits_per_byte"] is None


def test_a_phase_is_evaluated_with_its_own_sequences_in_the_run_and_by_the_script(tmp_path) -> None:
    run = Run(
        tmp_path,
        "--train.steps=2",
        '--data.validation=[{name="held",path="synthetic"}]',
        "--evaluate.interval=1",
        "--evaluate.sequences=4",
        "--phase=[{seq_len=16,until_tokens=128,global_batch_size=8},{document_mask=true}]",
        "--checkpoint.interval=1",
    )
    assert run() == 0
    expected = [line["eval"]["held"] for line in run.metrics() if "eval" in line]
    for step, labels in ((1, 4 * 16), (2, None)):
        checkpoint = run.path / "checkpoints" / step_name(step)
        found = one_object(evaluate(SimpleNamespace(path=checkpoint), "--data", "synthetic", "--json"))
        assert found["loss"] == pytest.approx(expected[step - 1], abs=1e-6)
        assert found["tokens"] == (labels or found["tokens"])


def test_json_is_valid_with_non_finite_numbers(capsys) -> None:
    opened = TrainedModel(Path("run"), 3, None, None, None, torch.device("cpu"))  # type: ignore[arg-type]
    report("data", Measured(1e6, tokens=4, sequences=1, text_bytes=2, bytes_from="decoding"), True, opened)
    report_tasks({"task": {"acc": 0.5, "acc_stderr": math.nan}}, True, opened)
    data, tasks = (
        json.loads(line, parse_constant=pytest.fail) for line in capsys.readouterr().out.splitlines()
    )
    assert data["loss"] == 1e6 and data["perplexity"] is None
    assert tasks["tasks"] == {"task": {"acc": 0.5, "acc_stderr": None}}


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "nothing to measure: give --data DIR, or --tasks"),
        (["--data", "data/validation", "--limit", "10"], "--limit: only with --tasks"),
        (["--tasks", "arc_easy", "--eos-id", "1"], "--eos-id: only with --data"),
        (["--data", "absent"], "absent: is not a folder"),
        (["--data", "data/validation", "--data", "absent"], "absent: is not a folder"),
        (["--data", "run"], "holds no dataset.json"),
        (["--data", "run/metrics.jsonl"], "metrics.jsonl: is not a folder"),
        (["--data", "data/validation", "--sequences", "0"], "at least 1"),
        (["--data", "data/validation", "--eos-id", "-1"], "at least 0"),
        (["--data", "data/validation", "--dtype", "int4"], "invalid choice: 'int4'"),
        (["--data", "data/validation", "--checkpoint", "absent"], "absent: does not exist"),
    ],
)
def test_an_error_is_one_sentence_and_exit_code_2(run, arguments, sentence) -> None:
    result = evaluate(run, *arguments)
    assert result.code == BAD_CONFIG and result.out == "" and sentence in refusal(result)


def test_data_of_another_tokenizer_is_refused(run, folder, tmp_path) -> None:
    shutil.copytree(folder / "data" / "validation", tmp_path / "other")
    index = tmp_path / "other" / "dataset.json"
    index.write_text(index.read_text().replace(ByteTokenizer.fingerprint, "0" * 64))
    result = evaluate(run, "--data", tmp_path / "other")
    assert result.code == BAD_CONFIG and "other: was prepared with another tokenizer" in result.err
