"""The steps that a layout needs are applied once each, in order."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from forge.parallel import build
from forge.parallel.build import apply_layout

STEPS = ("context", "tensor", "expert", "float8", "blocks", "casts", "data")
OFF = {
    "cp": 1,
    "tp": 1,
    "moe": None,
    "float8": "none",
    "float8_dispatch": False,
    "mode": "none",
    "enabled": False,
    "loss": False,
}


@pytest.fixture
def applied(monkeypatch) -> list[str]:
    """Replace all steps by stubs; return the list of applied names."""
    names: list[str] = []
    for step in STEPS:
        function = {"casts": "cast_at_borders", "data": "apply_data_parallel"}.get(step, f"apply_{step}")
        monkeypatch.setattr(build, function, lambda *_, step=step: names.append(step))
    monkeypatch.setattr(build, "plan_units", lambda *_: ([], {}))
    return names


def layout(**changes: Any) -> Any:
    """Return a layout that needs no optional step, except for `changes`, keys of OFF."""
    keys = SimpleNamespace(**OFF | changes)
    cp, tp = (SimpleNamespace(size=lambda size=size: size) for size in (keys.cp, keys.tp))
    return SimpleNamespace(
        meshes=SimpleNamespace(cp=cp, tp=tp),
        model=keys,
        precision=keys,
        activation_checkpoint=keys,
        compile=keys,
        compute=torch.float32,
    )


def test_all_steps_are_applied_in_the_order(applied: list[str]) -> None:
    apply_layout(nn.Module(), layout(cp=2, tp=2, moe={}, float8="rowwise", mode="full"))  # type: ignore[arg-type]
    assert applied == list(STEPS)


@pytest.mark.parametrize(
    ("changes", "needed"),
    [
        ({}, None),
        ({"cp": 2}, "context"),
        ({"tp": 2}, "tensor"),
        ({"moe": {}}, "expert"),
        ({"float8": "rowwise"}, "float8"),
        ({"float8_dispatch": True}, "float8"),
        ({"mode": "selective"}, "blocks"),
        ({"enabled": True}, "blocks"),
        ({"loss": True}, "blocks"),
    ],
)
def test_only_the_needed_steps_are_applied(applied: list[str], changes: dict, needed: str | None) -> None:
    apply_layout(nn.Module(), layout(**changes))  # type: ignore[arg-type]
    assert applied == [step for step in STEPS if step in (needed, "casts", "data")]
