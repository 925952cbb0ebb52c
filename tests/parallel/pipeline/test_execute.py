"""A pipeline step sends, gathers, reduces and computes only the necessary, at the right time."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from benchmarks.collectives import Collectives
from forge.model import Attention
from forge.parallel.pipeline.schedule import Action
from forge.runtime import compat
from tests.support.building import built, built_on_nan
from tests.support.harness import run_ranks
from tests.support.layouts import SCHEDULES, pipeline_text, slow_unless


def _sent(rank: int, world: int, text: str) -> dict[str, Any]:
    """Return the second step's collectives and messages, in order, and the model's number of units."""
    one = built(text, world)
    model, meshes, batches = one.model, one.meshes, one.batches()
    for step in range(2):
        batch = next(batches)
        with Collectives() as calls:
            tokens = model.count_tokens(batch)
            model.forward_backward(batch, tokens)
            model.finalize_gradients()
        model.zero_gradients()
        if step == 0:
            model.after_update()
    sharded = [part for part in model.parts if isinstance(part, FSDPModule)]
    groups = [group for part in sharded for group in compat.fsdp_parameter_groups(part)]
    return {
        "pp": meshes.pp.rank(),
        "names": [name for name, _ in calls.calls],
        "units": len({id(group) for group in groups}),
    }


# Schedule -> messages sent by a rank of two: one activation and one gradient per stage boundary and microbatch.
@pytest.mark.parametrize(
    ("schedule", "messages"),
    [
        ("1F1B", 4),
        pytest.param("GPipe", 4, marks=pytest.mark.slow),
        pytest.param("Interleaved1F1B", 12, marks=pytest.mark.slow),
        ("ZBVZeroBubble", 8),
    ],
)
def test_each_parameter_is_gathered_and_reduced_once_per_step(schedule: str, messages: int) -> None:
    """pp = 2, FSDP over 2 ranks, four microbatches: one message for each stage boundary, microbatch and direction."""
    for one in run_ranks(_sent, 4, pipeline_text(2, schedule)):
        number = Counter(one["names"])
        assert number["all_gather"] == number["reduce_scatter"] == one["units"]
        # Valid tokens before the step, losses after it.
        assert number["all_reduce"] == 2
        assert number["send"] == messages and number["recv"] == messages
        assert set(number) == {"all_gather", "reduce_scatter", "all_reduce", "send", "recv"}


def test_gradients_are_reduced_during_the_last_backward() -> None:
    for one in run_ranks(_sent, 4, pipeline_text(2, "1F1B")):
        names = one["names"]
        if one["pp"] == 1:  # this rank sends its last gradient after its last backward
            assert max(i for i, name in enumerate(names) if name == "send") > names.index("reduce_scatter")


def test_tied_ends_cost_one_message_there_and_one_back() -> None:
    results = run_ranks(_sent, 2, pipeline_text(2, "1F1B", "tied"))
    number = [Counter(one["names"]) for one in results]
    # Eight microbatches; the copy's gradient goes to the first stage.
    assert (number[0]["send"], number[0]["recv"]) == (8, 9)
    assert (number[1]["send"], number[1]["recv"]) == (9, 8)


def test_tied_ends_on_one_rank_cost_none() -> None:
    plain, tied = (
        run_ranks(_sent, 2, pipeline_text(2, "ZBVZeroBubble", model)) for model in ("plain", "tied")
    )
    for one, other in zip(plain, tied, strict=True):
        assert Counter(one["names"]) == Counter(other["names"])


def _computed(rank: int, world: int, text: str) -> set[int]:
    """Return the distinct numbers of attention calls of this rank's blocks in a step."""
    one = built(text, world)
    model = one.model
    counts: Counter[int] = Counter()
    for part in model.parts:
        for name, block in part.layers.items():
            attention = block.attention
            assert isinstance(attention, Attention)

            def counted(x, shared, name=int(name), forward=attention.forward):
                counts[name] += 1
                return forward(x, shared)

            attention.forward = counted
    batch = next(one.batches())
    model.forward_backward(batch, model.count_tokens(batch))
    return set(counts.values())


@pytest.mark.parametrize(
    "schedule",
    [pytest.param(one, marks=slow_unless(one in ("1F1B", "ZBVZeroBubble"))) for one in SCHEDULES],
)
def test_a_block_is_computed_once_per_microbatch_and_once_more_under_checkpointing(schedule: str) -> None:
    """In particular, a schedule with separate input and weight gradients does not recompute per weight."""
    more = "[activation_checkpoint]\nmode = 'full'"
    assert run_ranks(_computed, 2, pipeline_text(2, schedule)) == [{8}] * 2
    assert run_ranks(_computed, 2, pipeline_text(2, schedule, more=more)) == [{16}] * 2


def _held(rank: int, world: int, text: str) -> dict[str, int]:
    one = built(text, world)
    model = one.model
    batch = next(one.batches())
    tokens = model.count_tokens(batch)
    most = {"now": 0, "most": 0}
    from forge.parallel.pipeline import execute

    do = execute._ProgramRun.do

    def watched(self: Any, action: Action) -> None:
        do(self, action)
        most["now"] = len(self.outputs)
        most["most"] = max(most["most"], most["now"])

    execute._ProgramRun.do = watched  # type: ignore[method-assign]
    model.forward_backward(batch, tokens)
    return most


def test_only_microbatches_between_forward_and_backward_are_in_memory() -> None:
    """1F1B holds as many microbatches as ranks follow, GPipe all."""
    assert [one["most"] for one in run_ranks(_held, 2, pipeline_text(2, "1F1B"))] == [2, 1]
    assert [one["most"] for one in run_ranks(_held, 2, pipeline_text(2, "GPipe"))] == [8, 8]
    assert all(one["now"] == 0 for one in run_ranks(_held, 2, pipeline_text(2, "ZBVZeroBubble")))


@pytest.mark.parametrize(
    ("model", "schedule"),
    [
        pytest.param("tied experts", "1F1B", marks=pytest.mark.slow),
        ("tied experts", "ZBVZeroBubble"),
        ("everything", "1F1B"),
        pytest.param("everything", "ZBVZeroBubble", marks=pytest.mark.slow),
    ],
)
def test_initialisation_overwrites_memory_full_of_nan(schedule: str, model: str) -> None:
    text = pipeline_text(2, schedule, model)
    single = run_ranks(built_on_nan, 1, text.replace("pp = 2", "pp = 1"))[0]
    found: set[str] = set()
    for of_rank in run_ranks(built_on_nan, 2, text):
        for name, tensor in of_rank.items():
            assert torch.equal(tensor, single[name]), name
        found |= of_rank.keys()
    assert found == single.keys()
