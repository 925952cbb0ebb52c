"""Data parallelism equals one process: every degree, with replicas, with accumulation."""

import functools

import pytest

from tests.support.equivalence import WholeRecord, assert_equal, layout, reference, tiny_config

VARIANTS = {
    "plain": "",
    "tied": "tie_embeddings = true",
    "everything": "qk_norm = true\nattention_bias = true\nsliding_window = 24\nlogit_soft_cap = 5.0\n",
}


@functools.cache
def expected(variant: str) -> WholeRecord:
    return reference(tiny_config(model=VARIANTS[variant]))


def check(world: int, parallel: str = "", variant: str = "plain", micro: int = 1) -> None:
    assert_equal(
        layout(tiny_config(parallel=parallel, model=VARIANTS[variant], micro=micro), world), expected(variant)
    )


@pytest.mark.parametrize("micro", [8, 4, 2])
def test_accumulation_over_1_2_and_4_microbatches_on_one_process(micro: int) -> None:
    check(1, micro=micro)


@pytest.mark.parametrize("world", [2, 4, pytest.param(8, marks=pytest.mark.slow)])
def test_fsdp(world: int) -> None:
    check(world)


@pytest.mark.parametrize("micro", [4, 2, 1])
def test_fsdp_with_accumulation(micro: int) -> None:
    check(2, micro=micro)


@pytest.mark.parametrize("micro", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_hsdp_with_accumulation(micro: int) -> None:
    check(4, "dp_replicate = 2\ndp_shard = 2", micro=micro)


def test_replicas_alone() -> None:
    check(2, "dp_replicate = 2\ndp_shard = 1", micro=2)


@pytest.mark.parametrize("variant", [pytest.param("tied", marks=pytest.mark.slow), "everything"])
def test_other_models(variant: str) -> None:
    check(2, variant=variant, micro=2)
    check(4, "dp_replicate = 2\ndp_shard = 2", variant=variant, micro=2)


@pytest.mark.parametrize("reshard", ['"always"', '"never"', "2"])
def test_reshard_after_forward(reshard: str) -> None:
    check(4, f"reshard_after_forward = {reshard}", micro=2)
