"""A bit flip in one rank's weights is detected before the next save, even after a new gather."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from forge.config import parse_toml_text
from forge.optim import build_optimizer
from forge.parallel.layout import local_box
from forge.resilience.digests import differing_copies
from forge.shard import local
from forge.train.state import replicated_tensors
from tests.support.buffers import ENGINES, SMALL, backward, build, engine_config
from tests.support.harness import run_ranks

FLIPPED = "layers.1.feed_forward.w1.weight"
MIXED = ("float32", "bfloat16", "float32")


def _flip(model: Any, engine: Any) -> None:
    """Flip one bit of an element owned by another rank's optimizer."""
    engine.finish_parameter_sync()
    (shard,) = (shard for shard in model.shards if shard.name == FLIPPED)
    parameter = model.parts[0].get_parameter(FLIPPED)
    weights = local(parameter).detach()
    bits = weights.view({2: torch.int16, 4: torch.int32}[weights.element_size()]).view(-1)
    owns_first = local_box(parameter).offsets in [box.offsets for box in shard.boxes]
    bits[-1 if owns_first else 0] ^= 1 << 9


def _compared(
    rank: int, world: int, text: str, flipping: int | None, abandoned: bool = False
) -> list[list[str]]:
    """Return the differences after three steps, and after three more.

    flipping: rank with a bit flip in the second step. abandoned: a roll-back abandons the first two steps.
    """
    model, engine, batches = build(text, world)
    optimizer = build_optimizer(model.shards, parse_toml_text(text).optimizer)
    found = []
    for step in range(6):
        if step == 1 and rank == flipping:
            _flip(model, engine)
        elif step == 1:
            engine.finish_parameter_sync()
        backward(model, next(batches))
        optimizer.step(1e-3, torch.zeros(()))
        model.after_update()
        model.zero_gradients()
        if step == 1 and abandoned:
            model.discard_fingerprints()
        if step % 3 == 2:
            found.append(differing_copies(replicated_tensors(model, optimizer), torch.device("cpu")))
    return found


@pytest.mark.parametrize("formats", [("float32",) * 3, MIXED])
@pytest.mark.parametrize("engine", ["zero1", "zero2"])
def test_a_bit_flip_is_found_after_gathering_has_repaired_it(engine: str, formats) -> None:
    text = engine_config(engine, SMALL, formats=formats, batch=12)
    sentence = f"weights.{FLIPPED} on rank 1 differs from the other ranks"
    assert run_ranks(_compared, 3, text, 1) == [[[sentence], []]] * 3


def test_a_bit_flip_in_abandoned_steps_is_not_reported() -> None:
    text = engine_config("zero1", SMALL, formats=MIXED, batch=12)
    assert run_ranks(_compared, 3, text, 1, True) == [[[], []]] * 3


def test_a_bit_flip_is_found_after_ddp_has_cast_the_weights_again() -> None:
    differences, after = run_ranks(_compared, 2, engine_config("ddp", SMALL, formats=MIXED), 1)[0]
    assert differences == [f"weights.{FLIPPED} differs between the ranks 0, 1"] and after == []


@pytest.mark.parametrize(
    ("engine", "keys"),
    [
        *((engine, "") for engine in ENGINES),
        pytest.param("zero1", "tp = 2", marks=pytest.mark.slow),
        ("zero2", "dp_replicate = 2\ndp_shard = 2"),
        ("zero1", "cp = 2"),
    ],
)
def test_equal_ranks_are_not_reported(engine: str, keys: str) -> None:
    text = engine_config(engine, keys + SMALL, formats=MIXED)
    assert run_ranks(_compared, 4 if keys else 2, text, None)[0] == [[], []]


def test_tensor_parallel_ranks_are_compared_with_ranks_of_the_same_shard() -> None:
    text = engine_config("zero1", "tp = 2" + SMALL, formats=MIXED)
    for differences, after in run_ranks(_compared, 4, text, 1):
        assert differences == [f"weights.{FLIPPED} differs between the ranks 1, 3"] and after == []
