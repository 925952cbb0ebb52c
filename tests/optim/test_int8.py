"""Int8 moments: blocks of the global tensor under any cut, unbiased rounding, small errors."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from forge.config import load_config, parse_toml_text
from forge.optim.adamw import AdamW
from forge.optim.moments import Int8Moments
from forge.runtime.errors import BAD_CONFIG, UserError
from forge.shard import Box, Shard
from tests.support.checkpoints import cut, rows
from tests.support.equivalence import tiny_config
from tests.support.harness import run_ranks

GO = torch.tensor(0.0)
INT8 = parse_toml_text(tiny_config() + '[optimizer]\nmoment_dtype = "int8"\n').optimizer
FLOAT32 = parse_toml_text(tiny_config()).optimizer
# Rows of whole blocks, with a short last block, and shorter than a block; experts, a vector, a scalar.
SHAPES = [(6, 128), (5, 150), (4, 40), (4, 3, 70), (100,), ()]


def columns(name: str, full: Tensor, rank: int, world: int) -> Shard:
    """Cut a matrix into columns, like tensor parallelism, and any other tensor into rows."""
    if full.dim() != 2:
        return rows(name, full, rank, world)
    begin, end = (full.shape[1] * (rank + i) // world for i in (0, 1))
    return Shard(
        name, full.shape, (Box((0, begin), (full.shape[0], end - begin)),), full[:, begin:end].contiguous()
    )


def index(box: Box) -> tuple[slice, ...]:
    return tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))


CUTS = {"rows": rows, "columns": columns, "slices": cut}


def full(number: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + number)
    return torch.randn(SHAPES[number], generator=generator, dtype=torch.float64) * 10.0**-number


def trained(cuts: str | None, rank: int = 0, world: int = 1) -> tuple[list[Shard], AdamW]:
    def make(number: int, step: int) -> Shard:
        values = full(number, step)
        return CUTS[cuts](f"{number}", values, rank, world) if cuts else Shard.whole(f"{number}", values)

    starts = [make(number, 0) for number in range(len(SHAPES))]
    shards = [replace(shard, parameter=torch.nn.Parameter(shard.data.clone())) for shard in starts]
    optimizer = AdamW(shards, INT8, dist.group.WORLD if world > 1 else None)
    for step in range(1, 4):
        for number, shard in enumerate(shards):
            shard.parameter.grad = make(number, step).data.clone()
        optimizer.step(0.01, GO)
    return shards, optimizer


def _is_whole(rank: int, world: int, cuts: str) -> int:
    """Compare with one process; return the number of cut blocks."""
    mine, optimizer = trained(cuts, rank, world)
    wholes, expected = trained(None)
    for shard, one in zip(mine, wholes, strict=True):
        for box, piece in shard.pieces(shard.data):
            torch.testing.assert_close(piece, one.data[index(box)], rtol=0, atol=1e-12)
    codes = {(slot, shard.name): values for slot, shard, values in expected.tensors()}
    for slot, shard, values in optimizer.tensors():
        for box, piece in shard.pieces(values):
            same = codes[slot, shard.name].view(shard.global_shape)[index(box)]
            torch.testing.assert_close(piece, same, rtol=1e-12, atol=0)
    # After a load, only the saving rank has a block's scale.
    moments = optimizer.moments
    assert isinstance(moments, Int8Moments)
    regions = list(itertools.chain(*moments.regions.values()))
    known = [region.scales.clone() for region in regions]
    for region in regions:
        if not region.saved:
            region.scales.zero_()
    optimizer.load_state({"updates": 3})
    assert all(torch.equal(r.scales, b) for r, b in zip(regions, known, strict=True))
    # Every scale is saved once.
    for slot, shard, values in optimizer.tensors():
        assert values.numel() == sum(box.numel for box in shard.boxes)
        counted = torch.tensor(values.numel())
        dist.all_reduce(counted)
        assert int(counted) == shard.global_shape.numel(), (slot, shard.name)
    return len(moments.maxima)


@pytest.mark.parametrize(("cuts", "some"), [("rows", False), ("columns", True), ("slices", True)])
def test_blocks_belong_to_the_global_tensor_under_any_cut(cuts: str, some: bool) -> None:
    found = run_ranks(_is_whole, 3, cuts)
    assert len(set(found)) == 1
    # A vector's rows are its elements, so cutting rows cuts its blocks too.
    assert (found[0] > 4) == some


def moment(values: Tensor, slot: str, updates: int = 0) -> Tensor:
    shard = Shard.whole("weight", torch.zeros(values.shape))
    moments = Int8Moments([shard], (slot,), None)
    moments.draw(torch.tensor(updates))
    moments.write(shard, slot, values)
    moments.finish()
    return moments.read(shard, slot)


@pytest.mark.long
@pytest.mark.parametrize("slot", ["exp_avg", "exp_avg_sq"])
def test_the_expectation_of_a_rounded_value_is_the_value(slot: str) -> None:
    values = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    values = values if slot == "exp_avg" else values.pow(4)
    found = torch.stack([moment(values, slot, updates) for updates in range(400)])
    # Neighbouring codes differ by at most 1.6 % of a block's maximum. One draw deviates by half of that, a mean of 400 draws
    # by a twentieth of one draw.
    longest = 0.016 * values.abs().amax(1, keepdim=True)
    assert ((found - values).abs() <= longest).all()
    assert ((found.mean(0) - values).abs() <= 4 * longest / 2 / 20).all()


def test_representable_values_are_kept_and_a_positive_second_moment_stays_positive() -> None:
    values = torch.rand(4, 130, generator=torch.Generator().manual_seed(0)).pow(8)
    values[0, :3], values[1] = 1e-30, 0.0
    found = moment(values, "exp_avg_sq")
    assert torch.equal(moment(found, "exp_avg_sq", 1), found)
    assert torch.equal(found > 0, values > 0)
    signed = moment(values - 0.1, "exp_avg")
    assert torch.equal(moment(signed, "exp_avg", 1), signed)


@pytest.mark.long
def test_it_trains_like_float32_with_a_quarter_of_the_memory() -> None:
    target = torch.randn(64, 64, generator=torch.Generator().manual_seed(1))

    def distance(config) -> tuple[float, int]:
        parameter = torch.nn.Parameter(torch.zeros(64, 64))
        optimizer = AdamW([Shard.whole("wq.weight", parameter)], config)
        generator = torch.Generator().manual_seed(2)
        for step in range(200):
            x = torch.randn(16, 64, generator=generator)
            parameter.grad = x.mT @ (x @ (parameter.detach() - target)) / 16
            optimizer.step(0.05 * (1 - step / 200), GO)
        held = sum(values.nbytes for *_, values in optimizer.tensors())
        return (parameter.detach() - target).square().mean().item(), held

    (narrow, bytes_narrow), (wide, bytes_wide) = distance(INT8), distance(FLOAT32)
    assert wide < 0.01 and narrow < 1.2 * wide + 1e-3
    assert bytes_narrow < 0.27 * bytes_wide


@pytest.mark.parametrize("name", ["muon", "lion"])
def test_int8_is_refused_for_other_optimizers(name: str) -> None:
    with pytest.raises(UserError, match=r'"int8" .*needs optimizer.name = adamw, but it is') as caught:
        load_config(["--config=debug", f"--optimizer.name={name}", "--optimizer.moment_dtype=int8"])
    assert caught.value.exit_code == BAD_CONFIG
