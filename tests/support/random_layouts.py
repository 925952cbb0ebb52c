"""Random layouts for the equivalence tests.

A seeded generator draws every axis and option. If the configuration's checks refuse a draw, as they would refuse a user's
configuration, the generator draws again.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from forge.config import check_world, parse_toml_text
from forge.runtime.errors import UserError
from tests.support.equivalence import tiny_config

MOE = "[model.moe]\nn_experts = 8\nexpert_dim = 24\n"
MIXTURES = {
    "bias": MOE + "bias_update_rate = 0.05\nn_shared_experts = 1",
    "aux loss": MOE + 'balance = "aux_loss"\naux_loss_coef = 0.3\nz_loss_coef = 0.1\nn_dense_layers = 1',
    "by sequence": MOE
    + 'balance = "sequence_aux_loss"\naux_loss_coef = 0.3\nscore_function = "sigmoid"\ntop_k = 3',
    "tied experts": "tie_embeddings = true\n" + MOE + "n_expert_groups = 4\nn_limited_groups = 2",
}
MODELS = {
    "plain": "",
    "tied": "tie_embeddings = true",
    "everything": "qk_norm = true\nattention_bias = true\nsliding_window = 24\nlogit_soft_cap = 5.0\n",
    **MIXTURES,
}


def draw(generator: random.Random, models: list[str]) -> tuple[int, str, str]:
    """Draw (world, model, config) of one layout, valid or not."""
    choose = generator.choice
    world = choose([2, 4, 4, 8])
    model = choose(models)
    degrees = {axis: choose([1, 2, 2, 4]) for axis in ("dp_replicate", "tp", "cp")}
    options = {
        **degrees,
        "sequence_parallel": choose(["true", "false"]),
        "loss_parallel": choose(["true", "false"]),
        "context": choose(['"allgather"', '"ulysses"', '"ring"']),
        "reshard_after_forward": choose(['"auto"', '"always"', '"never"']),
    }
    if model in MIXTURES:
        options |= {
            "ep": choose([1, 2, 4, 8]),
            "ep_node_size": choose(['"auto"', '"auto"', 1, 2]),
            "ep_overlap": choose(["false", "true"]),
            "data_parallel": choose(['"fsdp2"', '"fsdp2"', '"fsdp2"', '"zero2"', '"zero1"', '"ddp"']),
            "prefetch": choose([0, 1, 1, 2]),
            "defer_gradient_reduction": choose(["false", "false", "true"]),
        }
    parallel = "\n".join(f"{key} = {value}" for key, value in options.items())
    checkpointing = f"[activation_checkpoint]\nmode = {choose(['none', 'offload', 'full', 'selective'])!r}\n"
    compiled = choose(["false", "false", "true"])
    if model in MIXTURES and world == 8:
        compiled = "false"  # two graphs on each of eight ranks take minutes on two cores
    compilation = f'[compile]\nenabled = {compiled}\nbackend = "aot_eager_decomp_partition"\n'
    text = (
        tiny_config(parallel=parallel, model=MODELS[model], micro=choose([1, 2, 4]))
        + checkpointing
        + compilation
    )
    return world, model, text


def layouts(number: int, models: list[str]) -> Iterator[tuple[int, str, str]]:
    """Yield the first `number` valid layouts."""
    generator = random.Random(0)
    seen: set[tuple[int, str, str]] = set()
    while len(seen) < number:
        world, model, text = draw(generator, models)
        try:
            check_world(parse_toml_text(text), world)
        except UserError:
            continue
        if (world, model, text) not in seen:
            seen.add((world, model, text))
            yield world, model, text


def axes(case: tuple[int, str, str]) -> list[str]:
    parallel = parse_toml_text(case[2]).parallel
    sizes = {axis: getattr(parallel, axis) for axis in ("dp_replicate", "tp", "cp", "ep")}
    return [f"{axis}{size}" for axis, size in sizes.items() if size > 1]


def name(case: tuple[int, str, str]) -> str:
    world, model, text = case
    engine = parse_toml_text(text).parallel.data_parallel
    return "-".join([f"world{world}", model, *axes(case), *([] if engine == "fsdp2" else [engine])])


def cases(number: int, fast: tuple[int, ...], models: list[str]) -> list[Any]:
    """Return `number` layouts as test parameters. Those without an index in `fast` are slow tests."""
    drawn = list(layouts(number, models))
    # Layouts with most axes first. Eight ranks last, because they take long on two cores.
    drawn.sort(key=lambda case: (case[0] == 8, -len(axes(case))))
    marks = [() if place in fast else (pytest.mark.slow,) for place in range(len(drawn))]
    return [pytest.param(case, marks=m, id=name(case)) for case, m in zip(drawn, marks, strict=True)]
