"""Shipped configs, shrunk to one layer of each kind on one GPU, with full widths, heads, vocabulary and context."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "configs"
# The models of the ladder have the parts of 160m.
CONFIGS = sorted(path.stem for path in FOLDER.glob("*.toml") if not re.search("debug|ladder", path.stem))
MOST_EXPERTS = 32
# Longer patterns list every layer of the model.
LONGEST = 8
# Layouts of four GPUs whose compiled regions contain collectives, or parameters that others have parts of.
OF_FOUR = ["llama3-70b tp=4", "qwen3-30b-a3b ep=4", "deepseek-v3 ep=2 tp=2", "gpt-oss-20b cp=2"]
# Whole models that fit on one H200, with options that make them fit.
SMALL_STATE = ["--optimizer.moment_dtype=bfloat16", "--activation_checkpoint.mode=full"]
WHOLE = {
    "160m": [],
    "1b": [],
    "gemma3-4b": [],
    "7b": SMALL_STATE,
    "olmo3-7b": SMALL_STATE,
    "llama3-8b": SMALL_STATE,
    "qwen3-8b": SMALL_STATE,
}


def shrunk(name: str) -> list[str]:
    """Return the options of train.py."""
    config = tomllib.loads((FOLDER / f"{name}.toml").read_text())
    model, moe = config["model"], config["model"].get("moe", {})
    dense = min(1, moe.get("n_dense_layers", 0))
    pattern = model.get("layer_pattern", [])
    if len(pattern) > LONGEST:
        pattern = list(dict.fromkeys(pattern))
    options = [
        f"--config={name}.toml",
        f"--model.n_layers={max(len(pattern), dense + 1)}",
        f"--model.layer_pattern={json.dumps(pattern)}",
    ]
    if moe:
        options += [f"--model.moe.n_dense_layers={dense}"]
        options += [f"--model.moe.n_experts={min(MOST_EXPERTS, moe['n_experts'])}"]
    axes = {"dp_replicate", "tp", "cp", "pp", "ep"} & config.get("parallel", {}).keys()
    options += [f"--parallel.{axis}=1" for axis in sorted(axes)]
    return [*options, *COMMON]


COMMON = [
    "--run.name=run",
    '--data.sources=[{path="synthetic",weight=1.0}]',
    "--data.validation=[]",
    "--data.tokenizer=bytes",
    "--train.micro_batch_size=1",
    "--train.global_batch_size=1",
    "--train.steps=4",
    "--evaluate.interval=0",
    "--metrics.log_interval=1",
    "--metrics.tensorboard=false",
    "--checkpoint.interval=0",
]
COUNTING = '--train.hooks=["tests.simulated_gpu.counting:CountingAtFullSize"]'
