"""The real kernels of the block formats are launched where they exist, with operands that they accept."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.simulated_gpu import counting
from tests.simulated_gpu.needed import simulated_gpu
from tests.support import gpu_variants as variants
from tests.support.runs import Run

pytestmark = simulated_gpu
DIM = ["--model.dim=128", "--model.ffn_dim=256", "--model.n_kv_heads=4"]


def launches(tmp_path: Path, capability: str, *options: str, world: int = 1) -> dict[str, int]:
    run = Run(tmp_path, *DIM, *options, base=variants.BASE)
    assert run.start(world=world, variables={"SIMGPU_CAPABILITY": capability}).join() == [0] * world, (
        run.output()[-4000:]
    )
    found = counting.read(run.path)
    assert not set(found["waits"]) - variants.SPLITS
    return found["kernels"]


@pytest.mark.parametrize("parallel", [(), ("--parallel.tp=2", "--parallel.ep=2")])
def test_mxfp8_multiplies_on_blackwell(tmp_path: Path, parallel: tuple[str, ...]) -> None:
    found = launches(
        tmp_path, "100", *variants.MOE, "--precision.float8=mxfp8", "--precision.float8_emulate=false", *parallel,
        world=4 if parallel else 1,
    )  # fmt: skip
    grouped = [name for name in found if "cutlass_mslk" in name or "BlockScaled" in name]
    assert found["cublasLtMatmul"] and "triton_scale_swizzle_M_groups" in found
    assert grouped or parallel, "on four ranks the host reads that no rows arrive"


@pytest.mark.parametrize("capability", ["90", "100"])
def test_blockwise_multiplies_on_hopper_and_blackwell(tmp_path: Path, capability: str) -> None:
    found = launches(tmp_path, capability, "--precision.float8=blockwise", "--precision.float8_emulate=false")
    assert any("triton_fp8_gemm_1x128_128x1_kernel" in name for name in found) == (capability == "100"), (
        sorted(found)
    )


def test_a_gpu_without_kernels_emulates(tmp_path: Path) -> None:
    found = launches(tmp_path, "90", "--precision.float8=mxfp8")
    assert not any("swizzle" in name for name in found)
