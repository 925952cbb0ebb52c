"""FSDP's collectives, their order and dtypes, its compute dtypes, and its held memory."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from benchmarks.collectives import Collectives, collectives_of
from forge.config import parse_toml_text
from forge.parallel.build import build_meta_model
from forge.parallel.engines.fsdp import FullySharded
from forge.parallel.step.model import SequentialModel
from forge.runtime import compat
from forge.runtime.errors import UserError
from tests.support.building import built
from tests.support.equivalence import config_batches, gathered, plain_model, tiny_config, wholes
from tests.support.harness import run_ranks

LAYERS = 3  # of the tiny model


def build(text: str, world: int) -> tuple[SequentialModel, Any]:
    """Return the model of `text` and this rank's first batch."""
    one = built(text, world)
    return one.model, next(one.batches())


def step(model: SequentialModel, batch: Any) -> None:
    model.forward_backward(batch, torch.tensor(100.0, dtype=torch.float64))
    model.finalize_gradients()


# Collectives.


def _collectives(rank: int, world: int, text: str, defect: str = "") -> list[dict[str, int]]:
    """Return the collectives of two steps, the second including leftovers of the first."""
    model, batch = build(text, world)
    if defect:
        globals()[defect]()
    counted = []
    for _ in range(2):
        collectives = collectives_of(functools.partial(step, model, batch))
        model.zero_gradients()
        counted.append(collectives.number())
    return counted


def collectives(
    world: int, parallel: str = "", micro: int = 1, model: str = "", defect: str = ""
) -> dict[str, int]:
    """Return one step's collectives without the all-reduce of the loss."""
    text = tiny_config(parallel=parallel, micro=micro, model=model)
    found = [counted for counts in run_ranks(_collectives, world, text, defect) for counted in counts]
    assert all(counted == found[0] for counted in found), found
    if world > 1:
        found[0]["all_reduce"] -= 1
    return {name: number for name, number in found[0].items() if number}


SLOW = pytest.mark.slow
# Embedding, blocks, norm with head.
UNITS = LAYERS + 2
# Backward gathers all blocks but the last again. It reads no embedding rows.
AGAIN = LAYERS - 1


@pytest.mark.parametrize(("micro", "model"), [(8, ""), (2, ""), (2, "tie_embeddings = true")])
def test_one_process_sends_nothing(micro: int, model: str) -> None:
    assert collectives(1, micro=micro, model=model) == {}


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("microbatches", [1, 2])
def test_fsdp_gathers_each_needed_unit_and_reduces_it_once_per_microbatch(
    world: int, microbatches: int
) -> None:
    micro = 8 // world // microbatches
    assert collectives(world, micro=micro) == {
        "all_gather": microbatches * (UNITS + AGAIN),
        "reduce_scatter": microbatches * UNITS,
    }


def test_a_tied_embedding_is_gathered_once() -> None:
    # Blocks, norm, and the root with the embedding.
    assert collectives(2, micro=4, model="tie_embeddings = true") == {
        "all_gather": LAYERS + 2 + AGAIN,
        "reduce_scatter": LAYERS + 2,
    }


@pytest.mark.parametrize(
    ("policy", "again"), [('"always"', UNITS - 1), ('"never"', 0), ("2", UNITS - 1), ("4", UNITS - 1)]
)
def test_only_freed_units_are_gathered_again(policy: str, again: int) -> None:
    counted = collectives(4, f"reshard_after_forward = {policy}", micro=2)
    assert counted == {"all_gather": UNITS + again, "reduce_scatter": UNITS}


