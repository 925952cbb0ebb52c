"""The simulated GPU's variants on a real GPU: no step waits for the device, and the losses match a CPU's.

By its name, pytest runs this file first.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from forge.checkpoint.folders import step_name
from tests.support import gpu_variants as variants
from tests.support.gpus import ON_THE_CPU
from tests.support.no_waits import NO_WAITS
from tests.support.runs import Run

pytestmark = pytest.mark.gpu
BASE = [*variants.BASE, "--train.hooks=[]"]
# float8 products and torchao's kernels run only on a GPU.
ON_BOTH = [name for name in variants.ONE if "float8" not in name]
# Experts in float32 are multiplied one by one, so the host reads the number of rows of each.
WITHOUT_WAITS = [name for name in variants.ONE if name != "experts in float32"]


@pytest.mark.parametrize("name", WITHOUT_WAITS)
def test_no_step_waits_for_the_gpu(name: str, tmp_path: Path) -> None:
    run = Run(tmp_path, *variants.ONE[name], NO_WAITS, base=BASE)
    assert run() == 0, run.output()[-4000:]


@pytest.mark.parametrize("name", ON_BOTH)
def test_losses_match_a_cpu_up_to_rounding_to_bfloat16(name: str, tmp_path: Path) -> None:
    """Both start from the weights of one CPU step, because initial values depend on the device type."""
    start = Run(tmp_path / "start", *variants.ONE[name], base=BASE)
    assert start.start("--train.steps=1", patch=ON_THE_CPU).join() == [0], start.output()[-4000:]
    weights = f"--checkpoint.init={start.path / 'checkpoints' / step_name(1)}"
    losses = []
    for device, patch in (("cpu", ON_THE_CPU), ("cuda", "")):
        run = Run(tmp_path / device, *variants.ONE[name], weights, base=BASE)
        assert run.start(patch=patch).join() == [0], run.output()[-4000:]
        losses.append(run.losses())
    assert losses[1] == pytest.approx(losses[0], abs=0.02)
