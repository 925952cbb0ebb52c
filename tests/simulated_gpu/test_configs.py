"""Shipped configs on one simulated GPU, compiled for Hopper and Blackwell: kernels, attention, and memory beside the plan.

A config keeps its sizes but for its depth, the number of experts, the ranks and the batch: one layer of each kind.
"""

from __future__ import annotations

import json
import os
import tomllib
from pathlib import Path

import pytest

from tests.simulated_gpu import compiled, counting
from tests.simulated_gpu.needed import simulated_gpu
from tests.support.runs import Run

pytestmark = [simulated_gpu, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
GOLDEN = Path(__file__).with_name("golden_compiled.json")
PAGE = ROOT / "docs" / "kernels.md"
CONFIGS = sorted(path.stem for path in (ROOT / "configs").glob("*.toml") if "debug" not in path.stem)
MOST_EXPERTS = 32
# Substrings of kernels, and the attention that they are.
ATTENTION = {
    "cudnnBackendExecute": "cuDNN",
    "flash_fwd": "FlashAttention-2",
    "fmha_cutlass": "memory-efficient (CUTLASS)",
    "flex_attention": "FlexAttention (Triton)",
}


def shrunk(name: str) -> list[str]:
    """Return options that train one layer of each kind of a shipped config on one GPU."""
    config = tomllib.loads((ROOT / "configs" / f"{name}.toml").read_text())
    model, moe = config["model"], config["model"].get("moe", {})
    dense = min(1, moe.get("n_dense_layers", 0))
    options = [
        f"--config={name}.toml",
        f"--model.n_layers={max(len(model.get('layer_pattern', [])), dense + 1)}",
    ]
    if moe:
        options += [f"--model.moe.n_dense_layers={dense}"]
        options += [f"--model.moe.n_experts={min(MOST_EXPERTS, moe['n_experts'])}"]
    axes = {"dp_replicate", "tp", "cp", "pp", "ep"} & config.get("parallel", {}).keys()
    options += [f"--parallel.{axis}=1" for axis in sorted(axes)]
    return [
        *options,
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
        '--train.hooks=["tests.simulated_gpu.counting:CountingAtFullSize"]',
    ]


def attention(kernels: dict[str, int]) -> list[str]:
    return sorted({kind for part, kind in ATTENTION.items() if any(part in kernel for kernel in kernels)})


@pytest.mark.parametrize("capability", ["90", "100"])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_shipped_config_is_compiled_and_trains(name: str, capability: str, tmp_path: Path) -> None:
    variables = {"SIMGPU_CAPABILITY": capability, **compiled.environment(tmp_path)}
    run = Run(tmp_path, base=shrunk(name))
    assert run.start(variables=variables).join() == [0], run.output()[-4000:]
    counts = counting.read(run.path)
    assert not counts["waits"]
    found = {
        "attention": attention(counts["kernels"]),
        "launches": counts["launches"],
        "peak": counts["peak"],
        "kernels": compiled.kernels(tmp_path),
    }
    golden = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
    key = f"{name} sm_{capability}"
    if os.environ.get("UPDATE"):
        GOLDEN.write_text(json.dumps(dict(sorted((golden | {key: found}).items())), indent=1) + "\n")
    else:
        assert found == golden.get(key), "make simgpu-all UPDATE=1 writes the new counts"
