"""Asynchronous tensor parallelism equals one process: the compiler's rewritten products, computed by their CPU twins."""

from collections import Counter
from unittest import mock

import pytest
import torch
import torch._inductor.config
from torch.distributed import _symmetric_memory as memory

from tests.support.equivalence import RankRecord, assert_equal, layout_on_rank, reference, tiny_config
from tests.support.harness import run_ranks

pytestmark = [pytest.mark.compiles, pytest.mark.processes, pytest.mark.slow]

ASYNCHRONOUS = "async_tp = true\nsequence_parallel = true\n"
COMPILED = '[compile]\nenabled = true\nloss = true\nbackend = "inductor"\n'
TWINS = ("fused_all_gather_matmul", "fused_matmul_reduce_scatter")


def text(variant: str, parallel: str, more: str = "") -> str:
    return tiny_config(parallel=parallel, model=variant, micro=2).replace("n_kv_heads = 2\n", "") + more


def on_rank(rank: int, world: int, config: str) -> tuple[RankRecord, dict[str, int]]:
    """Train with products rewritten for symmetric memory. Return the record, and the calls of each fused product."""
    calls: Counter[str] = Counter()
    library = torch.library.Library("symm_mem", "IMPL")
    for name in TWINS:
        library.impl(name, _counted(name, calls), "CPU")
    pipelined = torch._inductor.config.patch(_micro_pipeline_tp=True)
    needs_no_gpu = mock.patch("forge.parallel.tensor.apply._overlap_collectives")
    # The compiler rewrites nothing in a build without NCCL.
    has_nccl = mock.patch("torch.distributed.is_nccl_available", return_value=True)
    with memory._test_mode(), pipelined, has_nccl, needs_no_gpu as asked:
        record = layout_on_rank(rank, world, config)
    assert asked.called
    return record, dict(calls)


def _counted(name: str, calls: Counter[str]):
    """Return PyTorch's own definition of the fused product `name`: the plain collective and the plain product."""
    twin = getattr(memory, f"_{name}_fallback")

    def counted(*arguments, **options):
        calls[name] += 1
        return twin(*arguments, **options)

    return counted


@pytest.mark.parametrize(
    ("world", "parallel", "more"),
    [
        (2, "tp = 2\n", ""),
        (2, "tp = 2\n", '[activation_checkpoint]\nmode = "full"\n'),
        (4, "tp = 2\ndp_shard = 2\n", ""),
        (4, "tp = 4\n", '[activation_checkpoint]\nmode = "selective"\n'),
    ],
    ids=["two", "recomputed", "fsdp", "four"],
)
def test_rewritten_products_train_as_one_process(world: int, parallel: str, more: str) -> None:
    variant = "n_kv_heads = 4\n"
    found = run_ranks(on_rank, world, text(variant, parallel + ASYNCHRONOUS, COMPILED + more))
    for name in TWINS:
        assert all(calls.get(name, 0) for _, calls in found), f"no product became {name}"
    assert_equal([record for record, _ in found], reference(text(variant, "")))
