"""AdamW on flat slices equals AdamW on whole parameters, to one unit in the last place."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from forge.config import parse_toml_text
from forge.optim import build_optimizer
from forge.optim.compiled import CompiledAdamW, update_elements
from forge.parallel.step.gradients import clip_gradients, report_gradients
from forge.shard import Shard
from tests.support.buffers import ENGINES, SMALL, build, engine_config
from tests.support.building import optimizer_step
from tests.support.equivalence import whole
from tests.support.harness import run_ranks

FLOAT32 = ("float32", "float32", "float32")
LR = 1e-2


def _global(name: str, shape: torch.Size) -> Tensor:
    generator = torch.Generator().manual_seed(len(name) + sum(map(ord, name)))
    return torch.randn(shape, generator=generator) * 10.0 ** torch.randint(-6, 2, shape, generator=generator)


def _fill_gradient(shard: Shard, gradient: Tensor) -> None:
    if shard.grad is None:
        shard.parameter.grad = torch.zeros_like(shard.parameter)
    for box, piece in shard.pieces(shard.grad):
        piece.copy_(gradient[tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))])


def _stepped(rank: int, world: int, text: str, clip: float) -> dict[str, Tensor]:
    """Return whole parameters and moments after one step from the initial values with given gradients."""
    model, _, _ = build(text, world)
    optimizer = build_optimizer(model.shards, parse_toml_text(text).optimizer)
    for shard in model.shards:
        _fill_gradient(shard, _global(shard.name, shard.global_shape))
    report = report_gradients(model.shards, torch.tensor(1.0), stop=False)
    clip_gradients(model.shards, report.norm, clip)
    optimizer.step(LR, report.skip)
    found = {shard.name: whole(shard, shard.data) for shard in model.shards}
    slots = {f"{shard.name} {slot}": whole(shard, values) for slot, shard, values in optimizer.tensors()}
    return found | slots | {"norm": report.norm}


def _expected(start: dict[str, Tensor], clip: float) -> dict[str, Tensor]:
    """Return the result of PyTorch's fused AdamW on whole parameters, from `start`."""
    config = parse_toml_text(engine_config("fsdp2")).optimizer
    parameters = {name: torch.nn.Parameter(value.clone()) for name, value in start.items()}
    for name, parameter in parameters.items():
        parameter.grad = _global(name, parameter.shape)
    norm = torch.nn.utils.clip_grad_norm_(parameters.values(), clip or float("inf"))
    exempt = [n for n in parameters if n.endswith(("norm.weight", ".bias")) or n == "embedding.weight"]
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for n, p in parameters.items() if n not in exempt]},
            {"params": [parameters[n] for n in exempt], "weight_decay": 0.0},
        ],
        lr=LR,
        betas=config.betas,
        eps=config.eps,
        weight_decay=config.weight_decay,
        fused=True,
    )
    optimizer.step()
    found = {name: parameter.detach() for name, parameter in parameters.items()}
    for name, parameter in parameters.items():
        for slot in ("exp_avg", "exp_avg_sq"):
            found[f"{name} {slot}"] = optimizer.state[parameter][slot]
    return found | {"norm": norm}


def _start(rank: int, world: int, text: str) -> dict[str, Tensor]:
    return {shard.name: whole(shard, shard.data) for shard in build(text, world)[0].shards}


def units_in_the_last_place(actual: Tensor, expected: Tensor) -> int:
    """Return the largest distance in float32 units in the last place."""

    def ordered(x: Tensor) -> Tensor:
        bits = x.contiguous().view(torch.int32).long()
        return torch.where(bits < 0, -(bits & 0x7FFFFFFF), bits)

    return int((ordered(actual) - ordered(expected)).abs().max())


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("engine", ENGINES)
def test_a_step_is_fused_adamw_to_one_unit_in_the_last_place(engine: str, world: int) -> None:
    text = engine_config(engine, SMALL, formats=FLOAT32, batch=12)
    expected = _expected(run_ranks(_start, 1, text)[0], 0.0)
    for found in run_ranks(_stepped, world, text, 0.0):
        assert found.pop("norm").item() == pytest.approx(expected["norm"].item(), rel=1e-6)
        for name, values in found.items():
            assert units_in_the_last_place(values, expected[name]) <= 1, name


