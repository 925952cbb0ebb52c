"""Layouts are compared through phases of one or two steps, with different batch sizes, lengths, rates and windows."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch.distributed as dist

from forge.config import Degrees, Phases, load_config, to_toml
from forge.tools.verify import record
from forge.tools.verify.layouts import parse_layouts
from forge.tools.verify.record import Settings
from forge.tools.verify.run import Verifier
from forge.tools.verify.shrink import for_layout, shrink, steps_through
from tests.support.configs import write

PHASED = [
    "--model.sliding_window=16",
    "--train.steps=100",
    "--data.sources=[{path='synthetic'},{path='synthetic'}]",
    "--optimizer.ema=0.9",
    "--phase=[{until_tokens=1000,global_batch_size=4,seq_len=16,document_mask=true,sliding_window=8},"
    "{until_tokens=9000,ramp='linear',global_batch_size=24,weights=[3.0,1.0],lr=1e-3,"
    "weight_decay=0.5,betas=[0.8,0.9],ema=0.5,sliding_window=32}]",
]


@functools.cache
def verifier(folder: Path) -> Verifier:
    small, _ = shrink(load_config(["--config", write(folder), *PHASED]))
    return Verifier(small, Settings(steps=steps_through(small), lr=0.01, borders=True, uneven=True))


@pytest.fixture(scope="module")
def phased(tmp_path_factory) -> Verifier:
    return verifier(tmp_path_factory.mktemp("phased"))


def test_each_phase_is_a_step_and_a_ramp_is_two(tmp_path) -> None:
    small, notes = shrink(load_config(["--config", write(tmp_path), *PHASED]))
    assert any("each phase has one step (two with a ramp)" in note for note in notes)
    plans = record.plans_of(small, steps_through(small))
    assert [(plan.global_batch_size, plan.seq_len) for plan in plans] == [(4, 32), (4, 64), (8, 64), (8, 64)]
    assert [plan.document_mask for plan in plans] == [True, False, False, False]
    decays = [plan.optimizer.weight_decay for plan in plans]
    assert decays[0] == decays[1] == decays[3] < decays[2] < 0.5
    large = for_layout(
        small, Degrees(pp=2, dp_replicate=1, dp_shard=8, cp=2, tp=4, ep=1, world=128, accumulation=1)
    )
    assert len(large.phase) == 2 and steps_through(large) == 4
    assert all(plan.global_batch_size % 16 == 0 for _, plan in Phases(large).stretches())
    assert "phase" not in to_toml(shrink(load_config(["--config", write(tmp_path)]))[0])


@pytest.mark.processes
@pytest.mark.parametrize(
    "layout",
    [
        "dp_shard=2",
        *(
            pytest.param(layout, marks=pytest.mark.slow)
            for layout in ("tp=2", "cp=2", "pp=2", "dp_shard=2 data_parallel=zero2", "tp=2 pp=2", "cp=2 tp=2")
        ),
    ],
)
def test_layouts_are_equal_through_phases(phased: Verifier, layout: str) -> None:
    (case,) = parse_layouts(layout)
    found = phased.check(case)
    assert found.status == "equal", found.finding or found.error


@pytest.mark.processes
def test_a_rank_in_another_phase_is_found(phased: Verifier) -> None:
    (case,) = parse_layouts("dp_shard=2")
    found = phased.patched(behind).check(case)
    assert found.status == "different" and found.finding is not None
    # The first step belongs to the first phase, and its window is not in force.
    assert found.finding.difference.step == 1 and "attention" in found.finding.culprit


def behind() -> None:
    """Plant: no phase takes effect in the second process."""
    into_force = record.apply_plan
    record.apply_plan = lambda *what: None if dist.get_rank() else into_force(*what)
