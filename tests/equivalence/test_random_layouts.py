"""Random layouts equal one process. `make test` runs a few, `make test-all` all."""

import functools

import pytest

from tests.support.equivalence import WholeRecord, assert_equal, layout, reference, tiny_config
from tests.support.random_layouts import MIXTURES, MODELS, cases

# Number of layouts, and indices of cheap ones for the fast tests, for dense models and mixtures of experts.
DENSE, FAST_DENSE, MIXED, FAST_MIXED = 40, (2,), 30, (2,)


@functools.cache
def expected(model: str) -> WholeRecord:
    return reference(tiny_config(model=MODELS[model]))


@pytest.mark.parametrize("case", cases(DENSE, FAST_DENSE, [m for m in sorted(MODELS) if m not in MIXTURES]))
def test_a_random_layout(case: tuple[int, str, str]) -> None:
    world, model, text = case
    assert_equal(layout(text, world), expected(model))


@pytest.mark.parametrize("case", cases(MIXED, FAST_MIXED, sorted(MIXTURES)))
def test_a_random_layout_of_experts(case: tuple[int, str, str]) -> None:
    world, model, text = case
    assert_equal(layout(text, world), expected(model))
