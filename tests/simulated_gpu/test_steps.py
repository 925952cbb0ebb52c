"""On the simulated GPU every variant trains, no step waits for the device, and the counts are those of golden.json."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.simulated_gpu import counting, order, variants
from tests.support.runs import Run

pytestmark = pytest.mark.skipif(
    "libsimgpu.so" not in os.environ.get("LD_PRELOAD", ""), reason="there is no simulated GPU: make simgpu"
)

GOLDEN = Path(__file__).with_name("golden.json")
# What the host may wait for in a step: the result of the step before, and the split sizes of expert parallelism.
ALLOWED = {"parallel/expert.py:sizes_from_counts"}


def counted(folder: Path, name: str, options: list[str], world: int) -> dict[str, Any]:
    run = Run(folder, *options, base=variants.BASE)
    codes = run.start(world=world, patch="tests.simulated_gpu.patches:log_order").join()
    assert codes == [0] * world, run.output()[-4000:]
    return counting.read(run.path)


def check(name: str, found: dict[str, Any]) -> None:
    waits = set(found["waits"]) - ALLOWED
    assert not waits, f"a step waits for the device in {', '.join(sorted(waits))}"
    kept = {key: found[key] for key in ("launches", "copies", "synchronizations", "waits")}
    kept["nccl"] = {kernel: n for kernel, n in found["kernels"].items() if kernel.startswith("nccl")}
    golden = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
    if os.environ.get("UPDATE"):
        GOLDEN.write_text(json.dumps(dict(sorted((golden | {name: kept}).items())), indent=1) + "\n")
    else:
        assert kept == golden.get(name), "make simgpu UPDATE=1 writes the new counts"


@pytest.mark.parametrize("name", [name for name in variants.ONE if name not in variants.UNSUPPORTED])
def test_a_step_on_one_gpu(name: str, tmp_path: Path) -> None:
    check(name, counted(tmp_path, name, variants.ONE[name], 1))


@pytest.mark.parametrize("name", [name for name in variants.FOUR if name not in variants.UNSUPPORTED])
def test_a_step_on_four_gpus(name: str, tmp_path: Path) -> None:
    check(f"four: {name}", counted(tmp_path, name, variants.FOUR[name], 4))
    assert not order.check(tmp_path), "a GPU must run collectives of two communicators at once"
