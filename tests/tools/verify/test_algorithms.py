"""The reference runs the same algorithm as a layout, so every optimizer with its options is equal on every kind of model."""

from __future__ import annotations

import random

import pytest

from forge.config import load_config
from forge.tools.verify.layouts import parse_layouts, why_illegal
from forge.tools.verify.record import Settings
from forge.tools.verify.run import Outcome, Verifier
from forge.tools.verify.shrink import shrink
from tests.tools.verify.algorithms import (
    BF16,
    CAUTIOUS,
    CLIP,
    EMA,
    HEADS,
    HERE,
    INT8,
    LION,
    MUON,
    MUP,
    NEURON,
    OPTIONS,
    POLAR,
    SHAMPOO,
)  # fmt: skip

pytestmark = pytest.mark.processes

MODELS = ("debug", "moe_debug", "mla_debug", "hybrid_debug", "k3_debug")
LAYOUTS = (
    "dp_shard=2",
    "dp_shard=2 ep=2",
    "tp=2",
    "cp=2",
    "pp=2",
    "dp_shard=2 data_parallel=zero1",
    "tp=2 ep=2",
)

# Each model, optimizer and option at least once.
FEW = {
    "moe_debug, dp_shard=2": (*MUON, NEURON, HEADS, CLIP),
    "mla_debug, dp_shard=2": (*MUON, CLIP, CAUTIOUS, POLAR, EMA, *MUP),
    "hybrid_debug, dp_shard=2 data_parallel=zero1": (*MUON, HEADS, NEURON),
    "debug, dp_shard=2": (*LION, BF16),
    "debug, dp_shard=2 data_parallel=zero1": (INT8, EMA),
    "debug, dp_shard=2 data_parallel=zero2": (SHAMPOO,),
}


def outcomes(model: str, options: tuple[str, ...], *layouts: str) -> list[Outcome]:
    config = load_config(["--config", model, *options])
    small, notes = shrink(config)
    # A config's own qk_clip clips nothing in a small model, so shrinking lowers it.
    assert all(note.startswith("optimizer.muon.qk_clip ") for note in notes)
    verifier = Verifier(small, Settings(steps=2, lr=0.01, borders=True, uneven=True, held_out=True))
    cases = [case for layout in layouts for case in parse_layouts(layout) if not why_illegal(small, case)]
    assert cases
    try:
        return [verifier.check(case) for case in cases]
    finally:
        verifier.close()


def assert_equal(found: list[Outcome]) -> None:
    for one in found:
        assert one.status == "equal", (one.case.name, one.finding or one.error)
        assert one.compared > 100 and "optimizer" in one.largest


@pytest.mark.parametrize("case", FEW)
def test_every_algorithm_is_equal_on_some_layout(case: str) -> None:
    model, layout = case.split(", ")
    few_layers = ("--model.n_layers=2",) if model != "hybrid_debug" else ()
    assert_equal(outcomes(model, (*FEW[case], *few_layers), layout))


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("option", OPTIONS)
def test_each_option_is_equal_on_drawn_layouts_of_each_model(model: str, option: str) -> None:
    drawn = random.Random(f"{model} {option}").sample(LAYOUTS, len(LAYOUTS))
    axes = [
        layout for layout in drawn if "ep" not in layout or model in ("moe_debug", "mla_debug", "k3_debug")
    ]
    assert_equal(outcomes(model, OPTIONS[option], *axes[:2]))


@pytest.mark.slow
def test_a_module_called_twice_per_microbatch_is_compared_call_by_call() -> None:
    for one in outcomes("debug", (f"--model.kind={HERE}:Looped",), "dp_shard=2", "tp=2"):
        assert one.status == "equal" and not one.unplaced, one.finding or one.error
