"""Every option of sharded data parallelism equals one process."""

import functools
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from forge.parallel.step.gradients import report_gradients
from forge.train.step import compute_gradients
from tests.support.building import built
from tests.support.equivalence import WholeRecord, assert_equal, layout, reference, tiny_config
from tests.support.harness import run_ranks
from tests.support.layouts import slow_unless

VARIANTS = {
    "plain": "",
    "tied": "tie_embeddings = true",
    "experts": "[model.moe]\nn_experts = 4\nexpert_dim = 24",
}
HSDP = "dp_replicate = 2\ndp_shard = 2"


@functools.cache
def expected(variant: str) -> WholeRecord:
    return reference(tiny_config(model=VARIANTS[variant]))


def only(fast: str, values: Iterable[str]) -> list[Any]:
    """Return `values` as test parameters. All but `fast` are slow."""
    return [pytest.param(value, marks=slow_unless(value == fast)) for value in values]


def check(world: int, *parallel: str, variant: str = "plain", micro: int = 1, extra: str = "") -> None:
    text = tiny_config(parallel="\n".join(parallel), model=VARIANTS[variant], micro=micro) + extra
    assert_equal(layout(text, world), expected(variant))


@pytest.mark.parametrize(
    ("world", "parallel"), [(1, ""), (2, ""), (4, HSDP), (2, "dp_replicate = 2\ndp_shard = 1")]
)
def test_deferred_reduction(world: int, parallel: str) -> None:
    check(world, parallel, "defer_gradient_reduction = true")


# Recomputation runs a block's forward again, including FSDP2's hooks around the experts inside.
@pytest.mark.parametrize(
    ("world", "parallel"),
    [(1, ""), (2, "ep = 2"), pytest.param(2, "dp_replicate = 2\ndp_shard = 1", marks=pytest.mark.slow)],
)
def test_experts_sharded_over_no_other_rank_are_freed_in_each_microbatch(world: int, parallel: str) -> None:
    selective = '[activation_checkpoint]\nmode = "selective"\n'
    check(world, parallel, 'reshard_after_forward = "always"', variant="experts", micro=2, extra=selective)


# test_data_parallel.py covers every policy without these options.
POLICIES = ['"always"', '"never"', "2"]


@pytest.mark.parametrize("policy", only('"always"', POLICIES))
def test_deferred_reduction_with_every_reshard_policy(policy: str) -> None:
    check(4, "defer_gradient_reduction = true", f"reshard_after_forward = {policy}")


@pytest.mark.parametrize("variant", only("plain", ["plain", "tied"]))
@pytest.mark.parametrize("prefetch", [0, 2, 9])
def test_prefetch(prefetch: int, variant: str) -> None:
    check(2, f"prefetch = {prefetch}", variant=variant, micro=2)


@pytest.mark.parametrize("policy", only("2", POLICIES))
def test_prefetch_of_a_tied_model_with_every_reshard_policy(policy: str) -> None:
    check(4, "prefetch = 2", f"reshard_after_forward = {policy}", variant="tied")


@pytest.mark.parametrize(("world", "parallel"), [(1, ""), (2, "defer_gradient_reduction = true"), (4, HSDP)])
def test_cpu_offload(world: int, parallel: str) -> None:
    check(world, parallel, "cpu_offload = true")


def test_recomputation_with_prefetch_and_deferred_reduction() -> None:
    recompute = '[activation_checkpoint]\nmode = "selective"\n'
    check(2, "prefetch = 2", "defer_gradient_reduction = true", micro=2, extra=recompute)


def test_pins_change_nothing_in_float64() -> None:
    text = tiny_config(micro=2).replace(
        "[precision]", '[precision]\nfp32_modules = ["layers.*.attention_norm", "head"]'
    )
    assert_equal(layout(text, 2), expected("plain"))


def loss_after_a_change(
    rank: int, world: int, text: str, evaluate_before: bool, train: bool = False
) -> torch.Tensor:
    """Return a batch's loss sums after a write to every shard, like a roll-back's. train: of a training step."""
    whole = built(text, world)
    model, batches = whole.model, whole.batches()
    batch = next(batches)
    batches.close()
    if evaluate_before:
        model.evaluate(batch)
    for shard in model.shards:
        shard.data.mul_(1.5)
    model.after_update()
    return compute_gradients(model, batch).values if train else model.evaluate(batch).values


@pytest.mark.parametrize(
    ("world", "parallel"),
    [
        (2, ""),
        (2, 'reshard_after_forward = "never"'),
        (2, 'data_parallel = "zero1"'),
        (4, "pp = 2"),
        (4, "reshard_after_forward = 2"),
    ],
)
def test_values_loaded_after_an_evaluation_are_used(world: int, parallel: str) -> None:
    text = tiny_config(parallel=parallel)
    for values, fresh in zip(
        *(run_ranks(loss_after_a_change, world, text, before) for before in (True, False)), strict=True
    ):
        assert torch.equal(values, fresh)


def test_a_block_gathered_for_an_evaluation_that_does_not_use_it_is_gathered_again() -> None:
    """The last block prefetches the block of multi-token prediction, which an evaluation does not run."""
    text = tiny_config(parallel="prefetch = 1", model="[model.mtp]\ndepth = 1")
    after, fresh = (
        run_ranks(loss_after_a_change, 2, text, evaluate_before, True) for evaluate_before in (True, False)
    )
    assert all(torch.equal(one, other) for one, other in zip(after, fresh, strict=True))


def norms_with_idle_experts(rank: int, world: int, text: str, twice: bool) -> list[float]:
    """Return the gradient norms of two steps in which experts compute only in the first microbatch.

    twice: call each block twice, and all experts in both microbatches.
    """
    whole = built(text, world)
    model, batches = whole.model, whole.batches()
    calls = 0

    def of_layer(dispatch):
        def skipping(x, experts, weights, compute):
            nonlocal calls
            calls += 1
            return x * weights.sum() if calls % 4 in (3, 0) else dispatch(x, experts, weights, compute)

        return skipping

    layers = model.parts[0].layers
    if twice:
        doubled = [*layers.values(), *layers.values()]
        layers.values = lambda: doubled
    for block in () if twice else layers.values():
        block.feed_forward.dispatch = of_layer(block.feed_forward.dispatch)
    norms = []
    for _ in range(2):
        sums = compute_gradients(model, next(batches))
        norms.append(float(report_gradients(model.shards, sums.objective, stop=False).norm))
        model.zero_gradients()
    batches.close()
    return norms


@pytest.mark.skipif(
    not hasattr(FSDPModule, "set_reduce_scatter_unused_params"), reason="PyTorch 2.11 cannot reduce zeros"
)
@pytest.mark.parametrize("twice", [False, True])
def test_experts_without_a_gradient_in_the_last_microbatch_lose_none(twice: bool) -> None:
    """A dispatcher of one's own may use no expert. Then FSDP2 would leave this step's sums over replicas to the next step."""
    model, layouts = VARIANTS["experts"], (HSDP, 'dp_replicate = 4\ndata_parallel = "ddp"')
    found = [
        run_ranks(norms_with_idle_experts, 4, tiny_config(parallel=one, model=model, micro=1), twice)
        for one in layouts
    ]
    assert found[0] == [pytest.approx(norms, rel=1e-9) for norms in found[1]]
