"""Four ranks on one real GPU: every layout of the simulated GPU, with NCCL over sockets, gives a CPU's losses.

Communicators, kernels and values are real. Links are not: no number from these runs says anything about speed.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from forge.checkpoint.folders import step_name
from tests.support import gpu_variants as variants
from tests.support.gpus import ON_ONE_GPU, ON_THE_CPU
from tests.support.runs import Run

pytestmark = pytest.mark.gpu
BASE = [*variants.BASE, "--train.hooks=[]"]
# Ranks of different hosts share no memory.
ONE_HOST = {"zero1 in symmetric memory", "async tp, compiled"}
# float8 products and torchao's kernels run only on a GPU.
LAYOUTS = [name for name in variants.FOUR if name not in ONE_HOST and "float8" not in name]


@pytest.mark.parametrize("name", LAYOUTS)
def test_losses_of_four_ranks_match_a_cpu_up_to_rounding_to_bfloat16(name: str, tmp_path: Path) -> None:
    """Both start from the weights of one CPU step, because initial values depend on the device type."""
    start = Run(tmp_path / "start", *variants.FOUR[name], base=BASE)
    assert start.start("--train.steps=1", world=4, patch=ON_THE_CPU).join() == [0] * 4, start.output()[-4000:]
    weights = f"--checkpoint.init={start.path / 'checkpoints' / step_name(1)}"
    losses = []
    for device, patch in (("cpu", ON_THE_CPU), ("cuda", ON_ONE_GPU)):
        run = Run(tmp_path / device, *variants.FOUR[name], weights, base=BASE)
        assert run.start(world=4, patch=patch).join() == [0] * 4, run.output()[-4000:]
        losses.append(run.losses())
    assert losses[1] == pytest.approx(losses[0], abs=0.02)
