"""Shipped configs on simulated GPUs: compilation for Hopper and Blackwell, and memory compared with the plan."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.simulated_gpu import compiled, counting
from tests.simulated_gpu.needed import simulated_gpu
from tests.simulated_gpu.shipped import COMMON, CONFIGS, COUNTING, FOLDER, OF_FOUR, WHOLE, shrunk
from tests.support.gpu_variants import SPLITS
from tests.support.runs import Run

pytestmark = [simulated_gpu, pytest.mark.slow, pytest.mark.timeout(1500)]

# Four ranks compile at once, perhaps on one core.
COMPILING_S = 1200

GOLDEN = Path(__file__).with_name("golden_compiled.json")
# Substrings of kernel names -> kind of attention.
ATTENTION = {
    "cudnnBackendExecute": "cuDNN",
    "flash_fwd": "FlashAttention-2",
    "fmha_cutlass": "memory-efficient (CUTLASS)",
    "flex_attention": "FlexAttention (Triton)",
}


def attention(kernels: dict[str, int]) -> list[str]:
    return sorted({kind for part, kind in ATTENTION.items() if any(part in kernel for kernel in kernels)})


@pytest.mark.parametrize("capability", ["90", "100"])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_shipped_config_is_compiled_and_trains(name: str, capability: str, tmp_path: Path) -> None:
    check(f"{name} sm_{capability}", shrunk(name), 1, capability, tmp_path)


@pytest.mark.parametrize("capability", ["90", "100"])
@pytest.mark.parametrize("layout", OF_FOUR)
def test_a_shipped_config_is_compiled_over_four_gpus(layout: str, capability: str, tmp_path: Path) -> None:
    name, *axes = layout.split()
    options = [*shrunk(name), *(f"--parallel.{axis}" for axis in axes), "--train.global_batch_size=4"]
    check(f"{layout} sm_{capability}", options, 4, capability, tmp_path)


def check(key: str, options: list[str], world: int, capability: str, folder: Path) -> None:
    """Train for three steps and compare launches, peak and kernels of rank 0 with golden_compiled.json[key]."""
    variables = {"SIMGPU_CAPABILITY": capability, **compiled.environment(folder)}
    run = Run(folder, COUNTING, base=options)
    assert run.start(world=world, variables=variables).join(COMPILING_S) == [0] * world, run.output()[-4000:]
    counts = counting.read(run.path)
    assert not counts["waits"].keys() - SPLITS
    found = {
        "attention": attention(counts["kernels"]),
        "launches": counts["launches"],
        "peak": counts["peak"],
        "kernels": compiled.kernels(folder),
    }
    golden = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
    if os.environ.get("UPDATE"):
        GOLDEN.write_text(compiled.render(golden | {key: found}))
    else:
        expected = golden.get(key, found | {"launches": "not counted yet"})
        # See test_steps.py.
        expected["peak"] = pytest.approx(expected["peak"], rel=1e-3)
        assert found == expected, "make simgpu-all UPDATE=1 writes the new counts"


@pytest.mark.parametrize("options", [shrunk(name) for name in CONFIGS], ids=CONFIGS)
def test_the_plan_knows_the_peak(options: list[str], tmp_path: Path) -> None:
    compare_peaks(options, tmp_path)


@pytest.mark.parametrize("name", WHOLE)
def test_the_plan_knows_the_peak_of_a_whole_model(name: str, tmp_path: Path) -> None:
    compare_peaks([f"--config={name}.toml", *COMMON, *WHOLE[name]], tmp_path)


def test_the_plan_knows_the_peak_of_offloaded_activations(tmp_path: Path) -> None:
    layers = ["--model.n_layers=6", "--model.layer_pattern=[]", "--activation_checkpoint.mode=offload"]
    compare_peaks([*shrunk("1b"), *layers], tmp_path)


def compare_peaks(options: list[str], folder: Path) -> None:
    """Compare the allocator's peak of three eager steps on one GPU with the plan's."""
    options = [*options, "--compile.enabled=false", "--compile.loss=false"]
    run = Run(folder, COUNTING, base=options)
    assert run() == 0, run.output()[-4000:]
    peak = counting.read(run.path)["peak"] / 2**30
    command = [sys.executable, "train.py", *options, "--plan"]
    plan = subprocess.run(command, capture_output=True, text=True, cwd=FOLDER.parent)
    assert plan.returncode == 0, plan.stderr
    planned = float(re.search(r"needs ([\d.]+) GiB on each GPU", plan.stdout)[1])
    assert 0.98 * peak <= planned <= 1.05 * peak, f"planned {planned:.2f} GiB, needed {peak:.2f} GiB"


def test_the_page_shows_the_launches_of_a_mixture(tmp_path: Path) -> None:
    """The launches of one layer are those of a model with three layers minus those of a model with two layers."""
    two, three = (launches_of_mixture(layers, tmp_path / str(layers)) for layers in (2, 3))
    page = (Path(__file__).parents[2] / "docs" / "internals" / "performance.md").read_text()
    assert f"| launches | {three - two} |" in page


def launches_of_mixture(layers: int, folder: Path) -> int:
    """Return rank 0's launches in a step of qwen3-30b-a3b with `layers` layers on four ranks, over two microbatches."""
    options = ["--config=qwen3-30b-a3b.toml", f"--model.n_layers={layers}", "--model.vocab_size=512", *COMMON]
    options += ["--parallel.ep=4", "--train.global_batch_size=8"]
    folder.mkdir()
    run = Run(folder, COUNTING, base=options)
    even = "tests.simulated_gpu.patches:log_order_of_even_experts"
    assert run.start(world=4, patch=even).join(COMPILING_S) == [0] * 4, run.output()[-4000:]
    return int(counting.read(run.path)["launches"])
