"""Shipped configs on one simulated GPU: compilation for Hopper and Blackwell, and memory compared with the plan."""

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
from tests.simulated_gpu.shipped import CONFIGS, COUNTING, FOLDER, shrunk
from tests.support.runs import Run

pytestmark = [simulated_gpu, pytest.mark.slow]

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
    variables = {"SIMGPU_CAPABILITY": capability, **compiled.environment(tmp_path)}
    run = Run(tmp_path, COUNTING, base=shrunk(name))
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
        GOLDEN.write_text(compiled.render(golden | {key: found}))
    else:
        expected = golden.get(key, found | {"launches": "not counted yet"})
        # See test_steps.py.
        expected["peak"] = pytest.approx(expected["peak"], rel=1e-3)
        assert found == expected, "make simgpu-all UPDATE=1 writes the new counts"


@pytest.mark.parametrize("name", CONFIGS)
def test_the_plan_knows_the_peak(name: str, tmp_path: Path) -> None:
    options = [*shrunk(name), "--compile.enabled=false", "--compile.loss=false"]
    run = Run(tmp_path, COUNTING, base=options)
    assert run() == 0, run.output()[-4000:]
    peak = counting.read(run.path)["peak"] / 2**30
    command = [sys.executable, "train.py", *options, "--plan"]
    plan = subprocess.run(command, capture_output=True, text=True, cwd=FOLDER.parent)
    assert plan.returncode == 0, plan.stderr
    planned = float(re.search(r"needs ([\d.]+) GiB on each GPU", plan.stdout)[1])
    assert 0.98 * peak <= planned <= 1.05 * peak, f"planned {planned:.2f} GiB, needed {peak:.2f} GiB"
