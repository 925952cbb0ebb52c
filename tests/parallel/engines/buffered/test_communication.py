"""An engine launches one collective per bucket and direction, once per step or per microbatch."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.collectives import collectives_of
from forge.parallel.engines.buffered.buffer import TemporaryBuckets
from forge.runtime import compat
from forge.runtime.errors import UserError
from tests.support.buffers import ENGINES, SMALL, backward, build, engine_config
from tests.support.harness import run_ranks


def _collectives(rank: int, world: int, text: str) -> tuple[list[dict[str, int]], int]:
    """Return the collectives of two steps with an evaluation after each, and the number of buckets."""
    model, engine, batches = build(text, world)
    found = []

    def step(batch: Any) -> None:
        backward(model, batch)
        model.after_update()
        model.zero_gradients()
        model.evaluate(next(batch.microbatches(1)))

    for _ in range(2):
        found.append(collectives_of(functools.partial(step, next(batches))).number())
    return found, sum(len(buffer.buckets) for buffer in engine.buffers)


def collectives(world: int, text: str) -> tuple[dict[str, int], int]:
    """Return a step's collectives, without all-reduces of losses, and the number of buckets."""
    results = run_ranks(_collectives, world, text)
    (first, second), buckets = results[0]
    assert all(result == results[0] for result in results)
    # The first forward also gathers, and broadcasts the first replica's parameters.
    second = Counter(second)
    if world > 1:
        second["all_reduce"] -= 2
    return {name: number for name, number in second.items() if number}, buckets


@pytest.mark.parametrize("engine", ENGINES)
def test_one_process_sends_nothing(engine: str) -> None:
    assert collectives(1, engine_config(engine, SMALL, micro=2))[0] == {}


@pytest.mark.parametrize("microbatches", [1, 4])
def test_ddp_reduces_each_bucket_once_per_step(microbatches: int) -> None:
    counted, buckets = collectives(2, engine_config("ddp", SMALL, micro=4 // microbatches))
    assert buckets > 5 and counted == {"all_reduce": buckets}


@pytest.mark.parametrize("microbatches", [1, 4])
def test_zero1_reduces_and_gathers_each_bucket_once_per_step(microbatches: int) -> None:
    counted, buckets = collectives(2, engine_config("zero1", SMALL, micro=4 // microbatches))
    assert buckets > 5 and counted == {"reduce_scatter": buckets, "all_gather": buckets}


@pytest.mark.parametrize("microbatches", [1, 4])
def test_zero2_reduces_in_each_microbatch_and_gathers_once_per_step(microbatches: int) -> None:
    counted, buckets = collectives(2, engine_config("zero2", SMALL, micro=4 // microbatches))
    assert buckets > 5 and counted == {"reduce_scatter": microbatches * buckets, "all_gather": buckets}


@pytest.mark.parametrize(("size", "buckets"), [('"auto"', 1), ("0", 1), ("1", 30)])
def test_bucket_size_sets_the_number_of_buckets(size: str, buckets: int) -> None:
    counted, found = collectives(2, engine_config("zero1", f"bucket_size = {size}"))
    assert counted == {"reduce_scatter": found, "all_gather": found}
    assert found == buckets


def test_replicas_are_summed_over_once_per_step() -> None:
    replicas = "dp_replicate = 2\ndp_shard = 2" + SMALL
    counted, buckets = collectives(4, engine_config("zero1", replicas))
    assert counted == {"reduce_scatter": buckets, "all_reduce": buckets, "all_gather": buckets}
    counted, buckets = collectives(4, engine_config("zero2", replicas))
    assert counted == {"reduce_scatter": 2 * buckets, "all_reduce": buckets, "all_gather": buckets}
    # With optimizer state also sharded over replicas, a reduce-scatter replaces the all-reduce.
    over = replicas + '\nshard_optimizer_over = "dp"'
    counted, buckets = collectives(4, engine_config("zero1", over))
    assert counted == {"reduce_scatter": 2 * buckets, "all_gather": 2 * buckets}
    counted, buckets = collectives(4, engine_config("zero2", over))
    assert counted == {"reduce_scatter": 3 * buckets, "all_gather": 2 * buckets}


def _bytes(rank: int, world: int, text: str) -> tuple[dict[str, int], int]:
    model, engine, batches = build(text, world)
    batch = next(batches)
    found = collectives_of(functools.partial(backward, model, batch))
    numel = sum(buffer.plan.numel for buffer in engine.buffers)
    return {name: sum(found.sizes(name)) for name in ("all_gather", "reduce_scatter")}, numel


@pytest.mark.parametrize(
    ("engine", "reduce", "width"),
    [
        ("zero1", "float32", 4),
        pytest.param("zero1", "bfloat16", 2, marks=pytest.mark.slow),
        pytest.param("zero2", "float32", 4, marks=pytest.mark.slow),
        ("zero2", "bfloat16", 2),
    ],
)
def test_parameters_are_sent_in_compute_and_gradients_in_reduce(engine: str, reduce: str, width: int) -> None:
    text = engine_config(engine, SMALL, formats=("float32", "bfloat16", reduce), micro=4)
    for sent, numel in run_ranks(_bytes, 2, text):
        assert sent["all_gather"] == pytest.approx(2 * numel, rel=0.02)
        assert sent["reduce_scatter"] == pytest.approx(width * numel, rel=0.02)


def _order(rank: int, world: int, text: str) -> list[str]:
    """Return the order of events: the launch of each bucket, by its first parameter, and the end of backward."""
    model, engine, batches = build(text, world)
    during: list[str] = []
    launch = engine._reduction._launch

    def note(entry) -> None:
        during.append(entry.memory.parameters[0].name)
        launch(entry)

    engine._reduction._launch = note
    start = engine.start_gradient_sync
    engine.start_gradient_sync = lambda: during.append("backward is over") or start()
    backward(model, next(batches))
    return during


@pytest.mark.parametrize("engine", ENGINES)
def test_all_ranks_launch_buckets_during_backward_in_the_same_order(engine: str) -> None:
    results = run_ranks(_order, 2, engine_config(engine, SMALL, micro=4))
    assert results[0] == results[1] and len(results[0]) > 5
    assert results[0][0] == "head.weight" and results[0][-1] == "backward is over"


def test_symmetric_temporary_buckets_are_allocated_once_in_shared_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[Any] = []

    @contextmanager
    def memory(device: torch.device, groups: Any, *, symmetric: bool) -> Iterator[None]:
        allocate = TemporaryBuckets._allocate
        with monkeypatch.context() as patch:
            patch.setattr(TemporaryBuckets, "_allocate", lambda self: asked.append(groups) or allocate(self))
            yield

    monkeypatch.setattr(compat, "communication_memory", memory)
    group: Any = object()
    buckets = TemporaryBuckets([64, 32, 16], torch.device("cpu"), [group])
    assert asked == [[group]] * 2
    addresses = set()
    for _ in range(2):  # a step each
        both = [buckets.acquire(16, torch.float32), buckets.acquire(8, torch.float32)]
        addresses |= {bucket.data_ptr() for bucket in both}
        for bucket in both:
            buckets.release(bucket)
        buckets.free()
    assert len(addresses) == 2 and len(asked) == 2


def test_symmetric_memory_without_multicast_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = SimpleNamespace(supports_tensor_alloc=lambda device: False)
    group: Any = SimpleNamespace(_get_backend=lambda device: backend)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA X")
    with (
        pytest.raises(UserError, match=r"needs GPUs with multicast.*NVIDIA X on this machine does not have"),
        compat.communication_memory(torch.device("cuda", 0), [group], symmetric=True),
    ):
        pass
