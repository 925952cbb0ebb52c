"""AdamW over shards: PyTorch's numbers, exact skips, narrow moments."""

import pytest
import torch

from forge.config import parse_toml_text
from forge.optim.adamw import AdamW
from forge.shard import Box, Shard
from tests.support.equivalence import tiny_config

NAMES = {
    "layers.0.attention.wq.weight": (6, 4),
    "layers.0.attention_norm.weight": (4,),
    "embedding.weight": (9, 4),
}


def make(dtype=torch.float32, seed=0, **optimizer):
    lines = "\n".join(f"{key} = {value}" for key, value in optimizer.items())
    config = parse_toml_text(tiny_config() + f"[optimizer]\nweight_decay = 0.5\n{lines}\n")
    generator = torch.Generator().manual_seed(seed)
    shards = []
    for name, shape in NAMES.items():
        parameter = torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype))
        parameter.grad = torch.randn(shape, generator=generator).to(dtype)
        shards.append(Shard(name, torch.Size(shape), (Box((0,) * len(shape), shape),), parameter))
    return shards, AdamW(shards, config.optimizer), config.optimizer


GO, SKIP = torch.tensor(0.0), torch.tensor(1.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equals_torch_adamw_with_decay_on_matrices_only(dtype) -> None:
    shards, optimizer, options = make(dtype)
    copies = [s.parameter.detach().clone().requires_grad_() for s in shards]
    groups = [{"params": copies[:1], "weight_decay": 0.5}, {"params": copies[1:], "weight_decay": 0.0}]
    theirs = torch.optim.AdamW(groups, betas=options.betas, eps=options.eps, fused=True)
    for step in range(4):
        for copy, shard in zip(copies, shards, strict=True):
            copy.grad = shard.parameter.grad.clone()
        for group in theirs.param_groups:
            group["lr"] = 0.1 / (step + 1)
        theirs.step()
        optimizer.step(0.1 / (step + 1), GO)
    for copy, shard in zip(copies, shards, strict=True):
        assert torch.equal(copy, shard.parameter), shard.name


@pytest.mark.parametrize("moment_dtype", ['"float32"', '"bfloat16"', '"int8"'])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_skipped_step_keeps_every_bit_despite_nan_gradients(moment_dtype: str, dtype) -> None:
    shards, optimizer, _ = make(dtype, moment_dtype=moment_dtype)
    optimizer.step(0.1, GO)
    before = [t.clone() for t in everything(shards, optimizer)]
    for shard in shards:
        shard.parameter.grad.fill_(torch.nan)
    optimizer.step(0.1, SKIP)
    for old, new in zip(before, everything(shards, optimizer), strict=True):
        assert torch.equal(old, new)
    assert optimizer.state() == {"updates": 1}


def test_bfloat16_moments_stay_close_to_float32_ones() -> None:
    wide_shards, wide, _ = make()
    narrow_shards, narrow, _ = make(moment_dtype='"bfloat16"')
    for _ in range(5):
        wide.step(0.01, GO)
        narrow.step(0.01, GO)
    assert narrow.moments.stored["exp_avg", "embedding.weight"].dtype == torch.bfloat16
    for a, b in zip(wide_shards, narrow_shards, strict=True):
        assert not torch.equal(a.parameter, b.parameter)
        # bfloat16 has 8 bits: each of 5 steps of 0.01 is off by at most about 2 * 2^-8.
        torch.testing.assert_close(a.parameter, b.parameter, rtol=0, atol=5 * 0.01 * 2 * 2**-8)


@pytest.mark.long
def test_a_bfloat16_second_moment_follows_shrinking_gradients() -> None:
    # Per step it changes by 0.001 of its value, at most half of bfloat16's last bit. Rounded to nearest, it would stay 0.26.
    shape = (64, 32)
    parameter = torch.nn.Parameter(torch.zeros(shape))
    shard = Shard.whole("wq.weight", parameter)
    lines = '[optimizer]\nbetas = [0.9, 0.999]\nmoment_dtype = "bfloat16"\n'
    optimizer = AdamW([shard], parse_toml_text(tiny_config() + lines).optimizer)
    for step in range(1000):
        parameter.grad = torch.full(shape, 1.0 if step < 300 else 0.1)
        optimizer.step(0.0, GO)
    exact = 0.999**700 * (1 - 0.999**300) + 0.01 * (1 - 0.999**700)
    moment = optimizer.moments.stored["exp_avg_sq", "wq.weight"].double()
    assert exact == pytest.approx(0.1337, abs=1e-4)
    assert moment.mean().item() == pytest.approx(exact, rel=0.01)
    assert moment.std().item() < 0.1 * exact


@pytest.mark.parametrize("moment_dtype", ['"float32"', '"bfloat16"', '"int8"'])
def test_loading_the_state_continues_exactly(moment_dtype: str) -> None:
    shards, optimizer, _ = make(moment_dtype=moment_dtype)
    optimizer.step(0.1, GO)
    others, restored, _ = make(seed=1, moment_dtype=moment_dtype)
    for (_, _, mine), (_, _, theirs) in zip(restored.tensors(), optimizer.tensors(), strict=True):
        mine.copy_(theirs)
    for mine, theirs in zip(others, shards, strict=True):
        mine.data.copy_(theirs.data)
        mine.parameter.grad = theirs.parameter.grad.clone()
    restored.load_state(optimizer.state())
    optimizer.step(0.1, GO)
    restored.step(0.1, GO)
    for mine, theirs in zip(everything(others, restored), everything(shards, optimizer), strict=True):
        assert torch.equal(mine, theirs)


def everything(shards, optimizer):
    return [s.data for s in shards] + [t for _, _, t in optimizer.tensors()]
