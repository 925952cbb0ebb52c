"""The simulated GPU's variants on a real GPU: no step waits for the device, and the losses match a CPU's.

By its name, pytest runs this file first.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import gpu_variants as variants
from tests.support.no_waits import NO_WAITS
from tests.support.runs import Run

pytestmark = pytest.mark.gpu
BASE = [*variants.BASE, "--train.hooks=[]"]
# float8 products and torchao's kernels run only on a GPU.
ON_BOTH = [name for name in variants.ONE if "float8" not in name]
EXPERTS = [*variants.MOE, "--model.moe.balance=aux_loss", *variants.COMPILE]
COMPILED = variants.COMPILED | {
    "compiled experts": EXPERTS,
    "compiled experts, recomputed": [*EXPERTS, "--activation_checkpoint.mode=selective"],
}
# Experts in float32 are multiplied one by one, so the host reads the number of rows of each.
WITHOUT_WAITS = [name for name in variants.ONE if name != "experts in float32"]


@pytest.mark.parametrize("name", WITHOUT_WAITS)
def test_no_step_waits_for_the_gpu(name: str, tmp_path: Path) -> None:
    run = Run(tmp_path, *variants.ONE[name], NO_WAITS, base=BASE)
    assert run() == 0, run.output()[-4000:]


@pytest.mark.parametrize("name", [*ON_BOTH, *COMPILED])
def test_losses_match_a_cpu_up_to_rounding_to_bfloat16(name: str, tmp_path: Path) -> None:
    cpu, cuda = variants.losses_on_both((variants.ONE | COMPILED)[name], tmp_path)
    assert cuda == pytest.approx(cpu, abs=0.02)
