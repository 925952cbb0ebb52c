"""Lion over shards: its formula, exact skips, and equality with one process on any layout."""

from __future__ import annotations

import pytest
import torch

from forge.config import parse_toml_text
from forge.optim.lion import Lion
from forge.shard import Shard
from tests.support.equivalence import tiny_config
from tests.support.runs import FLOAT64, Run

GO, SKIP = torch.tensor(0.0), torch.tensor(1.0)
SHAPES = {"layers.0.attention.wq.weight": (8, 6), "norm.weight": (6,)}
LION = ["--optimizer.name=lion", "--optimizer.betas=[0.9,0.99]"]


def make(dtype: torch.dtype, moments: str = "float32") -> tuple[list[Shard], Lion]:
    keys = (
        f'[optimizer]\nname = "lion"\nbetas = [0.9, 0.99]\nweight_decay = 0.5\nmoment_dtype = "{moments}"\n'
    )
    generator = torch.Generator().manual_seed(0)
    shards = []
    for name, shape in SHAPES.items():
        parameter = torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype))
        parameter.grad = torch.randn(shape, generator=generator).to(dtype)
        shards.append(Shard.whole(name, parameter))
    return shards, Lion(shards, parse_toml_text(tiny_config() + keys).optimizer)


def test_three_steps_by_the_formula() -> None:
    shards, lion = make(torch.float64)
    weights = [shard.data.clone() for shard in shards]
    means = [torch.zeros_like(weight) for weight in weights]
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        for number, (shard, decay) in enumerate(zip(shards, (0.5, 0.0), strict=True)):
            grad = torch.randn(shard.global_shape, generator=generator, dtype=torch.float64)
            shard.parameter.grad = grad
            sign = (0.9 * means[number] + 0.1 * grad).sign()
            weights[number] -= 0.1 * (sign + decay * weights[number])
            means[number] = 0.99 * means[number] + 0.01 * grad
        lion.step(0.1, GO)
    for shard, weight in zip(shards, weights, strict=True):
        torch.testing.assert_close(shard.data, weight, rtol=0, atol=1e-14)
    for (_, _, values), mean in zip(lion.tensors(), means, strict=True):
        torch.testing.assert_close(values, mean, rtol=0, atol=1e-14)


def test_gradients_of_rounding_size_do_not_move_a_weight() -> None:
    """Layouts sum such a gradient in different orders, so its sign is arbitrary and its size is that of rounding."""
    moved = []
    for seed in (0, 1):
        shards, lion = make(torch.float64)
        before = shards[1].data.clone()
        generator = torch.Generator().manual_seed(seed)
        shards[1].parameter.grad = 1e-17 * torch.randn(6, generator=generator, dtype=torch.float64)
        lion.step(0.1, GO)
        moved.append(shards[1].data - before)
    assert all(change.abs().max() < 1e-9 for change in moved)
    assert not torch.equal(moved[0], moved[1])


@pytest.mark.parametrize("moments", ["float32", "bfloat16"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_skipped_step_keeps_every_bit_despite_nan_gradients(dtype: torch.dtype, moments: str) -> None:
    shards, lion = make(dtype, moments)
    lion.step(0.1, GO)
    everything = [*(shard.data for shard in shards), *(values for *_, values in lion.tensors())]
    before = [values.clone() for values in everything]
    for shard in shards:
        shard.parameter.grad.fill_(torch.nan)
    lion.step(0.1, SKIP)
    assert all(torch.equal(old, new) for old, new in zip(before, everything, strict=True))
    assert lion.state() == {"updates": 1}


def test_a_run_moved_to_another_engine_keeps_the_curve_of_one_process(tmp_path) -> None:
    options = [*FLOAT64, *LION, "--optimizer.lr=1e-3"]
    whole, moved = Run(tmp_path / "whole", *options), Run(tmp_path / "moved", *options)
    assert whole() == 0
    assert moved("--train.steps=5", world=2) == 0
    assert moved("--parallel.data_parallel=zero1", world=2) == 0
    for a, b in zip(whole.metrics(), moved.metrics(), strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=0, abs=1e-9)
    assert whole.losses()[-1] < whole.losses()[0] - 0.1
