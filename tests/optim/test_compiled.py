"""The compiled update equals the separate operators, in one pass over each tensor."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from forge.config import load_config, parse_toml_text
from forge.config.layout import Compile
from forge.config.schema import OptimizerConfig
from forge.optim import build_optimizer
from forge.optim.adamw import AdamW
from forge.optim.compiled import CompiledAdamW, update_elements
from forge.optim.optimizer import with_scales
from forge.runtime.errors import UserError
from forge.shard import Box, Shard
from tests.support.equivalence import tiny_config

SHAPES = {
    "layers.0.attention.wq.weight": (24, 16),
    "layers.0.experts.w2": (3, 8, 16),
    "norm.weight": (16,),
    "layers.0.scale": (),
}


@pytest.fixture(autouse=True)
def no_graphs_of_other_tests() -> None:
    torch._dynamo.reset()


GO, SKIP = torch.tensor(0.0), torch.tensor(1.0)


def config_of(moments: str) -> OptimizerConfig:
    groups = 'groups = [{names = ["*.wq.weight"], lr_scale = 0.5, weight_decay = 2.0}]'
    keys = f'[optimizer]\nweight_decay = 0.5\nmoment_dtype = "{moments}"\n{groups}\n'
    return parse_toml_text(tiny_config() + keys).optimizer


def make(
    dtype: torch.dtype, moments: str, backend: str = "", narrow: bool = False
) -> tuple[list[Shard], AdamW]:
    config = config_of(moments)
    generator = torch.Generator().manual_seed(0)
    shards = []
    for name, shape in SHAPES.items():
        parameter = torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype))
        shards.append(Shard.whole(name, parameter))
    if backend:
        return shards, compiled(shards, config, backend, narrow)
    return shards, AdamW(with_scales(shards, config), config)


def compiled(
    shards: list[Shard], config: OptimizerConfig, backend: str, narrow: bool = False
) -> CompiledAdamW:
    """Return shards and a compiled optimizer. backend: "plain" skips the slow compiler. narrow: with bfloat16 copies."""
    chosen = Compile(optimizer=True, backend="eager" if backend == "plain" else backend)
    copies = {s.parameter: torch.zeros_like(s.data, dtype=torch.bfloat16) for s in shards} if narrow else {}
    optimizer = CompiledAdamW(with_scales(shards, config), config, None, chosen, copies)
    if backend == "plain":
        optimizer._kernel = update_elements
    return optimizer


def give(shards: list[Shard], seed: int, scale: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for shard in shards:
        values = torch.randn(shard.parameter.shape, generator=generator)
        shard.parameter.grad = (scale * values).to(shard.parameter.dtype)


def everything(shards: list[Shard], optimizer: AdamW) -> list[torch.Tensor]:
    copies = [values.clone() for values in getattr(optimizer, "copies", {}).values()]
    return [s.data.clone() for s in shards] + [t.clone() for _, _, t in optimizer.tensors()] + copies


FORMATS = [("float64", "float32"), ("float32", "float32"), ("float32", "bfloat16"), ("bfloat16", "bfloat16")]
# Relative to a parameter's size. float32: two units in the last place, because operations are fused differently.
TOLERANCES = {"float64": 1e-13, "float32": 2.5e-7, "bfloat16": 2.0**-8}


def agree(storage: str, moments: str, backend: str) -> None:
    dtype = getattr(torch, storage)
    plain, one = make(dtype, moments)
    ours, other = make(dtype, moments, backend)
    for step in range(4):
        for shards in (plain, ours):
            give(shards, step)
        one.step(0.01, SKIP if step == 2 else GO)
        other.step(0.01, SKIP if step == 2 else GO)
    assert one.state() == other.state() == {"updates": 3}
    for mine, theirs in zip(everything(ours, other), everything(plain, one), strict=True):
        narrow = mine.dtype == torch.bfloat16  # a value at a rounding boundary may go to the neighbour
        tolerance = TOLERANCES["bfloat16" if narrow else storage]
        torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("storage", "moments"), FORMATS)
def test_the_update_equals_the_fused_kernel(storage: str, moments: str) -> None:
    agree(storage, moments, "plain")


@pytest.mark.long
def test_a_traced_update_equals_the_fused_kernel() -> None:
    agree("float32", "bfloat16", "eager")


@pytest.mark.slow
@pytest.mark.compiles
@pytest.mark.processes
@pytest.mark.parametrize(("storage", "moments"), FORMATS)
def test_a_compiled_update_equals_the_fused_kernel(storage: str, moments: str) -> None:
    agree(storage, moments, "inductor")


@pytest.mark.slow
@pytest.mark.compiles
@pytest.mark.processes
def test_the_compiled_update_is_one_kernel_touching_each_tensor_once() -> None:
    from torch._inductor import metrics

    metrics.reset()
    shape, rows, columns = (64, 48), torch.zeros(64, 1, dtype=torch.int32), torch.zeros(48, dtype=torch.int32)
    master, grad = torch.ones(shape), torch.ones(shape)
    narrow = [torch.zeros(shape, dtype=torch.bfloat16) for _ in range(3)]
    noise, numbers = (rows, columns, rows.clone(), columns.clone()), torch.ones(9)
    with torch.no_grad():
        torch.compile(update_elements, fullgraph=True, dynamic=True)(master, grad, *narrow, noise, numbers)
    assert metrics.generated_kernel_count == 1  # one loop over the elements


@pytest.mark.parametrize(("storage", "moments"), FORMATS)
def test_a_skipped_step_keeps_every_bit_despite_nan_gradients(storage: str, moments: str) -> None:
    shards, optimizer = make(getattr(torch, storage), moments, "plain", narrow=True)
    give(shards, 0)
    optimizer.step(0.1, GO)
    before = everything(shards, optimizer)
    give(shards, 1, torch.nan)
    optimizer.step(0.1, SKIP)
    for old, new in zip(before, everything(shards, optimizer), strict=True):
        assert torch.equal(old, new)
    assert optimizer.state() == {"updates": 1}


def test_gradients_are_scaled_as_they_are_read_once() -> None:
    scaled, one = make(torch.float64, "float32", "plain")
    plain, other = make(torch.float64, "float32", "plain")
    for step, factor in enumerate((0.25, 1.0)):
        give(scaled, step)
        give(plain, step, factor)
        if factor != 1.0:
            one.scale_by(torch.tensor(factor, dtype=torch.float64))
        one.step(0.1, GO)
        other.step(0.1, GO)
    for mine, theirs in zip(everything(scaled, one), everything(plain, other), strict=True):
        assert torch.equal(mine, theirs)


def test_the_compute_copy_is_written() -> None:
    shards, optimizer = make(torch.float32, "bfloat16", "plain", narrow=True)
    give(shards, 0)
    optimizer.step(0.1, GO)
    for shard in shards:
        assert torch.equal(optimizer.copies[shard.parameter], shard.data.bfloat16())


def test_muon_compiles_the_update_of_all_non_matrices() -> None:
    found = []
    for chosen in (None, Compile(optimizer=True, backend="eager")):
        shards = [
            replace(s, kind="expert") if ".experts." in s.name else s
            for s in make(torch.float64, "float32")[0]
        ]
        copies = {s.parameter: torch.zeros_like(s.data, dtype=torch.bfloat16) for s in shards}
        config = config_of("float32").model_copy(update={"name": "muon", "ema": 0.9})
        optimizer = build_optimizer(shards, config, compiled=chosen, copies=copies)
        for step in range(3):
            give(shards, step)
            optimizer.step(0.1, SKIP if step == 1 else GO)
        assert optimizer.state()["updates"] == 2
        found.append(
            {s.name: s.data for s in shards} | {f"{s.name} {n}": x for n, s, x in optimizer.tensors()}
        )
    written = {s.name for s in shards if s.parameter in optimizer.copies}
    assert written == {"norm.weight", "layers.0.scale"}
    assert all(torch.equal(copies[s.parameter], s.data.bfloat16()) for s in shards if s.name in written)
    assert found[0].keys() == found[1].keys()
    for name, values in found[0].items():
        torch.testing.assert_close(found[1][name], values, rtol=1e-13, atol=1e-13, msg=name)


def test_a_part_is_updated_as_in_the_whole() -> None:
    name, shape = "layers.0.attention.wq.weight", SHAPES["layers.0.attention.wq.weight"]
    shards, optimizer = make(torch.float32, "bfloat16", "plain")
    whole = shards[0]
    # A slice of the flattened parameter: the end of a row, whole rows, the beginning of a row.
    boxes = (Box((3, 10), (1, 6)), Box((4, 0), (9, 16)), Box((13, 0), (1, 5)))
    inside = slice(3 * 16 + 10, 13 * 16 + 5)
    part = Shard(name, torch.Size(shape), boxes, torch.nn.Parameter(whole.data.flatten()[inside].clone()))
    config = config_of("bfloat16")
    other = compiled([part], config, "plain")
    for step in range(3):
        give(shards, step)
        part.parameter.grad = whole.parameter.grad.flatten()[inside].clone()
        optimizer.step(0.01, GO)
        other.step(0.01, GO)
    assert torch.equal(part.data, whole.data.flatten()[inside])
    for slot in ("exp_avg", "exp_avg_sq"):
        of_whole = optimizer.moments.stored[slot, name]
        assert torch.equal(other.moments.stored[slot, name], of_whole.flatten()[inside])


@pytest.mark.parametrize(
    ("key", "message"),
    [
        (
            "--optimizer.name=lion",
            r"compile.optimizer .*needs optimizer.name = adamw or muon, but it is lion",
        ),
        (
            "--optimizer.moment_dtype=int8",
            r"compile.optimizer .*does not work with optimizer.moment_dtype = int8",
        ),
    ],
)
def test_an_uncompilable_optimizer_is_refused(key: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_config(["--config=debug.toml", "--compile.optimizer=true", key])


def test_a_copy_of_a_clipped_bias_is_clipped() -> None:
    name = "layers.0.attention.wq.bias"
    shards = [
        Shard.whole(one, torch.nn.Parameter(torch.ones(size)))
        for one, size in ((name, (8,)), ("layers.0.attention.wo.weight", (8, 4)))
    ]
    config = parse_toml_text(tiny_config() + '[optimizer]\nname = "muon"\n[optimizer.muon]\nqk_clip = 50.0\n')
    copies = {s.parameter: s.data.to(torch.bfloat16) for s in shards}
    optimizer = build_optimizer(
        shards, config.optimizer, None, Compile(optimizer=True, backend="eager"), copies
    )
    largest = torch.tensor([10.0, 200.0, 20.0, 30.0]).double()
    optimizer.bound_logits({name: (largest, torch.ones(2))})
    give(shards, 0)
    optimizer.step(1e-3, GO)
    assert shards[0].data[2] < 0.3
    assert torch.equal(copies[shards[0].parameter], shards[0].data.to(torch.bfloat16))
