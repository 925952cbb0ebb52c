"""A phase's changes to the model, in this process."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from forge.config import Phases, StepPlan, parse_toml_text
from forge.tools.verify.plain import plain_model
from forge.train.phases import apply_plan
from forge.train.state import SpikeWindow
from forge.train.trainer import Trainer
from tests.support.equivalence import tiny_config

PATTERN = """
layer_pattern = ["full", "sliding", "linear"]
sliding_window = 24
[model.linear_attention]
n_key_heads = 2
n_value_heads = 4
key_head_dim = 8
value_head_dim = 6
"""


def test_a_window_applies_only_to_sliding_window_layers() -> None:
    model = plain_model(parse_toml_text(tiny_config(model=PATTERN)))
    before = [block.attention.window for block in model.layers.values()]
    config = parse_toml_text(tiny_config(model=PATTERN.replace("24", "8")))
    apply_plan(Phases(config).at(0), None, [model], object())
    assert before[1] == 24
    assert [block.attention.window for block in model.layers.values()] == [before[0], 8, before[2]]


@pytest.mark.parametrize(
    ("changes", "clears", "new_limit"),
    [
        ({}, False, False),
        ({"lr": 0.5}, False, False),
        ({"weights": (1.0, 2.0)}, True, False),
        ({"seq_len": 16, "global_batch_size": 32}, True, True),
        ({"global_batch_size": 16}, False, False),
        ({"global_batch_size": 4}, True, False),
        ({"global_batch_size": 24}, False, True),
    ],
)
@pytest.mark.parametrize("restarted", [False, True])
def test_a_phase_forgets_the_level_of_the_loss_and_the_duration_of_steps(
    changes: dict[str, Any], clears: bool, new_limit: bool, restarted: bool
) -> None:
    """Otherwise all its steps may be spikes, or its longer steps may exceed the watchdog's limit for the old ones."""
    before: StepPlan = Phases(parse_toml_text(tiny_config())).at(0)
    spikes, compiled = SpikeWindow(entries=[(step, 1.0, 1.0) for step in range(9)]), []
    trainer: Any = SimpleNamespace(
        plan=replace(before, **changes) if changes else before,
        _previous=None if restarted else before,
        _last_plan=before,
        progress=SimpleNamespace(
            step=9, tokens=10_000, last_step_at=10_000 - before.tokens, last_kind=before.kind, spikes=spikes
        ),
        reporter=SimpleNamespace(phases=SimpleNamespace(may_compile=compiled.append)),
        process_last_result=lambda: None,
    )
    Trainer._prepare_change(trainer)
    # A new process has compiled nothing yet, and knows no duration.
    assert (not spikes.entries, bool(compiled)) == (clears, new_limit and not restarted)
