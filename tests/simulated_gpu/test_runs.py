"""Whole runs of train.py on simulated GPUs evaluate, sample, save, resume, profile and watch gradients."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.simulated_gpu.needed import simulated_gpu
from tests.support import gpu_variants as variants
from tests.support.runs import Run, sources
from tests.support.trained import prepare_bytes

pytestmark = simulated_gpu

EVERYTHING = [
    "--data.tokenizer=bytes",
    "--model.vocab_size=258",
    "--train.steps=6",
    "--train.hooks=[]",
    "--evaluate.interval=2",
    "--evaluate.sequences=8",
    "--evaluate.sample_interval=3",
    "--evaluate.sample_tokens=4",
    "--checkpoint.interval=2",
    "--checkpoint.mode=async",
    "--metrics.monitor_interval=2",
    "--metrics.tensorboard=true",
    "--optimizer.ema=0.9",
]
LAYOUTS = {
    "one": ([], 1),
    "fsdp2": ([], 4),
    "zero1 and tp": (["--parallel.data_parallel=zero1", "--parallel.tp=2"], 4),
    "pp and ep": (["--parallel.pp=2", "--parallel.ep=2", *variants.MOE], 4),
    "muon over zero2": (["--optimizer.name=muon", "--parallel.data_parallel=zero2"], 4),
}


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a small byte-level dataset."""
    folder = tmp_path_factory.mktemp("data")
    text = folder / "text.txt"
    text.write_text("It was a bright cold day in April, and the clocks were striking thirteen. " * 800)
    prepare_bytes(text, folder / "shards")
    return folder / "shards"


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_run_evaluates_saves_resumes_and_watches(name: str, tmp_path: Path, shards: Path) -> None:
    options, world = LAYOUTS[name]
    held_out = f'--data.validation=[{{name="text",path="{shards}"}}]'
    run = Run(tmp_path, sources(shards), held_out, *EVERYTHING, *options, base=variants.BASE)
    assert run("--train.steps=4", world=world) == 0, run.output()[-4000:]
    assert run("--profile.span=[5,6]", "--profile.memory_snapshot=true", world=world) == 0, run.output()[
        -4000:
    ]
    assert "step-00000006" in run.checkpoints()
    assert len(run.events("resumed")) == 1
    lines = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == [1, 2, 3, 4, 5, 6]
    assert all(line["memory_gib"] > 0 for line in lines if "loss" in line)
    assert [line["step"] for line in lines if "eval" in line] == [2, 4, 6]
    assert "sample:" in run.log()
    assert len(list((run.path / "profile").iterdir())) == 2
