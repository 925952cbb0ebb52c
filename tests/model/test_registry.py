"""Models by registered name and by import path."""

from __future__ import annotations

import pytest

from forge.model import Transformer, build_model
from forge.runtime.errors import UserError
from tests.support.small_models import small_config


class OtherModel(Transformer):
    pass


def test_a_registered_model_and_an_import_path_are_built() -> None:
    assert type(build_model(small_config(), 8)) is Transformer
    other = build_model(
        small_config(kind="tests.model.test_registry:OtherModel"), 8, layers=range(1), head=False
    )
    assert type(other) is OtherModel
    assert list(other.layers) == ["0"]


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(UserError, match=r'"transfomer" is not a model.*did you mean "transformer"'):
        build_model(small_config(kind="transfomer"), 8)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("no.such.module:Model", "no.such.module cannot be imported"),
        ("forge.model:Transformr", "forge.model has no class Transformr; did you mean"),
        (":", "cannot be imported"),
        ("json:dumps", "json has no class dumps"),
        ("pathlib:Path", "is not a module class"),
    ],
)
def test_an_import_path_without_a_model_is_a_user_error(kind: str, reason: str) -> None:
    with pytest.raises(UserError, match=f'model.kind = "{kind}".*{reason}'):
        build_model(small_config(kind=kind), 8)
