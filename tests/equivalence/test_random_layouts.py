"""Layouts drawn at random compute what one process computes.

A seeded generator draws every axis and option; what the configuration checks refuse is drawn again, by the same
checks that a user meets. `make test` runs the first few, `make test-all` all.
"""

import functools
import random
from collections.abc import Iterator

import pytest

from forge.config import check_world, parse_toml_text
from forge.errors import UserError
from tests.equivalence.compare import Trace, assert_equal, layout, reference, tiny_config

LAYOUTS, FAST = 40, 8

MODELS = {
    "plain": "",
    "tied": "tie_embeddings = true",
    "everything": "qk_norm = true\nattention_bias = true\nsliding_window = 24\nlogit_soft_cap = 5.0\n",
}


def draw(generator: random.Random) -> tuple[int, str, str]:
    """(world, model, config) of one layout, legal or not."""
    choose = generator.choice
    world = choose([2, 4, 4, 8])
    model = choose(sorted(MODELS))
    degrees = {axis: choose([1, 2, 2, 4]) for axis in ("dp_replicate", "tp", "cp")}
    options = {
        **degrees,
        "sequence_parallel": choose(["true", "false"]),
        "loss_parallel": choose(["true", "false"]),
        "context": choose(['"allgather"', '"ulysses"', '"ring"']),
        "reshard_after_forward": choose(['"auto"', '"always"', '"never"']),
    }
    parallel = "\n".join(f"{key} = {value}" for key, value in options.items())
    checkpointing = f"[activation_checkpoint]\nmode = {choose(['none', 'none', 'full', 'selective'])!r}\n"
    compilation = (
        f'[compile]\nenabled = {choose(["false", "false", "true"])}\nbackend = "aot_eager_decomp_partition"\n'
    )
    text = (
        tiny_config(parallel=parallel, model=MODELS[model], micro=choose([1, 2, 4]))
        + checkpointing
        + compilation
    )
    return world, model, text


def layouts() -> Iterator[tuple[int, str, str]]:
    """The first LAYOUTS legal ones."""
    generator = random.Random(0)
    seen: set[tuple[int, str, str]] = set()
    while len(seen) < LAYOUTS:
        world, model, text = draw(generator)
        try:
            check_world(parse_toml_text(text), world)
        except UserError:
            continue
        if (world, model, text) not in seen:
            seen.add((world, model, text))
            yield world, model, text


@functools.cache
def expected(model: str) -> Trace:
    return reference(tiny_config(model=MODELS[model]))


def name(case: tuple[int, str, str]) -> str:
    world, model, text = case
    parallel = parse_toml_text(text).parallel
    axes = [
        f"{axis}{getattr(parallel, axis)}"
        for axis in ("dp_replicate", "tp", "cp")
        if getattr(parallel, axis) > 1
    ]
    return "-".join([f"world{world}", model, *axes])


def cases() -> list:
    drawn = list(layouts())
    # Eight ranks on two cores take long, so they come last; what combines most axes comes first.
    drawn.sort(key=lambda case: (case[0] == 8, -name(case).count("-")))
    marks = [() if number < FAST else (pytest.mark.slow,) for number in range(len(drawn))]
    return [pytest.param(case, marks=m, id=name(case)) for case, m in zip(drawn, marks, strict=True)]


@pytest.mark.parametrize("case", cases())
def test_a_layout_drawn_at_random(case: tuple[int, str, str]) -> None:
    world, model, text = case
    assert_equal(layout(text, world), expected(model))
