"""A norm on a GPU keeps its input, its weight and one number for each row; on a CPU it keeps more."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from forge.config import check_world, parse_toml_text
from forge.tools.plan.attention import norm_on_gpu
from forge.tools.plan.fake import FakeRank, fake_ranks
from tests.support.planning import FULL, SELECTIVE, plan_text


def kept(norm: Any, weight: torch.dtype) -> int:
    """Return the bytes saved for backward by a norm of `[6, 8]` in bfloat16."""
    sizes: list[int] = []

    def pack(values: Tensor) -> Tensor:
        sizes.append(values.nbytes)
        return values

    with FakeTensorMode(), torch.autograd.graph.saved_tensors_hooks(pack, lambda values: values):
        x = torch.empty(6, 8, dtype=torch.bfloat16, requires_grad=True)
        out = norm(x, [8], torch.empty(8, dtype=weight, requires_grad=True), 1e-5)
        assert out.shape == x.shape
        out.sum().backward()
        assert x.grad is not None and x.grad.dtype == x.dtype
    return sum(sizes)


def test_a_fused_norm_keeps_its_input_and_a_number_per_row() -> None:
    fused = kept(norm_on_gpu, torch.bfloat16)
    assert fused == 6 * 8 * 2 + 8 * 2 + 6 * 4
    # CUDA has no kernel for a weight of another dtype.
    several = kept(norm_on_gpu, torch.float32)
    assert kept(F.rms_norm, torch.float32) == several > kept(F.rms_norm, torch.bfloat16) > fused


@pytest.mark.long
@pytest.mark.parametrize("zero_centered", [False, True], ids=["", "zero-centred"])
@pytest.mark.parametrize("recomputation", [FULL, SELECTIVE])
def test_norms_are_recomputed_as_they_were_computed(recomputation: str, zero_centered: bool) -> None:
    text = plan_text().replace("[model]\n", f"[model]\nzero_centered_norms = {str(zero_centered).lower()}\n")
    config = parse_toml_text(f"{text}\n{recomputation}\n")
    assert config.model.zero_centered_norms == zero_centered
    norms = {}
    for card in (True, False):
        with fake_ranks(0, 1):
            rank = FakeRank(config, check_world(config, 1), card=card)
            rank.step(1)
        norms[card] = rank.trace.kept
    assert norms[True] < norms[False]
