"""The real kernels of flash-linear-attention on the simulated GPU: Triton compiles and tunes them, and no step waits."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.simulated_gpu import counting
from tests.simulated_gpu.compiled import environment
from tests.simulated_gpu.needed import simulated_gpu
from tests.support import gpu_variants as variants
from tests.support.runs import Run

pytestmark = [simulated_gpu, pytest.mark.slow, pytest.mark.timeout(1200)]

DOCUMENTS, COMPILED = "--data.document_mask=true", "--compile.enabled=true"
RECOMPUTED, CP = "--activation_checkpoint.mode=full", "--parallel.cp=2"
CASES = {
    "gated delta": ("gated_delta", [], 1),
    "gated delta with documents, compiled": ("gated_delta", [DOCUMENTS, COMPILED], 1),
    "gated delta over cp, recomputed": ("gated_delta", [CP, RECOMPUTED], 2),
    "kimi delta": ("kimi_delta", [], 1),
    "kimi delta with documents, compiled and recomputed": (
        "kimi_delta",
        [DOCUMENTS, COMPILED, RECOMPUTED],
        1,
    ),
    "kimi delta over cp, compiled": ("kimi_delta", [CP, COMPILED], 2),
}
# Each rank tunes all kernels.
TUNING_S = 1000
# A kernel of each rule's forward and of its backward.
KERNELS = {
    "gated_delta": {"chunk_gated_delta_rule_fwd_kernel_h", "chunk_gated_delta_rule_bwd_kernel_dhu"},
    "kimi_delta": {"chunk_kda_fwd_kernel", "chunk_kda_bwd_kernel"},
}


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A cache of Triton for all runs: tuning one rule takes a minute or two."""
    return environment(tmp_path_factory.mktemp("cache"))


@pytest.mark.parametrize("name", CASES)
def test_runs_train_with_the_kernels_of_fla(name: str, tmp_path: Path, tuned: dict[str, str]) -> None:
    kind, options, world = CASES[name]
    run = Run(
        tmp_path, *variants.LINEAR, f"--model.linear_attention.kind={kind}", *options, base=variants.BASE
    )
    ranks = run.start(world=world, patch="tests.simulated_gpu.patches:install_fla", variables=tuned)
    codes = ranks.join(TUNING_S)
    assert codes == [0] * world, run.output()[-4000:]
    counts = counting.read(run.path)
    assert not counts["waits"]
    for kernel in KERNELS[kind]:
        assert any(kernel in launched for launched in counts["kernels"]), sorted(counts["kernels"])