@pytest.mark.parametrize(("prefetch", "microbatches"), [(0, 1), (0, 4), (1, 1), (2, 1), (9, 1)])
def test_prefetching_gathers_nothing_twice(prefetch: int, microbatches: int) -> None:
    counted = collectives(2, f"prefetch = {prefetch}", micro=4 // microbatches)
    one = {"all_gather": UNITS + AGAIN, "reduce_scatter": UNITS}
    assert counted == {name: number * microbatches for name, number in one.items()}


def test_deferred_reduction_reduces_once_per_step() -> None:
    assert collectives(2, "defer_gradient_reduction = true", micro=1) == {
        "all_gather": 4 * (UNITS + AGAIN),
        "reduce_scatter": UNITS,
    }


@pytest.mark.parametrize("deferred", [False, True])
def test_never_freed_parameters_are_gathered_once_per_step(deferred: bool) -> None:
    parallel = f'reshard_after_forward = "never"\ndefer_gradient_reduction = {str(deferred).lower()}'
    reductions = UNITS if deferred else 4 * UNITS
    assert collectives(2, parallel, micro=1) == {"all_gather": UNITS, "reduce_scatter": reductions}


HSDP = "dp_replicate = 2\ndp_shard = 2"


def test_replicas_all_reduce_once_per_step() -> None:
    assert collectives(4, HSDP, micro=1) == {
        "all_gather": 2 * (UNITS + AGAIN),
        "reduce_scatter": 2 * UNITS,
        "all_reduce": UNITS,
    }


@pytest.mark.parametrize("parallel", [HSDP, "dp_replicate = 4\ndp_shard = 1"])
def test_deferred_reduction_with_replicas(parallel: str) -> None:
    counted = collectives(4, parallel + "\ndefer_gradient_reduction = true", micro=1)
    assert counted["all_reduce"] == UNITS and counted.get("reduce_scatter", UNITS) == UNITS


def test_replicas_alone_send_nothing_but_one_all_reduce_per_unit() -> None:
    assert collectives(2, "dp_replicate = 2\ndp_shard = 1", micro=1) == {"all_reduce": UNITS}


def all_reduce_on_every_microbatch() -> None:
    allowed = FSDPModule.set_requires_all_reduce
    FSDPModule.set_requires_all_reduce = lambda self, _, **options: allowed(self, True, **options)


def test_an_all_reduce_on_every_microbatch_is_detected() -> None:
    assert collectives(4, HSDP, micro=1, defect="all_reduce_on_every_microbatch")["all_reduce"] == 2 * UNITS


def _sizes(rank: int, world: int, text: str) -> dict[str, list[int]]:
    model, batch = build(text, world)
    collectives = collectives_of(functools.partial(step, model, batch))
    return {name: collectives.sizes(name) for name in ("all_gather", "reduce_scatter")}


def test_parameters_travel_in_the_compute_dtype_and_gradients_in_the_reduce_dtype() -> None:
    model = build_meta_model(parse_toml_text(tiny_config()))
    block = sum(p.numel() for p in model.layers["0"].parameters())
    table = model.embedding.weight.numel() + 1 * 32  # 67 rows over 2 ranks: padded to 68
    ends = table + model.norm.weight.numel()
    sizes = run_ranks(_sizes, 2, precise(compute="bfloat16", micro=4))[0]
    assert sizes["all_gather"] == [2 * n for n in (table, block, block, block, ends, block, block)]
    assert sizes["reduce_scatter"] == [4 * n for n in (ends, block, block, block, table)]


def precise(
    *, compute: str, storage: str = "float32", pins: str = "", extra: str = "", **options: Any
) -> str:
    """Return the tiny model's config with narrower dtypes than float64."""
    text = tiny_config(**options)
    section = f'[precision]\nstorage = "{storage}"\ncompute = "{compute}"\nreduce = "float32"\n{pins}\n'
    begin, end = text.index("[precision]"), text.index("[data]")
    return text[:begin] + section + extra + "\n" + text[end:]


# Prefetching.


def _gathers_before(rank: int, world: int, text: str) -> tuple[dict[str, int], dict[str, int]]:
    """Return the number of issued gathers at the start of each block, in forward and in backward."""
    model, batch = build(text, world)
    begun: tuple[dict[str, int], dict[str, int]] = ({}, {})
    net = model.parts[0]
    with Collectives() as collectives:
        issued = lambda: len(collectives.sizes("all_gather"))  # noqa: E731

        def note(begun: dict[str, int], name: str, *_: Any) -> None:
            begun.setdefault(name, issued())

        for name, block in net.layers.items():
            # Inside the block, after FSDP's pre-forward work.
            block.attention_norm.register_forward_pre_hook(functools.partial(note, begun[0], name))
            block.feed_forward.register_full_backward_pre_hook(functools.partial(note, begun[1], name))
        step(model, batch)
    forward = len(net.layers) + 2
    return begun[0], {name: number - forward for name, number in begun[1].items()}


@pytest.mark.parametrize(
    ("prefetch", "forward", "backward"),
    [
        (0, {"0": 2, "1": 3, "2": 4}, {"2": 1, "1": 2, "0": 2}),
        (1, {"0": 3, "1": 4, "2": 5}, {"2": 1, "1": 2, "0": 2}),
        (2, {"0": 4, "1": 5, "2": 5}, {"2": 2, "1": 2, "0": 2}),
    ],
)
def test_the_next_units_are_gathered_before_a_block_computes(prefetch, forward, backward) -> None:
    text = tiny_config(parallel=f"prefetch = {prefetch}", micro=4)
    assert run_ranks(_gathers_before, 2, text)[0] == (forward, backward)


# Compute dtypes.


def _dtypes(rank: int, world: int, text: str) -> dict[str, tuple[set[torch.dtype], set[torch.dtype]]]:
    """Return the dtypes of inputs and outputs of each module with its own parameters, over all forwards."""
    model, batch = build(text, world)
    seen: dict[str, tuple[set[torch.dtype], set[torch.dtype]]] = {}

    def note(module: torch.nn.Module, inputs: Any, output: Any, name: str) -> None:
        computes, returns = seen.setdefault(name, (set(), set()))
        computes |= {p.dtype for p in module.parameters(recurse=False)}
        returns |= {output.dtype}

    for name, module in model.parts[0].named_modules():
        if list(module.parameters(recurse=False)):
            # Before FSDP's hook, which frees the gathered parameters.
            module.register_forward_hook(functools.partial(note, name=name), prepend=True)
    step(model, batch)
    for shard in model.shards:
        assert shard.parameter.dtype == torch.float32
        assert shard.grad is not None and shard.grad.dtype == torch.float32 and shard.grad.isfinite().all()
    return seen


PINS = {
    "norms": (["layers.*.attention_norm", "norm"], ""),
    "a block": (["layers.1"], ""),
    "half a block": (["layers.*.feed_forward"], ""),
    "one product": (["layers.*.attention.wq"], ""),
    "head": (["head"], ""),
    "both ends": (["embedding", "norm", "head"], ""),
    "tied": (["embedding"], "tie_embeddings = true"),
    "all": (["*"], ""),
    "none": (["*.router"], "qk_norm = true\nattention_bias = true"),
    "qk": (["*.q_norm", "*.k_norm"], "qk_norm = true\nattention_bias = true"),
}


def pinned_text(case: str, **options: Any) -> str:
    pins, model = PINS[case]
    return precise(
        compute="bfloat16", pins=f"fp32_modules = {pins}".replace("'", '"'), model=model, **options
    )


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("case", PINS)
def test_pinned_modules_compute_in_float32_and_all_others_in_bfloat16(case: str, world: int) -> None:
    pins, _ = PINS[case]
    for seen in run_ranks(_dtypes, world, pinned_text(case, micro=4)):
        assert seen
        for name, (computes, returns) in seen.items():
            pinned = [pin for pin in pins if fsdp_matches(pin, name)]
            assert computes == {torch.float32 if pinned else torch.bfloat16}, name
            # Inside a pinned module the stream is float32, and its output is bfloat16. The loss is always float32.
            inside = any(len(pin.split(".")) < len(name.split(".")) for pin in pinned)
            last = name.endswith(("norm", "w2", "wo"))
            if not (inside and last):
                assert returns == {torch.float32 if name == "head" or inside else torch.bfloat16}, name


def fsdp_matches(pattern: str, name: str) -> bool:
    """Return whether a module or a parent of it is pinned. Deliberately independent of forge's own rule."""
    if pattern == "*":
        return True
    parts, names = pattern.split("."), name.split(".")
    if parts[0] == "*":
        return parts[1] in names
    return all(a in ("*", b) for a, b in zip(parts, names, strict=False)) and len(parts) <= len(names)


@pytest.mark.parametrize("mode", ["selective", pytest.param("full", marks=SLOW)])
@pytest.mark.parametrize(
    "case",
    [pytest.param("norms", marks=SLOW), "half a block", "one product", pytest.param("a block", marks=SLOW)],
)
def test_recomputation_uses_the_same_dtypes_and_gives_the_same_gradients(case: str, mode: str) -> None:
    plain = pinned_text(case, micro=2)
    recomputed = pinned_text(case, micro=2, extra=f'[activation_checkpoint]\nmode = "{mode}"')
    for without, with_ in zip(
        run_ranks(_gradients, 2, plain), run_ranks(_gradients, 2, recomputed), strict=True
    ):
        for name, gradient in without.items():
            assert torch.equal(gradient, with_[name]), name


def _gradients(rank: int, world: int, text: str) -> dict[str, torch.Tensor]:
    model, batch = build(text, world)
    step(model, batch)
    return gathered(wholes(model.shards, [shard.grad for shard in model.shards]))


@pytest.mark.parametrize(
    "case",
    [pytest.param("norms", marks=SLOW), "half a block", pytest.param("one product", marks=SLOW), "both ends"],
)
def test_pins_go_with_tensor_parallelism(case: str) -> None:
    (alone,) = run_ranks(_gradients, 1, pinned_text(case, micro=4))
    split = run_ranks(_gradients, 2, pinned_text(case, micro=4, parallel="tp = 2"))[0]
    for name, gradient in alone.items():
        # Partial products are rounded to bfloat16 (2^-8) before their sum.
        assert (split[name] - gradient).norm() <= 0.01 * gradient.norm(), name


def mixed_by_hand(rank: int, world: int, text: str, pinned: list[str], wide: bool) -> dict[str, torch.Tensor]:
    """Return gradients of a plain module with parameters and streams cast by hooks, microbatch by microbatch.

    wide: in float32, so gradients of norms, computed in float32 by kernels, are not rounded first.
    """
    config = parse_toml_text(text)
    model = plain_model(config)
    model.reset_buffers(torch.bfloat16)
    kept = {p for name in pinned for p in model.get_submodule(name).parameters()}
    for parameter in set(model.parameters()) - kept:
        parameter.data = parameter.data.bfloat16()
    for parameter in model.parameters() if wide else ():
        parameter.grad_dtype = torch.float32
    for name in pinned:
        module = model.get_submodule(name)
        module.register_forward_pre_hook(lambda _, inputs: (inputs[0].float(), *inputs[1:]))
        module.register_forward_hook(lambda _, inputs, output: output.bfloat16())
    total: dict[str, torch.Tensor] = {}
    for micro in next(iter(config_batches(config, 0, 1))).microbatches(config.train.micro_batch_size):
        losses = model(micro.tokens, micro.labels, micro.positions, micro.documents)
        (losses[0] / torch.tensor(100.0)).backward()
        for name, parameter in model.named_parameters():
            total[name] = total.get(name, 0) + parameter.grad.float()
            parameter.grad = None
    return total


@pytest.mark.parametrize("world", [1, 2])
def test_gradients_equal_those_of_a_plain_module_cast_by_hand(world: int) -> None:
    text = precise(
        compute="bfloat16", pins='fp32_modules = ["*.attention_norm", "layers.1.feed_forward"]', micro=4
    )
    names = [*(f"layers.{i}.attention_norm" for i in range(LAYERS)), "layers.1.feed_forward"]
    # In one process, contiguous buffers hold the model.
    (expected,) = run_ranks(mixed_by_hand, 1, text, names, world == 1)
    for name, gradient in run_ranks(_gradients, world, text)[0].items():
        # The same two microbatches: float32 sums of two numbers do not depend on their order.
        assert torch.equal(gradient, expected[name]), name


def _refusal(rank: int, world: int, text: str) -> str:
    with pytest.raises(UserError) as error:
        build(text, world)
    return str(error.value)


def test_a_pin_inside_a_compiled_block_is_refused() -> None:
    compiled = '[compile]\nenabled = true\nbackend = "aot_eager"'
    message = run_ranks(_refusal, 2, pinned_text("norms", extra=compiled))[0]
    assert "attention_norm" in message and "compile.enabled" in message


# Held memory.


def test_the_log_reports_memory_of_deferred_gradients() -> None:
    def held(text: str) -> str:
        return run_ranks(_held, 2, text)[0]

    assert "reduced at once and held sharded" in held(precise(compute="bfloat16"))
    model = build_meta_model(parse_toml_text(tiny_config()))
    size = 4 * sum(p.numel() for p in model.parameters()) / 2**20
    deferred = held(precise(compute="bfloat16", parallel="defer_gradient_reduction = true"))
    assert f"{size:.1f} MiB of unsharded float32 gradients" in deferred


def _held(rank: int, world: int, text: str) -> str:
    model, _ = build(text, world)
    return model.accumulation_memory_summary()


def _unsharded_between_microbatches(rank: int, world: int, text: str) -> list[tuple[bool, bool]]:
    """Return after each backward whether a block is gathered, and whether it holds an unsharded gradient."""
    model, batch = build(text, world)
    found = []
    model.evaluate(batch)  # FSDP determines its units in the first forward
    block = model.parts[0].layers["0"]
    (group,) = (g for g in compat.fsdp_parameter_groups(model.parts[0]) if block in g.modules)
    begin = FullySharded.begin_microbatch

    def watch() -> tuple[bool, bool]:
        waiting = [p.unsharded_accumulated_grad is not None for p in group.fsdp_params]
        waiting += [
            getattr(getattr(p, "_unsharded_param", None), "grad", None) is not None for p in group.fsdp_params
        ]
        return group.is_unsharded, any(waiting)

    def begin_and_watch(engine: FullySharded, *, last: bool) -> None:
        found.append(watch())
        begin(engine, last=last)

    FullySharded.begin_microbatch = begin_and_watch
    step(model, batch)
    return [*found[1:], watch()]


def test_no_unsharded_tensor_is_held_between_microbatches_by_default() -> None:
    sharded = run_ranks(_unsharded_between_microbatches, 2, tiny_config(micro=1))[0]
    assert sharded == [(False, False)] * 4
    text = tiny_config(micro=1, parallel="defer_gradient_reduction = true")
    assert run_ranks(_unsharded_between_microbatches, 2, text)[0] == [(False, True)] * 3 + [(False, False)]


def test_a_rank_with_all_parameters_casts_them_once_per_step_unless_forward_frees_them() -> None:
    text = tiny_config(micro=1, parallel="dp_replicate = 2\ndp_shard = 1")
    assert run_ranks(_unsharded_between_microbatches, 2, text)[0] == [(True, True)] * 3 + [(False, False)]
    # Only FSDP frees parameters, so it keeps the model in one process too.
    text = tiny_config(micro=2, parallel='reshard_after_forward = "always"')
    (found,) = run_ranks(_unsharded_between_microbatches, 1, text)
    assert found == [(False, True)] * 3 + [(False, False)]


# In one process.


@pytest.mark.parametrize("pins", ['["*.decay"]', "[]"])
def test_decays_of_linear_attention_are_rounded_as_by_other_engines(pins: str) -> None:
    linear = (
        'layer_pattern = ["linear", "full"]\n[model.linear_attention]\nn_key_heads = 2\nn_value_heads = 2\n'
    )
    options = {"micro": 4, "model": linear + "key_head_dim = 8\nchunk_size = 16\n"}
    sharded, copied = (
        run_ranks(
            _gradients,
            2,
            precise(compute="bfloat16", pins=f"fp32_modules = {pins}", parallel=engine, **options),
        )[0]
        for engine in ("", 'data_parallel = "ddp"')
    )
    # Backward of the whole model reaches the embedding, so its gradient depends on every decay.
    assert torch.equal(sharded["embedding.weight"], copied["embedding.weight"])


def _engine(rank: int, world: int, text: str) -> tuple[str, list[torch.Tensor]]:
    """Return the engine's name, and the gradients after one step."""
    model, batch = build(text, world)
    step(model, batch)
    return type(model._engines[0]).__name__, [
        shard.grad.reshape(shard.global_shape).clone() for shard in model.shards
    ]


def test_without_sharding_buffers_replace_fsdp_with_the_same_gradients() -> None:
    ((held, gradients),) = run_ranks(_engine, 1, tiny_config(micro=2))
    freeing = tiny_config(micro=2, parallel='reshard_after_forward = "always"')
    ((sharded, expected),) = run_ranks(_engine, 1, freeing)
    assert (held, sharded) == ("Buffered", "FullySharded")
    assert all(map(torch.equal, gradients, expected))


@pytest.mark.parametrize(
    "text",
    [
        tiny_config(parallel="cpu_offload = true"),
        precise(storage="bfloat16", compute="bfloat16", micro=8),
        precise(storage="bfloat16", compute="bfloat16").replace('reduce = "float32"', 'reduce = "bfloat16"'),
        precise(compute="float32", micro=8).replace('reduce = "float32"', 'reduce = "float64"'),
        precise(compute="bfloat16", pins='float8 = "tensorwise"'),
        precise(
            compute="bfloat16",
            parallel='reshard_after_forward = "always"',
            model='layer_pattern = ["linear", "full"]\n[model.linear_attention]\nn_key_heads = 2\nn_value_heads = 2\n'
            "key_head_dim = 8\nchunk_size = 16\n",
            extra='[compile]\nenabled = true\nbackend = "aot_eager"',
        ),
    ],
    ids=["offload", "narrow gradients", "narrow sums", "wide sums", "float8", "compiled linear attention"],
)
def test_memory_saving_options_keep_fsdp_in_one_process(text: str) -> None:
    ((held, _),) = run_ranks(_engine, 1, text)
    assert held == "FullySharded"


def test_between_microbatches_fsdp_and_buffers_hold_equally_wide_sums() -> None:
    text = precise(storage="bfloat16", compute="bfloat16", micro=2)
    ((held, gradients),) = run_ranks(_engine, 1, text)
    freeing = text.replace("[parallel]\n", '[parallel]\nreshard_after_forward = "always"\n')
    ((sharded, expected),) = run_ranks(_engine, 1, freeing)
    assert (held, sharded) == ("Buffered", "FullySharded")
    for ours, rounded in zip(gradients, expected, strict=True):
        assert ours.dtype == torch.float32 and rounded.dtype == torch.bfloat16
        # FSDP2 also rounds each microbatch's gradient of a norm to bfloat16.
        tolerance = 0.0 if ours.ndim > 1 else 2**-7 * rounded.abs().max().item()
        torch.testing.assert_close(ours.bfloat16(), rounded, rtol=0.0, atol=tolerance)


def test_fsdp_in_one_process_ignores_keys_of_the_buffered_engines() -> None:
    text = tiny_config(micro=2, parallel='symmetric_memory = true\ncheck_gradients = "plausible"')
    ((held, gradients),) = run_ranks(_engine, 1, text)
    ((_, expected),) = run_ranks(_engine, 1, tiny_config(micro=2))
    assert held == "Buffered" and all(map(torch.equal, gradients, expected))


@pytest.mark.parametrize("parallel", ["dp_replicate = 2\ndp_shard = 1", "cp = 2\ndp_shard = 1", ""])
def test_ranks_with_different_data_keep_fsdp(parallel: str) -> None:
    found = run_ranks(_engine_name, 2, tiny_config(parallel=parallel, micro=4))
    assert found == ["FullySharded"] * 2


def test_ranks_of_tensor_parallelism_alone_do_not_shard() -> None:
    found = run_ranks(_engine_name, 2, tiny_config(parallel="tp = 2\ndp_shard = 1", micro=4))
    assert found == ["Buffered"] * 2


def _engine_name(rank: int, world: int, text: str) -> str:
    return type(build(text, world)[0]._engines[0]).__name__
