"""The steps of a layout are applied once each, in order."""

from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

from forge.parallel import build
from forge.parallel.build import STEPS, Builder


@pytest.fixture
def applied(monkeypatch) -> list[str]:
    """Replace all steps by stubs; return the list of applied names."""
    names: list[str] = []

    def note(step: str) -> Callable[..., Any]:
        return lambda model, layout: names.append(step)

    monkeypatch.setattr(build, "APPLY", {step: note(step) for step in build.APPLY})
    monkeypatch.setattr(build, "NEEDED", {})
    return names


def builder() -> Builder:
    return Builder(nn.Module(), None)  # type: ignore[arg-type]


def test_all_steps_are_applied_in_the_order(applied: list[str]) -> None:
    one = builder()
    one.apply_all()
    for step in STEPS[len(applied) :]:
        one.begin(step)
    assert applied == ["context", "tensor", "expert", "float8", "blocks", "casts", "data"]
    assert [*applied, "allocate", "initialise"] == list(STEPS)


def test_a_repeated_step_is_an_error(applied: list[str]) -> None:
    one = builder()
    one.apply("tensor")
    with pytest.raises(RuntimeError, match="tensor has been applied to this model already"):
        one.apply("tensor")
    assert applied == ["tensor"]


def test_steps_in_the_wrong_order_are_an_error_naming_both(applied: list[str]) -> None:
    one = builder()
    one.apply("data")
    with pytest.raises(RuntimeError, match="float8 must be applied before data"):
        one.apply("float8")
