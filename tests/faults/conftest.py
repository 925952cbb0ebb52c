"""Undisturbed runs, the references of the disturbed ones."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest

from tests.support.runs import Run


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Run]:
    """Return `undisturbed(*options, world=n)`: a finished run of these options, cached."""

    @functools.cache
    def make(*options: str, world: int = 1) -> Run:
        run = Run(tmp_path_factory.mktemp("undisturbed"), *options)
        assert run(world=world) == 0, run.output()
        return run

    return make
