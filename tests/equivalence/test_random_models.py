"""Random models on random layouts equal one process."""

import pytest

from forge.config import parse_toml_text
from tests.support.equivalence import assert_equal, layout, reference
from tests.support.layouts import slow_unless
from tests.support.random_models import draw

# Seeds without the compiler on two ranks (`make test` draws the first), and seeds of the slow tests.
NARROW = 2
SLOW = 30


def check(seed: int, worlds: tuple[int, ...], compiles: bool) -> None:
    text, case = draw(seed, worlds, compiles)
    print(case.name, text)
    assert_equal(layout(case.text(parse_toml_text(text)), case.world), reference(text))


@pytest.mark.parametrize("seed", [pytest.param(s, marks=slow_unless(s == 0)) for s in range(NARROW)])
def test_a_model_on_two_ranks(seed: int) -> None:
    check(seed, (2,), False)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1000, 1000 + SLOW))
def test_a_model_on_some_ranks(seed: int) -> None:
    check(seed, (2, 4, 4, 8), True)
