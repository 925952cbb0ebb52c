"""A layout is applied step by step, each once and in the order."""

from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

from forge.parallel import build
from forge.parallel.build import STEPS, Builder


@pytest.fixture
def applied(monkeypatch) -> list[str]:
    """The names of the steps that are applied; nothing else happens."""
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
    assert applied == ["context", "tensor", "expert", "float8", "blocks", "data"]
    assert [*applied, "allocate", "initialise"] == list(STEPS)


def test_a_step_twice_is_an_error_that_says_so(applied: list[str]) -> None:
    one = builder()
    one.apply("tensor")
    with pytest.raises(RuntimeError, match="tensor has been applied to this model already"):
        one.apply("tensor")
    assert applied == ["tensor"]


def test_a_step_after_one_that_must_follow_it_is_an_error_that_names_both(applied: list[str]) -> None:
    one = builder()
    one.apply("data")
    with pytest.raises(RuntimeError, match="float8 must be applied before data"):
        one.apply("float8")
