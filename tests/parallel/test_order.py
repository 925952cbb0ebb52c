"""A layout is applied step by step, each once and in the order."""

import pytest
from torch import nn

from forge.parallel.order import STEPS, take_step


def test_all_steps_in_the_order_pass() -> None:
    model = nn.Module()
    for step in STEPS:
        take_step(model, step)


def test_a_step_twice_is_an_error_that_says_so() -> None:
    model = nn.Module()
    take_step(model, "tensor")
    with pytest.raises(RuntimeError, match="tensor has been applied to this model already"):
        take_step(model, "tensor")


def test_a_step_after_one_that_must_follow_it_is_an_error_that_names_both() -> None:
    model = nn.Module()
    take_step(model, "data")
    with pytest.raises(RuntimeError, match="float8 must be applied before data"):
        take_step(model, "float8")
