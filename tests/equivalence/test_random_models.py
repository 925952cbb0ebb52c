"""Models drawn at random compute on layouts drawn at random what one process computes."""

import pytest

from forge.config import parse_toml_text
from tests.support.equivalence import assert_equal, layout, reference
from tests.support.random_models import draw

# `make test` draws these without the compiler, on two ranks.
FAST = 2
SLOW = 30


def check(seed: int, worlds: tuple[int, ...], compiles: bool) -> None:
    text, case = draw(seed, worlds, compiles)
    print(case.name, text)
    assert_equal(layout(case.text(parse_toml_text(text)), case.world), reference(text))


@pytest.mark.parametrize("seed", range(FAST))
def test_a_model_on_two_ranks(seed: int) -> None:
    check(seed, (2,), False)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1000, 1000 + SLOW))
def test_a_model_on_some_ranks(seed: int) -> None:
    check(seed, (2, 4, 4, 8), True)
