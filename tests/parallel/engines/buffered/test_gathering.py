"""Every forward, in training and evaluation, uses the parameters of the last update."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from benchmarks.collectives import collectives_of
from forge.config import parse_toml_text
from forge.optim import build_optimizer
from tests.support.buffers import ALONE, ENGINES, SMALL, backward, build, engine_config
from tests.support.harness import run_ranks
from tests.support.layouts import slow_unless

LR = 1e-1
BFLOAT16 = ("float32", "bfloat16", "float32")


def _update(model: Any, engine: Any, batch: Any) -> None:
    backward(model, batch)
    for shard in model.shards:
        shard.data.sub_(LR * shard.grad)
    model.after_update()
    model.zero_gradients()


def _losses(rank: int, world: int, text: str, backwards: bool = False) -> list[float]:
    """Return losses of training and evaluation in turn. backwards: forward runs the blocks in reverse order."""
    model, engine, batches = build(text, world)
    if backwards:
        model.parts[0].trunk.reverse()
    found = []
    for _ in range(3):
        batch = next(batches)
        found.append(model.evaluate(batch).cross_entropy.item())
        _update(model, engine, batch)
        found.append(model.evaluate(batch).cross_entropy.item())
        found.append(model.logits(batch.tokens[:1] * 0 + 5).double().sum().item())
    return found


@pytest.mark.parametrize(
    ("engine", "keys"),
    [
        pytest.param(engine, keys, marks=slow_unless(engine == ("zero1" if keys else "zero2")))
        for engine in ENGINES
        for keys in ("", "\noverlap_parameters = false")
    ],
)
def test_evaluation_between_steps_sees_new_parameters(engine: str, keys: str) -> None:
    expected = run_ranks(_losses, 1, engine_config("fsdp2", ALONE))[0]
    for found in run_ranks(_losses, 2, engine_config(engine, SMALL + keys)):
        assert found == pytest.approx(expected, rel=1e-12)
    assert expected[0] > expected[1], "nothing is learnt, so nothing is seen"


def test_forward_may_use_parameters_in_another_order_than_the_buffers_have() -> None:
    expected = run_ranks(_losses, 1, engine_config("fsdp2", ALONE), True)[0]
    assert expected != pytest.approx(run_ranks(_losses, 1, engine_config("fsdp2", ALONE))[0], rel=1e-6)
    for found in run_ranks(_losses, 2, engine_config("zero1", SMALL), True):
        assert found == pytest.approx(expected, rel=1e-12)


def _gathers(rank: int, world: int, text: str) -> tuple[list[int], int]:
    """Return the all-gathers of an update, of the wait for it, of another wait, of a forward; and the number of buckets."""
    model, engine, batches = build(text, world)
    _update(model, engine, next(batches))
    engine.finish_parameter_sync()
    batch = next(batches)
    calls = (
        model.after_update,
        engine.finish_parameter_sync,
        engine.finish_parameter_sync,
        lambda: model.evaluate(batch),
    )
    counted = [collectives_of(call).number().get("all_gather", 0) for call in calls]
    return counted, sum(len(buffer.buckets) for buffer in engine.buffers)


@pytest.mark.parametrize("keys", ["", "\noverlap_parameters = false"])
def test_an_update_launches_all_buckets_and_nothing_is_gathered_twice(keys: str) -> None:
    for counted, buckets in run_ranks(_gathers, 2, engine_config("zero1", SMALL + keys, formats=BFLOAT16)):
        assert buckets > 5 and counted == [buckets, 0, 0, 0]


def test_with_masters_inside_the_buckets_the_next_forward_launches_the_gathers() -> None:
    for counted, buckets in run_ranks(_gathers, 2, engine_config("zero1", SMALL)):
        assert buckets > 5 and counted == [0, buckets, 0, 0]


def _first_copy(rank: int, world: int, text: str) -> list[float]:
    """Write different values to each rank's shards; return this rank's compute values."""
    model, engine, batches = build(text, world)
    for shard in model.shards:
        shard.data.fill_(rank + 1.0)
    engine.finish_parameter_sync()
    values = torch.cat([p.detach().reshape(-1) for p in model.parts[0].parameters()])
    return sorted(set(values.tolist()))


@pytest.mark.parametrize("engine", ENGINES)
def test_all_replicas_start_with_the_first_replicas_values(engine: str) -> None:
    keys = "dp_replicate = 2\ndp_shard = 2" + SMALL
    expected = [1.0] if engine == "ddp" else [1.0, 2.0]
    assert run_ranks(_first_copy, 4, engine_config(engine, keys)) == [expected] * 4


def _loaded(rank: int, world: int, text: str) -> list[float]:
    """Return losses after writes to the shards: before the first forward, between steps, and during a gather."""
    model, engine, batches = build(text, world)
    batch, found = next(batches), []
    for value in (0.01, 0.02):
        for shard in model.shards:
            shard.data.fill_(value)
        model.after_update()
        found.append(model.evaluate(batch).cross_entropy.item())
        _update(model, engine, batch)
    return found


@pytest.mark.parametrize("engine", ENGINES)
def test_forward_computes_with_values_loaded_into_the_shards(engine: str) -> None:
    expected = run_ranks(_loaded, 1, engine_config("fsdp2", ALONE))[0]
    for found in run_ranks(_loaded, 2, engine_config(engine, SMALL)):
        assert found == pytest.approx(expected, rel=1e-12)


def _loaded_at_once(rank: int, world: int, text: str) -> list[str]:
    """Write to the shards right after an update, while the other rank is late; return names of shards with lost values."""
    model, engine, batches = build(text, world)
    _update(model, engine, next(batches))
    model.evaluate(next(batches))
    if rank == 1:
        time.sleep(0.3)  # time for rank 0's launches
    model.after_update()
    for shard in model.shards:
        shard.data.fill_(0.02)
    engine.finish_parameter_sync()
    return [shard.name for shard in model.shards if not bool((shard.data == 0.02).all())]


@pytest.mark.parametrize(
    ("engine", "formats"),
    [
        pytest.param(engine, formats, marks=slow_unless((engine == "zero1") == (formats == BFLOAT16)))
        for engine in ("zero1", "zero2")
        for formats in (("float64",) * 3, BFLOAT16)
    ],
)
def test_values_loaded_right_after_an_update_are_not_overwritten(engine: str, formats) -> None:
    assert run_ranks(_loaded_at_once, 2, engine_config(engine, SMALL, formats=formats)) == [[], []]


def _moved(rank: int, world: int, text: str) -> tuple[float, float]:
    """Return the distance from 1 of a norm weight's master and of its bfloat16 copy, after steps lost in bfloat16."""
    model, engine, batches = build(text, world)
    optimizer = build_optimizer(model.shards, parse_toml_text(text).optimizer)
    for _ in range(3):
        backward(model, next(batches))
        optimizer.step(1e-3, torch.zeros(()))
        model.after_update()
        model.zero_gradients()
    engine.finish_parameter_sync()
    shard = next(s for s in model.shards if s.name == "norm.weight")
    computed = model.parts[0].norm.weight.detach().float()
    masters = (shard.data - 1).abs().max().item() if shard.boxes else 0.0
    return masters, (computed - 1).abs().max().item()


@pytest.mark.parametrize(
    "engine", [pytest.param(engine, marks=slow_unless(engine == "zero1")) for engine in ENGINES]
)
def test_masters_in_float32_keep_updates_lost_in_bfloat16(engine: str) -> None:
    text = engine_config(engine, SMALL, formats=BFLOAT16)
    results = run_ranks(_moved, 2, text)
    assert 1e-3 < max(masters for masters, _ in results) < 2**-8
    assert all(computed in (0.0, 2**-8) for _, computed in results)
