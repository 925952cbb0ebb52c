"""Block formats launch their real kernels on GPUs that have them, with operands accepted by the kernels."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.simulated_gpu import counting
from tests.simulated_gpu.needed import simulated_gpu
from tests.support import gpu_variants as variants
from tests.support.runs import Run

pytestmark = simulated_gpu
DIM = ["--model.dim=128", "--model.ffn_dim=256", "--model.n_kv_heads=4"]


def kernels(folder: Path, capability: str, *options: str, world: int = 1, patch: str = "") -> dict[str, int]:
    """Train the variants' model on `world` GPUs of `capability`; return rank 0's launches in one step."""
    run = Run(folder, *DIM, *options, base=variants.BASE)
    ranks = run.start(world=world, patch=patch, variables={"SIMGPU_CAPABILITY": capability})
    assert ranks.join() == [0] * world, run.output()[-4000:]
    found = counting.read(run.path)
    assert not set(found["waits"]) - variants.SPLITS
    return found["kernels"]


MXFP8 = (*variants.MOE, "--precision.float8=mxfp8", "--precision.float8_emulate=false")


def grouped(found: dict[str, int]) -> int:
    """Count launches of CUTLASS's grouped product of E4M3 with E8M0 scales, the kernel of `_scaled_grouped_mm`."""
    return sum(number for name, number in found.items() if "BlockScaled" in name and "float_ue8m0_t" in name)


def test_mxfp8_multiplies_on_blackwell(tmp_path: Path) -> None:
    found = kernels(tmp_path, "100", *MXFP8)
    # w13 and w2 of 2 layers, output and input gradient, in 4 microbatches.
    assert grouped(found) == found["triton_scale_swizzle_M_groups"] == 32
    # Four projections of attention in 2 layers, three products, 4 microbatches.
    assert found["cublasLtMatmul"] == 2 * 4 * 3 * 4


def test_mxfp8_multiplies_rows_of_other_ranks(tmp_path: Path) -> None:
    patch = "tests.simulated_gpu.patches:log_order_of_uneven_experts"
    found = kernels(tmp_path, "100", *MXFP8, "--parallel.tp=2", "--parallel.ep=4", world=4, patch=patch)
    assert grouped(found) == found["triton_scale_swizzle_M_groups"] > 0


@pytest.mark.parametrize("capability", ["90", "100"])
def test_blockwise_multiplies_on_hopper_and_blackwell(tmp_path: Path, capability: str) -> None:
    found = kernels(tmp_path, capability, "--precision.float8=blockwise", "--precision.float8_emulate=false")
    assert any("triton_fp8_gemm_1x128_128x1_kernel" in name for name in found) == (capability == "100"), (
        sorted(found)
    )


def test_a_gpu_without_kernels_emulates(tmp_path: Path) -> None:
    found = kernels(tmp_path, "90", "--precision.float8=mxfp8")
    assert not any("swizzle" in name for name in found)


def test_fsdp2_gathers_codes(tmp_path: Path) -> None:
    """With --precision.float8_all_gather=true; refused if no weight can be gathered in float8."""
    options = (
        "--precision.float8=mxfp8",
        "--precision.float8_all_gather=true",
        "--precision.float8_emulate=false",
    )
    found = kernels(tmp_path, "100", *options, world=4)
    assert found["cublasLtMatmul"]