@pytest.mark.parametrize(
    "engine",
    [
        pytest.param(one, marks=() if one in ("zero2", "fsdp2") else pytest.mark.slow)
        for one in (*ENGINES, "fsdp2")
    ],
)
def test_bfloat16_moments_are_rounded_the_same_on_any_layout(engine: str) -> None:
    narrow = '\n[optimizer]\nmoment_dtype = "bfloat16"\n'
    expected = run_ranks(_stepped, 1, engine_config("ddp") + narrow, 0.0)[0]
    for found in run_ranks(_stepped, 4, engine_config(engine, f"tp = 2{SMALL}") + narrow, 0.0):
        for name in found.keys() - {"norm"}:
            assert torch.equal(found[name].bfloat16(), expected[name].bfloat16()), name


@pytest.mark.parametrize("keys", ["", "tp = 2\n", "dp_replicate = 2\nshard_optimizer_over = 'dp'\n"])
def test_clipping_counts_every_element_once(keys: str) -> None:
    text = engine_config("zero1", keys + SMALL, formats=FLOAT32)
    expected = _expected(run_ranks(_start, 1, engine_config("zero1", formats=FLOAT32))[0], 0.3)
    for found in run_ranks(_stepped, 4, text, 0.3):
        assert found.pop("norm").item() == pytest.approx(expected["norm"].item(), rel=1e-6)
        for name, values in found.items():
            torch.testing.assert_close(values, expected[name], rtol=1e-5, atol=1e-9, msg=name)


def _decayed(rank: int, world: int, text: str) -> dict[str, bool]:
    """Return whether a step with zero gradients changes each parameter: only weight decay does."""
    model, _, _ = build(text, world)
    optimizer = build_optimizer(model.shards, parse_toml_text(text).optimizer)
    before = {shard.name: whole(shard, shard.data) for shard in model.shards}
    optimizer.step(LR, torch.zeros(()))
    return {
        shard.name: not torch.equal(before[shard.name], whole(shard, shard.data)) for shard in model.shards
    }


@pytest.mark.parametrize("engine", ENGINES)
def test_no_decay_holds_inside_a_bucket(engine: str) -> None:
    text = engine_config(engine, model="attention_bias = true", formats=FLOAT32)
    for decayed in run_ranks(_decayed, 2, text):
        exempt = {name for name, changed in decayed.items() if not changed}
        zero = {n for n in decayed if n.endswith(".bias")}
        assert exempt == {n for n in decayed if n.endswith("norm.weight") or n == "embedding.weight"} | zero


def _skipped(rank: int, world: int, text: str) -> None:
    model, engine, batches = build(text, world)
    optimizer = build_optimizer(model.shards, parse_toml_text(text).optimizer)
    engine.finish_parameter_sync()
    before = [buffer.compute.clone() for buffer in engine.buffers]
    for shard in model.shards:
        shard.grad.fill_(torch.nan)
    report = report_gradients(model.shards, torch.tensor(1.0), stop=False)
    assert report.skip.item() == 1.0
    optimizer.step(LR, report.skip)
    model.after_update()
    model.zero_gradients()
    engine.finish_parameter_sync()
    for buffer, old in zip(engine.buffers, before, strict=True):
        assert torch.equal(buffer.compute, old)
    assert all(not values.any() for _, _, values in optimizer.tensors()) and optimizer.state() == {
        "updates": 0
    }


@pytest.mark.parametrize("engine", ENGINES)
def test_a_skipped_step_changes_nothing(engine: str) -> None:
    run_ranks(_skipped, 2, engine_config(engine, SMALL, formats=("float32", "bfloat16", "float32")))


def _computed_with(rank: int, world: int, text: str, given: bool) -> list[Tensor]:
    """Return the compute weights after two optimizer steps. given: the optimizer writes them itself."""
    model, engine, batches = build(text, world)
    config = parse_toml_text(text)
    copies = model.copies if given else None
    optimizer = build_optimizer(model.shards, config.optimizer, None, config.compile, copies)
    assert isinstance(optimizer, CompiledAdamW)
    optimizer._kernel = update_elements
    memories = [memory for buffer in engine.buffers for memory in buffer.buckets]
    held = [memory for memory in memories if any(shard.boxes for shard in memory.shards)]
    assert all(memory.is_copied(optimizer.copies) == given for memory in held)
    for _ in range(2):
        optimizer_step(model, optimizer, next(batches), LR, max_norm=1.0)
    engine.finish_parameter_sync()
    return [buffer.compute.clone() for buffer in engine.buffers]


def test_weights_written_by_the_optimizer_equal_a_copy_of_the_masters() -> None:
    text = engine_config("zero1", SMALL, formats=("float32", "bfloat16", "float32"))
    text += '\n[compile]\noptimizer = true\nbackend = "eager"\n'
    for found, expected in zip(
        *(run_ranks(_computed_with, 2, text, given) for given in (True, False)), strict=True
    ):
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
