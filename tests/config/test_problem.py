"""A problem is a value with fields. One function renders its sentence."""

from __future__ import annotations

import pytest

from forge.config.checks import check
from forge.config.explain import Values
from forge.config.keys import read_toml
from forge.config.load import examine
from forge.config.problem import Problem, raise_all
from forge.runtime.errors import UserError
from tests.support.configs import TINY


def test_a_sentence_has_key_value_source_rule_remedy_and_phase() -> None:
    one = Problem(("a", 0, "b"), "must be 1", "use 1", value="x" * 99, source="command line", phase=2)
    head, _, tail = str(one).partition(" ... ")
    assert head == f'a[0].b = "{"x" * 75}'
    assert tail == "(command line): must be 1; use 1 (in phase 2)"
    assert str(Problem(("a",), "missing")) == "a: missing"


def test_several_problems_are_one_error() -> None:
    raise_all([])
    with pytest.raises(UserError, match=r"^2 errors in the configuration:\n  a: missing\n  b: missing$"):
        raise_all([Problem(("a",), "missing"), Problem(("b",), "missing")])


def test_a_check_names_its_compared_keys() -> None:
    tree = read_toml(TINY)
    tree["model"]["n_kv_heads"] = 3
    config, (one,) = examine(Values(tree, "file"))
    assert (one.key, one.value, one.source) == (("model", "n_kv_heads"), 3, "file [model]")
    assert one.others == (("model", "n_heads"),) and check(config)[0].remedy == "use one of 1, 2, 4, 8"
    tree["model"]["n_heads"] = "8"
    assert [problem.key for problem in examine(Values(tree, "file"))[1]] == [("model", "n_heads")]
