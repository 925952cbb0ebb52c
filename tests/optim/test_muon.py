"""Muon over shards: PyTorch's numbers, one matrix per head and per expert, exact skips, options against formulas."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from forge.config import load_config, parse_toml_text
from forge.optim.muon import Muon, orthogonalize_
from forge.runtime.errors import BAD_CONFIG, UserError
from forge.shard import Shard
from tests.support.equivalence import tiny_config

GO, SKIP = torch.tensor(0.0), torch.tensor(1.0)
MATRICES = {
    "layers.0.attention.wq.weight": (8, 6),
    "layers.0.attention.wo.weight": (6, 8),
    "layers.0.feed_forward.w1.weight": (12, 6),
    "layers.1.feed_forward.w1.weight": (12, 6),
}
OTHERS = {
    "embedding.weight": (9, 6),
    "layers.0.attention_norm.weight": (6,),
    "layers.0.attention.wq.bias": (8,),
    "layers.0.feed_forward.router.weight": (4, 6),
    "head.weight": (9, 6),
}
MUON = '[optimizer]\nname = "muon"\nweight_decay = 0.5\nlr = 0.1\n[optimizer.muon]\n'
NORM = {"norm.weight": (6,)}
EXPERTS = {"layers.0.feed_forward.experts.w13": (3, 10, 6)}


def make(
    shapes: dict[str, tuple[int, ...]],
    options: str = "",
    dtype: torch.dtype = torch.float64,
    general: str = "",
) -> tuple[list[Shard], Muon]:
    text = tiny_config() + MUON.replace("[optimizer.muon]", f"{general}\n[optimizer.muon]")
    config = parse_toml_text(f"{text}{options}").optimizer
    generator = torch.Generator().manual_seed(0)
    shards = []
    for name, shape in (shapes | NORM).items():
        parameter = torch.nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype))
        kind = "router" if "router" in name else "expert" if "experts" in name else "dense"
        shards.append(Shard.whole(name, parameter, kind=kind, heads=4 if "wq.weight" in name else 1))
    give_gradients(shards, 0)
    return shards, Muon(shards, config)


def give_gradients(shards: list[Shard], step: int) -> None:
    generator = torch.Generator().manual_seed(1000 + step)
    for shard in shards:
        values = torch.randn(shard.global_shape, generator=generator, dtype=torch.float64)
        shard.parameter.grad = values.to(shard.parameter.dtype)


def trained(shards: list[Shard], optimizer: Muon, steps: int = 3, lr: float = 0.1) -> dict[str, Tensor]:
    for step in range(steps):
        give_gradients(shards, step)
        optimizer.step(lr / (step + 1), GO)
    return {shard.name: shard.data.clone() for shard in shards}


def torchs(adjust: str, nesterov: bool, steps: int, ns_steps: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the parameters after the same steps by torch.optim.Muon and torch.optim.AdamW."""
    shards, _ = make(MATRICES | OTHERS, dtype=dtype)
    of_muon = [shard.parameter for shard in shards if shard.name in MATRICES]
    plain = [s.parameter for s in shards if s.name in ("head.weight", "layers.0.feed_forward.router.weight")]
    rest = [s.parameter for s in shards if all(s.parameter is not p for p in [*of_muon, *plain])]
    options = {"nesterov": nesterov, "adjust_lr_fn": adjust, "ns_steps": ns_steps, "weight_decay": 0.5}
    groups = [{"params": plain, "weight_decay": 0.5}, {"params": rest, "weight_decay": 0.0}]
    optimizers = [
        torch.optim.Muon(of_muon, **options),
        torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True),
    ]
    for step in range(steps):
        give_gradients(shards, step)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = 0.1 / (step + 1)
            optimizer.step()
    return {shard.name: shard.data.clone() for shard in shards}


