"""Set the marker `processes` from the code of each test, and enforce it at run time.

The search starts at the test, its fixtures and its parameters, and follows names into other functions of `tests`. A
reference to the fork server's helpers, `subprocess` or `os.fork` sets the marker. The search skips forge: if forge itself
starts the process, the test sets the marker explicitly. Starting a process without the marker fails the test.
"""

from __future__ import annotations

import functools
import inspect
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from types import CodeType, FunctionType, ModuleType
from typing import Any

import pytest

from tests.support.harness import run_ranks, start_ranks

STARTERS = (run_ranks, start_ranks, subprocess)
AUDITED = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system"}

started: list[str] = []


def starts_processes(item: pytest.Item) -> bool:
    """Return whether the test, its fixtures or its parameters refer to one of STARTERS or `os.fork`, also indirectly."""
    roots: list[Any] = [getattr(item, "function", None)]
    fixtures = getattr(item, "_fixtureinfo", None)
    if fixtures is not None:
        roots += [definition.func for each in fixtures.name2fixturedefs.values() for definition in each]
    if hasattr(item, "callspec"):
        roots += list(item.callspec.params.values())
    return any(_reaches(root) for root in roots)


def _reaches(root: Any) -> bool:
    waiting, seen = [root], set()
    while waiting:
        one = waiting.pop()
        if any(one is starter for starter in STARTERS):
            return True
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, FunctionType | functools.partial | type) or callable(one):
            waiting += _named(one)
    return False


@functools.cache
def _named(one: Any) -> list[Any]:
    """Return the objects named in the code of a function or class of `tests`."""
    if isinstance(one, functools.partial):
        return [one.func, *one.args]
    if isinstance(one, type):
        own = (one.__module__ or "").startswith("tests.")
        return [*one.__bases__, *vars(one).values()] if own else []
    if isinstance(one, staticmethod | classmethod | property):
        return [one.__func__] if not isinstance(one, property) else [one.fget]
    inner = getattr(getattr(one, "hypothesis", None), "inner_test", None) or getattr(one, "__wrapped__", None)
    if inner is None and hasattr(one, "_get_wrapped_function"):
        inner = one._get_wrapped_function()
    if inner is not None:
        return [inner]
    if not isinstance(one, FunctionType) or not (one.__module__ or "").startswith("tests."):
        return []
    names = set(_names(one.__code__))
    found = [one.__globals__[name] for name in names if name in one.__globals__]
    for module in [
        each for each in found if isinstance(each, ModuleType) and each.__name__.startswith("tests.")
    ]:
        found += [getattr(module, name) for name in names if hasattr(module, name)]
    cells = [cell.cell_contents for cell in one.__closure__ or ()]
    return [*found, *cells, *([subprocess] if "fork" in names else [])]


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if inspect.iscode(constant):
            yield from _names(constant)


def watch() -> None:
    """Record, from this call on, every process started by this interpreter in `started`."""

    def audit(event: str, arguments: tuple) -> None:
        if event in AUDITED:
            started.append(f"{event} {arguments[0] if arguments else ''}".rstrip())

    sys.addaudithook(audit)
    start = BaseProcess.start

    @functools.wraps(start)
    def recorded(self: BaseProcess) -> None:
        started.append(f"multiprocessing {self.name}")
        start(self)

    BaseProcess.start = recorded  # type: ignore[method-assign]
