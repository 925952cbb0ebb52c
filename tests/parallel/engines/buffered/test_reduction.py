"""After the last backward, gradients are sums over ranks, for any subset and order of hooks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from benchmarks.collectives import collectives_of
from forge.model import IGNORE
from forge.parallel import build as building
from tests.support.buffers import (
    ALONE,
    ENGINES,
    SMALL,
    Gradients,
    assert_close_gradients,
    backward,
    build,
    engine_config,
    gradients,
    gradients_of_two_steps,
)
from tests.support.harness import RankFailed, run_ranks
from tests.support.layouts import slow_unless


def _gradients(rank: int, world: int, text: str) -> Gradients:
    model, _, batches = build(text, world)
    backward(model, next(batches))
    return gradients(model)


@pytest.mark.parametrize(
    ("engine", "size"),
    [
        pytest.param(
            engine, size, marks=slow_unless((engine, size) in (("ddp", 3000), ("zero1", 1), ("zero2", 0)))
        )
        for engine in ENGINES
        for size in (1, 3000, 0)
    ],
)
def test_sums_do_not_depend_on_buckets_ranks_or_accumulation(engine: str, size: int) -> None:
    expected = run_ranks(_gradients, 1, engine_config("fsdp2", ALONE, batch=12, micro=12))[0]
    for world, micro in ((1, 4), (2, 2), (3, 4)):
        text = engine_config(engine, f"bucket_size = {size}", batch=12, micro=micro)
        assert_close_gradients(run_ranks(_gradients, world, text)[0], expected)


# Gradients without hooks


def _by_hand(rank: int, world: int, text: str, hooked: bool) -> Gradients:
    """Set gradients without hooks, like a pipeline schedule with split backwards; return them."""
    model, engine, batches = build(text, world)
    engine.begin_microbatch(last=True)
    losses = model.parts[0](*model._split.local_part(next(batches)).arguments)
    loss = losses[0] / 100.0
    if hooked:
        loss.backward()
    else:
        parameters = list(model.parts[0].parameters())
        for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
            if parameter.grad is None:
                parameter.grad = gradient
            else:
                parameter.grad += gradient
    engine.finish_gradient_sync()
    return gradients(model)


@pytest.mark.parametrize("engine", ENGINES)
def test_gradients_without_hooks_are_summed_at_the_end(engine: str) -> None:
    text = engine_config(engine, SMALL)
    assert_close_gradients(run_ranks(_by_hand, 2, text, False)[0], run_ranks(_by_hand, 2, text, True)[0])


def _three_by_hand(rank: int, world: int, text: str) -> float:
    """Set the gradients of three microbatches without hooks, as a pipeline does after its last begin_microbatch()."""
    model, engine, _ = build(text, world)
    weight = model.parts[0].norm.weight
    engine.begin_microbatch(last=True)
    for value in (1.0, 1 / 512, 1 / 512):
        gradient = torch.full_like(weight, value)
        if weight.grad is None:
            weight.grad = gradient
        else:
            weight.grad += gradient
        engine.take_weight_gradients(last=value < 1)
    engine.finish_gradient_sync()
    return gradients(model)["norm.weight"][0].item()


@pytest.mark.parametrize("engine", ["zero1", "zero2"])
def test_separate_weight_gradients_are_added_in_float32(engine: str) -> None:
    """In bfloat16, 1 + 1/512 is 1."""
    text = engine_config(engine, SMALL, formats=("float32", "bfloat16", "float32"))
    assert run_ranks(_three_by_hand, 2, text) == [2 * (1 + 2 / 512)] * 2


def _late_and_early(rank: int, world: int, text: str) -> Gradients:
    """Add to an arrived gradient without a hook, while its bucket waits for an unused parameter."""
    model, engine, batches = build(text, world)
    net = model.parts[0]
    net.layers["0"].forward = lambda x, shared: x
    engine.begin_microbatch(last=True)
    (net(*model._split.local_part(next(batches)).arguments)[0] / 100.0).backward()
    more = torch.ones_like(net.norm.weight)
    if net.norm.weight.grad is None:
        net.norm.weight.grad = more
    else:
        net.norm.weight.grad += more
    engine.finish_gradient_sync()
    return gradients(model)


def test_gradients_without_a_hook_are_added_to_those_with_one() -> None:
    expected, found = (
        run_ranks(_late_and_early, 2, engine_config(engine, "bucket_size = 0"))[0]
        for engine in ("zero1", "zero2")
    )
    assert_close_gradients(found, expected)


def _unused(rank: int, world: int, text: str) -> tuple[Gradients, int]:
    """Skip the first block on rank 0 only."""
    model, engine, batches = build(text, world)
    if rank == 0:
        model.parts[0].layers["0"].forward = lambda x, shared: x
    counted = collectives_of(lambda: backward(model, next(batches))).number()
    return gradients(model), counted["reduce_scatter"] if "reduce_scatter" in counted else counted[
        "all_reduce"
    ]


@pytest.mark.parametrize("engine", ENGINES)
def test_a_parameter_unused_on_one_rank_is_still_summed(engine: str) -> None:
    (first, sent), (second, sent_there) = run_ranks(_unused, 2, engine_config(engine, SMALL, micro=4))
    assert sent == sent_there
    assert_close_gradients(first, second, 0.0)
    assert all(gradient.abs().max() > 0 for gradient in first.values())


def _nowhere_used(rank: int, world: int, text: str) -> Gradients:
    model, _, batches = build(text, world)
    model.parts[0].layers["1"].forward = lambda x, shared: x
    for _ in range(2):  # temporary buckets are reused
        backward(model, next(batches))
        found = gradients(model)
        model.zero_gradients()
    return found


@pytest.mark.parametrize("engine", ENGINES)
def test_a_parameter_unused_on_all_ranks_has_gradient_zero(engine: str) -> None:
    for name, gradient in run_ranks(_nowhere_used, 2, engine_config(engine, SMALL))[0].items():
        assert bool(gradient.any()) is (not name.startswith("layers.1.")), name


def _frozen(rank: int, world: int, text: str) -> tuple[Gradients, int]:
    build_meta_model = building.build_meta_model

    def freeze(*arguments):
        model = build_meta_model(*arguments)
        for name in ("head.weight", "layers.1.attention_norm.weight"):
            model.get_parameter(name).requires_grad_(False)
        return model

    building.build_meta_model = freeze
    model, engine, batches = build(text, world)
    engine.begin_microbatch(last=True)
    (model.parts[0](*model._split.local_part(next(batches)).arguments)[0] / 100.0).backward()
    launched = engine._reduction._next
    engine.finish_gradient_sync()
    return gradients(model), launched - len(engine._reduction.buckets)


@pytest.mark.parametrize("engine", ENGINES)
def test_frozen_parameters_are_not_waited_for(engine: str) -> None:
    found, left = run_ranks(_frozen, 2, engine_config(engine, SMALL, micro=4))[0]
    assert left == 0, "buckets were left to the end"
    frozen = {name for name, gradient in found.items() if gradient.abs().max() == 0}
    assert frozen == {"head.weight", "layers.1.attention_norm.weight"}


# Microbatches


def _small_sums(rank: int, world: int, text: str) -> float:
    """Sum 1 and 512 times 2^-9 in one element, one addend per microbatch. In bfloat16 the sum would stay 1."""
    model, engine, _ = build(text, world)
    weight = model.parts[0].norm.weight
    for number in range(513):
        engine.begin_microbatch(last=number == 512)
        (weight * (1.0 if number == 0 else 2.0**-9)).sum().backward()
    engine.finish_gradient_sync()
    return gradients(model)["norm.weight"][0].item()


@pytest.mark.parametrize("engine", ENGINES)
def test_bfloat16_gradients_are_accumulated_in_float32(engine: str) -> None:
    world = 2 if engine == "zero2" else 1  # on one rank zero2 equals zero1
    text = engine_config(engine, formats=("float32", "bfloat16", "float32"))
    assert run_ranks(_small_sums, world, text) == [2.0 * world] * world


def _before_the_last(rank: int, world: int, text: str) -> dict[str, int]:
    """Return the collectives of all microbatches but the last."""
    model, engine, batches = build(text, world)
    *most, _ = list(next(batches).microbatches(1))
    engine.finish_parameter_sync()

    def forward_backward() -> None:
        for micro in most:
            engine.begin_microbatch(last=False)
            (model.parts[0](*model._split.local_part(micro).arguments)[0] / 100.0).backward()

    return collectives_of(forward_backward).number()


@pytest.mark.parametrize("engine", ENGINES)
def test_nothing_is_sent_until_the_last_microbatch(engine: str) -> None:
    counted = run_ranks(_before_the_last, 2, engine_config(engine, SMALL))[0]
    # Except for zero2, which holds no sums over microbatches and reduces each of the three.
    assert list(counted) == (["reduce_scatter"] if engine == "zero2" else [])
    assert counted.get("reduce_scatter", 0) % 3 == 0


@pytest.mark.parametrize(
    ("engine", "formats"),
    [
        pytest.param(engine, formats, marks=slow_unless(engine == "zero2" or "float64" not in formats))
        for engine in ENGINES
        for formats in (("float64",) * 3, ("float32", "bfloat16", "bfloat16"))
    ],
)
def test_overlapped_and_synchronous_communication_give_the_same_bits(engine: str, formats) -> None:
    keys = "\noverlap_gradients = false\noverlap_parameters = false"
    overlapped = run_ranks(gradients_of_two_steps, 2, engine_config(engine, SMALL, micro=2, formats=formats))
    synchronous = run_ranks(
        gradients_of_two_steps, 2, engine_config(engine, SMALL + keys, micro=2, formats=formats)
    )
    for mine, other in zip(overlapped[0], synchronous[0], strict=True):
        assert_close_gradients(mine, other, 0.0)


@pytest.mark.parametrize("engine", ENGINES)
def test_reduction_in_bfloat16_rounds_only_sent_values(engine: str) -> None:
    exact = run_ranks(
        gradients_of_two_steps, 2, engine_config(engine, SMALL, formats=("float32", "bfloat16", "float32"))
    )[0]
    rounded = run_ranks(
        gradients_of_two_steps, 2, engine_config(engine, SMALL, formats=("float32", "bfloat16", "bfloat16"))
    )[0]
    for name, gradient in exact[0].items():
        assert not torch.equal(rounded[0][name], gradient), name
        # Both summands and their sum are rounded to 8 bits.
        assert (rounded[0][name] - gradient).abs().max() <= 2**-7 * gradient.abs().max(), name


def _uneven(rank: int, world: int, text: str, ignored: list[torch.Tensor] | None) -> tuple[list, Gradients]:
    """Rank 1 of two has no valid token. In one process the same sequences are ignored."""
    model, _, batches = build(text, world)
    batch = next(batches)
    for row, label in zip(batch.tokens, batch.labels, strict=True):
        if rank == 1 or (ignored and any(torch.equal(row, other) for other in ignored)):
            label.fill_(IGNORE)
    mine = list(batch.tokens) if rank == 1 else []
    model.forward_backward(batch, model.count_tokens(batch))
    model.finalize_gradients()
    return mine, gradients(model)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_rank_without_a_valid_token_adds_nothing(engine: str) -> None:
    (_, found), (ignored, _) = run_ranks(_uneven, 2, engine_config(engine, SMALL), None)
    ((_, expected),) = run_ranks(_uneven, 1, engine_config("fsdp2", ALONE, micro=8), ignored)
    assert_close_gradients(found, expected)


# Checks of gradients before they are sent


@contextmanager
def _gradient_times(factor: float, model, name: str) -> Iterator[None]:
    hook = model.parts[0].get_parameter(name).register_hook(lambda gradient: gradient * factor)
    yield
    hook.remove()


def _checked(rank: int, world: int, text: str, factor: float) -> None:
    model, _, batches = build(text, world)
    for step in range(3):
        by = factor if step == 2 and rank == 1 else 1.0
        with _gradient_times(by, model, "layers.1.attention.wo.weight"):
            backward(model, next(batches))
        model.zero_gradients()


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("level", "factor", "message"),
    [
        ("finite", float("nan"), "on rank 1 is not finite before the sum over ranks"),
        ("plausible", float("inf"), "on rank 1 is not finite"),
        ("plausible", 1e6, "on rank 1 is implausible before the sum over ranks: the norm of its bucket is "),
    ],
)
def test_a_bad_gradient_is_named_before_it_is_mixed_with_others(engine, level, factor, message) -> None:
    text = engine_config(engine, f'{SMALL}\ncheck_gradients = "{level}"')
    with pytest.raises(RankFailed, match=rf"the gradient of layers\.1\.attention\.wo\.weight {message}"):
        run_ranks(_checked, 2, text, factor)


@pytest.mark.parametrize(("level", "factor"), [("plausible", 100.0), ("finite", 1e6), ("none", float("nan"))])
def test_plausible_gradients_pass_the_check(level: str, factor: float) -> None:
    run_ranks(_checked, 2, engine_config("zero1", f'{SMALL}\ncheck_gradients = "{level}"'), factor)
