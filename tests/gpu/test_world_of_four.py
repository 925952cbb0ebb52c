"""Four ranks on one real GPU: every layout of the simulated GPU, with NCCL over sockets, gives a CPU's losses.

Communicators, kernels and values are real. Links are not: no number from these runs says anything about speed.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import gpu_variants as variants
from tests.support.gpus import ON_ONE_GPU

pytestmark = pytest.mark.gpu
# Ranks of different hosts share no memory.
ONE_HOST = {"zero1 in symmetric memory", "async tp, compiled"}
# float8 products and torchao's kernels run only on a GPU.
LAYOUTS = [name for name in variants.FOUR if name not in ONE_HOST and "float8" not in name]


@pytest.mark.parametrize("name", LAYOUTS)
def test_losses_of_four_ranks_match_a_cpu_up_to_rounding_to_bfloat16(name: str, tmp_path: Path) -> None:
    cpu, cuda = variants.losses_on_both(variants.FOUR[name], tmp_path, world=4, on_gpu=ON_ONE_GPU)
    assert cuda == pytest.approx(cpu, abs=0.02)