@pytest.mark.parametrize(
    ("adjust", "nesterov", "ns_steps"), [("original", True, 5), ("match_rms_adamw", False, 3)]
)
def test_equals_torch_muon_and_adamw_in_float64(
    adjust: str, nesterov: bool, ns_steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # PyTorch's iteration casts to bfloat16. Without the cast it uses the gradient's dtype.
    monkeypatch.setattr(Tensor, "bfloat16", Tensor.clone)
    options = f'adjust_lr = "{adjust}"\nnesterov = {str(nesterov).lower()}\nns_steps = {ns_steps}'
    found = trained(*make(MATRICES | OTHERS, options))
    expected = torchs(adjust, nesterov, 3, ns_steps, torch.float64)
    for name, parameter in expected.items():
        torch.testing.assert_close(found[name], parameter, rtol=0, atol=1e-12, msg=name)


def test_iterated_in_bfloat16_it_equals_torch_muon_to_the_rounding_of_the_iteration() -> None:
    shards, optimizer = make(MATRICES, "adjust_lr = 'original'", torch.float32)
    optimizer._dtype = optimizer._matrices._dtype = torch.bfloat16  # as on a GPU
    found, expected = trained(shards, optimizer), torchs("original", True, 3, 5, torch.float32)
    for name, shape in MATRICES.items():
        # An update's elements are below 1.2. bfloat16 has 8 bits, and five iterations lose some of them.
        lrs = (0.1 + 0.05 + 0.1 / 3) * max(1, shape[0] / shape[1]) ** 0.5
        torch.testing.assert_close(found[name], expected[name], rtol=0, atol=lrs * 0.05)


def test_each_expert_is_a_matrix() -> None:
    found = trained(*make(EXPERTS))["layers.0.feed_forward.experts.w13"]
    name, (count, *shape) = next(iter(EXPERTS.items()))
    for expert in range(count):
        (single, _), optimizer = make({"layers.0.feed_forward.w1.weight": tuple(shape)})
        full, _ = make(EXPERTS)
        single.data.copy_(full[0].data[expert])
        for step in range(3):
            give_gradients(full, step)
            single.parameter.grad = full[0].parameter.grad[expert].clone()
            optimizer.step(0.1 / (step + 1), GO)
        torch.testing.assert_close(found[expert], single.data, rtol=0, atol=1e-12)


def test_with_split_heads_each_head_of_a_projection_is_a_matrix_and_other_matrices_are_whole() -> None:
    whole, split = (trained(*make(MATRICES, f"split_heads = {key}")) for key in ("false", "true"))
    for name in MATRICES:
        assert torch.equal(whole[name], split[name]) == (name != "layers.0.attention.wq.weight")
    heads, _ = make(MATRICES)
    start, stacked = heads[0].data.clone(), {"layers.0.feed_forward.experts.w13": (4, 2, 6)}
    (experts, _), optimizer = make(stacked)
    experts.data.copy_(start.view(4, 2, 6))
    for step in range(3):
        give_gradients(heads, step)
        experts.parameter.grad = heads[0].parameter.grad.view(4, 2, 6).clone()
        optimizer.step(0.1 / (step + 1), GO)
    found = split["layers.0.attention.wq.weight"]
    torch.testing.assert_close(found, experts.data.view(8, 6), rtol=0, atol=1e-12)


def test_the_learning_rate_of_matrices_follows_the_schedule_of_the_other_one() -> None:
    names = {**MATRICES, **OTHERS}
    double = trained(*make(names, "lr = 0.2"))
    both = trained(*make(names, general="betas = [0.9, 0.95]"), lr=0.2)
    once = trained(*make(names))
    assert all(torch.equal(double[name], both[name]) for name in MATRICES)
    assert all(torch.equal(double[name], once[name]) for name in OTHERS)


def test_cautious_decay_skips_weights_growing_in_the_update() -> None:
    plain, cautious, none = (
        trained(*make(MATRICES, options, general=general), steps=1)
        for options, general in (("", ""), ("cautious_decay = true", ""), ("", "no_decay = ['*']"))
    )
    for name in MATRICES:
        start = next(s.data for s in make(MATRICES)[0] if s.name == name)
        shrinks = (start - none[name]) * start > 0
        assert shrinks.any() and not shrinks.all()
        torch.testing.assert_close(
            cautious[name], torch.where(shrinks, plain[name], none[name]), rtol=0, atol=1e-15
        )


def test_cautious_decay_is_not_decided_by_rounding() -> None:
    """Gradients that differ only in a row of rounding noise give the same weights."""
    name = "layers.0.feed_forward.w1.weight"
    found = []
    for seed in (0, 1):
        shards, optimizer = make({name: MATRICES[name]}, "cautious_decay = true")
        noise = torch.randn(6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        shards[0].parameter.grad[3] = 1e-17 * noise
        optimizer.step(0.1, GO)
        found.append(shards[0].data)
    torch.testing.assert_close(*found, rtol=0, atol=1e-13)


def test_phases_change_the_decay_of_second_moments_of_rows() -> None:
    name = "layers.0.feed_forward.w1.weight"
    moments = []
    for betas in ((0.9, 0.95), (0.9, 0.5)):
        shards, optimizer = make({name: MATRICES[name]}, "second_moment = 'neuron'")
        optimizer.step(0.1, GO)
        config = parse_toml_text(tiny_config() + MUON + "second_moment = 'neuron'").optimizer
        optimizer.follow(config.model_copy(update={"betas": betas}))
        before = next(values.clone() for slot, _, values in optimizer.tensors() if slot == "row_moment")
        give_gradients(shards, 1)
        optimizer.step(0.1, GO)
        moments.append(
            next(values for slot, _, values in optimizer.tensors() if slot == "row_moment") - before
        )
    # new - old = (1 - decay) (square - old), and both runs have the same squares.
    torch.testing.assert_close(moments[1], 10 * moments[0], rtol=1e-6, atol=0)


def test_only_heads_with_logits_above_the_limit_are_scaled() -> None:
    name, limit = "layers.0.attention.wq.weight", 50.0
    size = MATRICES[name][0] // 4
    for powers in ([0.5] * size, [1.0] * size, [0.0] + [1.0] * (size - 1)):
        (plain, _), other = make({name: MATRICES[name]})
        (shard, norm), _ = make({name: MATRICES[name]})
        largest = torch.tensor([10.0, 200.0, -torch.inf, 50.0]).double()
        config = parse_toml_text(tiny_config() + MUON + f"qk_clip = {limit}").optimizer
        optimizer = Muon([shard, norm], config)
        optimizer.bound_logits({name: (largest, torch.tensor(powers))})
        before = shard.data.clone()
        optimizer.step(0.1, SKIP)
        assert torch.equal(shard.data, before)
        for one in (optimizer, other):
            one.step(0.1, GO)
        expected = plain.data.unflatten(0, (4, -1)).clone()
        expected[1] *= 0.25 ** torch.tensor(powers).unsqueeze(-1)
        torch.testing.assert_close(shard.data, expected.flatten(0, 1), rtol=0, atol=1e-15)


def test_frozen_weights_are_not_scaled() -> None:
    name = "layers.0.attention.wq.weight"
    (shard, norm), _ = make({name: MATRICES[name]})
    shard = replace(shard, rates=replace(shard.rates, scale=0.0))
    optimizer = Muon([shard, norm], parse_toml_text(tiny_config() + MUON + "qk_clip = 50.0").optimizer)
    optimizer.bound_logits({name: (torch.full((4,), 200.0).double(), torch.ones(MATRICES[name][0] // 4))})
    before = shard.data.clone()
    optimizer.step(0.1, GO)
    assert torch.equal(shard.data, before)


def test_neurons_are_divided_by_the_root_of_their_second_moment() -> None:
    name, shape = "layers.0.feed_forward.w1.weight", (12, 6)
    shards, optimizer = make({name: shape}, "second_moment = 'neuron'\nadjust_lr = 'original'\nns_steps = 3")
    weight, mean, moment = shards[0].data.clone(), torch.zeros(shape).double(), torch.zeros(12).double()
    for step in range(3):
        give_gradients(shards, step)
        lr, grad = 0.1 / (step + 1), shards[0].parameter.grad
        mean = 0.95 * mean + 0.05 * grad
        update = orthogonalize_((0.05 * grad + 0.95 * mean)[None], 3)[0]
        moment = 0.95 * moment + 0.05 * (update**2).mean(1)
        scaled = update / moment.sqrt()[:, None]
        scaled *= update.norm() / scaled.norm()
        weight = weight - lr * 0.5 * weight - lr * 2**0.5 * scaled
        optimizer.step(lr, GO)
    torch.testing.assert_close(shards[0].data, weight, rtol=0, atol=1e-8)  # the square root has 1e-10 added


@pytest.mark.parametrize("moment_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_skipped_step_keeps_every_bit_despite_nan_gradients(moment_dtype: str, dtype) -> None:
    options = "second_moment = 'neuron'\ncautious_decay = true\nsplit_heads = true"
    shards, optimizer = make(MATRICES | OTHERS | EXPERTS, options, dtype, f'moment_dtype = "{moment_dtype}"')
    shards[0].data[0, 0] = -0.0
    optimizer.step(0.1, GO)
    before = everything(shards, optimizer)
    assert all(values.any() for values in before)
    for shard in shards:
        shard.parameter.grad.fill_(torch.nan)
    optimizer.step(0.1, SKIP)
    for old, new in zip(before, everything(shards, optimizer), strict=True):
        assert torch.equal(old, new)
    assert optimizer.state() == {"updates": 1}


def everything(shards: list[Shard], optimizer: Muon) -> list[Tensor]:
    return [tensor.clone() for tensor in (*(s.data for s in shards), *(t for *_, t in optimizer.tensors()))]


def test_loading_the_state_continues_exactly() -> None:
    options = "second_moment = 'neuron'"
    shards, optimizer = make(MATRICES | OTHERS | EXPERTS, options)
    others, restored = make(MATRICES | OTHERS | EXPERTS, options)
    optimizer.step(0.1, GO)
    for (slot, mine, to), (same, theirs, values) in zip(restored.tensors(), optimizer.tensors(), strict=True):
        assert (slot, mine.name, mine.boxes) == (same, theirs.name, theirs.boxes)
        to.copy_(values)
    for mine, theirs in zip(others, shards, strict=True):
        mine.data.copy_(theirs.data)
    restored.load_state(optimizer.state())
    assert all(
        torch.equal(a, b)
        for a, b in zip(trained(others, restored).values(), trained(shards, optimizer).values(), strict=True)
    )


@pytest.mark.parametrize(
    ("method", "steps", "low", "high"), [("newton_schulz", 8, 0.6, 1.25), ("polar_express", 8, 0.999, 1.001)]
)
def test_singular_values_become_one_and_singular_vectors_stay(
    method, steps: int, low: float, high: float
) -> None:
    generator = torch.Generator().manual_seed(0)
    for shape in ((3, 20, 30), (3, 30, 20)):
        matrices = torch.randn(shape, generator=generator, dtype=torch.float64)
        found = orthogonalize_(matrices.clone(), steps, method)
        left, _, right = torch.linalg.svd(matrices, full_matrices=False)
        inside = left.mT @ found @ right.mT
        diagonal = inside.diagonal(dim1=1, dim2=2)
        assert diagonal.min() > low and diagonal.max() < high
        torch.testing.assert_close(inside, torch.diag_embed(diagonal), rtol=0, atol=1e-8)
    assert not orthogonalize_(torch.zeros(2, 3, 4), 5, method).any()


def test_a_blocks_non_matrix_parameter_is_refused_by_name() -> None:
    with pytest.raises(
        UserError, match=r"layers.0.mixer.kernel of 4 x 1 x 3 is not a matrix.*use adamw"
    ) as caught:
        make(MATRICES | {"layers.0.mixer.kernel": (4, 1, 3)})
    assert caught.value.exit_code == BAD_CONFIG


LINEAR = ["--model.layer_pattern=['linear']", "--model.linear_attention={n_key_heads=4,n_value_heads=4}"]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            ["--optimizer.muon.lr=0.02"],
            "optimizer.muon.lr = 0.02 (command line): needs optimizer.name = muon, but it is",
        ),
        (
            ["--optimizer.name=muon", "--optimizer.muon.qk_clip=100", "--model.qk_norm=true"],
            "has no effect with model.qk_norm = true, because RMSNorm removes",
        ),
        (
            ["--optimizer.name=muon", "--optimizer.muon.qk_clip=100", *LINEAR],
            "has no effect, because linear attention normalises queries and keys",
        ),
        (["--optimizer.name=muon", "--optimizer.muon.qk_clip=-1"], "allowed: number >= 0"),
        (["--optimizer.muon.qk_clip=100"], "needs optimizer.name = muon, but it is adamw"),
        (["--optimizer.name=muon", "--optimizer.muon.ns_steps=0"], "allowed: integer >= 1 and <= 99"),
        (["--optimizer.name=muon", "--optimizer.muon.momentum=1.0"], "allowed: number >= 0 and < 1"),
        (["--optimizer.name=muon", "--optimizer.muon.orthogonalization=svd"], "newton_schulz, polar_express"),
        (["--optimizer.name=moun"], 'did you mean "muon"'),
        (
            ["--optimizer.name=muon", "--optimizer.muon.nesterof=true"],
            "did you mean optimizer.muon.nesterov?",
        ),
    ],
)
def test_wrong_options_and_another_optimizers_options_are_refused(options: list[str], expected: str) -> None:
    with pytest.raises(UserError) as caught:
        load_config(["--config=debug", *options])
    assert expected in str(caught.value) and caught.value.exit_code == BAD_CONFIG


def test_a_stage_without_matrices_still_counts_updates() -> None:
    shards, optimizer = make({})
    optimizer.step(0.1, GO)
    assert optimizer.state() == {"updates": 1}


def test_a_rank_without_elements_of_adamw_still_counts_updates() -> None:
    """Rank 0 writes the count to checkpoints. It may hold matrices only, e.g. of a pipeline's stage under zero1."""
    shards, optimizer = make(MATRICES)
    (norm,) = (shard for shard in shards if shard.name in NORM)
    nothing = torch.nn.Parameter(norm.data.new_empty(0))
    nothing.grad = nothing.detach().clone()
    empty = replace(norm, boxes=(), parameter=nothing)
    optimizer = Muon([shard for shard in shards if shard is not norm] + [empty], optimizer._config)
    optimizer.step(0.1, GO)
    assert optimizer.state() == {"updates": 1}
