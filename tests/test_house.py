"""Imports go down only, files stay readable, and the architecture page names existing files and functions."""

import ast
import functools
import pkgutil
import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from dataclasses import FrozenInstanceError
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
import torch

from forge.runtime import tools
from forge.shard import Shard
from tests.support import sizes

ROOT = Path(__file__).parents[1]
FORGE = ROOT / "forge"
GROUND = {"runtime", "hook", "batch", "shard", "config", "model"}
MIDDLE = {"parallel", "data", "optim", "checkpoint", "resilience", "observe"}
CORE = GROUND | MIDDLE | {"train", "run"}
TOOLS = {"prepare", "hf", "inference", "plan", "verify", "report", "sweep", "elastic"}
MAY_IMPORT = {
    "runtime": set(),
    "hook": {"runtime"},
    "batch": set(),
    "shard": set(),
    "config": {"runtime"},
    "model": {"runtime", "config"},
    **{room: GROUND for room in MIDDLE},
    "train": GROUND | MIDDLE,
    "run": GROUND | MIDDLE | {"train"},
    # Training code does not import tools, and tools do not import each other.
    **{f"tools/{tool}": CORE for tool in TOOLS},
    "tools": set(),
}
FILES = sorted(FORGE.rglob("*.py"))
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in FILES
}
DIALECT = re.compile(
    r"\b(alike|anew|befalls?|befell|hither|last words|setbacks?|thereof|whence|whoever|whomever|in vain)\b",
    re.IGNORECASE,
)
# Code that replaces a class, hides state, or imports only for types.
HIDDEN = re.compile(r"\.__class__ = |__dict__\[[\"']_forge|TYPE_CHECKING")


@pytest.mark.long
def test_each_room_imports_only_from_itself_and_from_below() -> None:
    for path in FILES:
        room = room_of(path.relative_to(FORGE).with_suffix("").parts)
        if room != "__init__":
            above = rooms_imported(path) - MAY_IMPORT[room] - {room}
            assert not above, f"{path.relative_to(ROOT)} imports {sorted(above)}"


@functools.cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def rooms_imported(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= (
                {f"{node.module}.{alias.name}" for alias in node.names}
                if node.module == "forge"
                else {node.module}
            )
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return {room_of(tuple(name.split(".")[1:])) for name in names if name.startswith("forge.")}


def room_of(parts: tuple[str, ...]) -> str:
    """Return the room of the module `forge.PARTS`: its folder in forge/, or in forge/tools/."""
    return "/".join(parts[:2]) if parts[0] == "tools" and parts[1] in TOOLS else parts[0]


def test_training_code_names_tools_in_one_file() -> None:
    names = re.compile(r"[\"']forge\.tools\.")
    outside = [path for path in FILES if not path.is_relative_to(FORGE / "tools")]
    assert [path for path in outside if names.search(path.read_text())] == [FORGE / "runtime" / "tools.py"]
    for value in vars(tools).values():
        if isinstance(value, str) and value.startswith("forge.tools."):
            module, _, name = value.partition(":")
            assert module in MODULES and (not name or f" {name}(" in MODULES[module].read_text())


def test_the_model_sees_only_its_own_section_of_the_config() -> None:
    for path in (FORGE / "model").rglob("*.py"):
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("forge.config"):
                assert node.module == "forge.config.model", path


@pytest.mark.long
def test_no_modules_import_each_other_in_a_circle() -> None:
    imports = {name: modules_imported(name) for name in MODULES}
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))


def modules_imported(name: str) -> set[str]:
    """Return the modules of forge imported before `name`, parent packages included."""
    found = set()
    for node in at_import(tree(MODULES[name]).body):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"{name} imports relatively"
            submodules = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= submodules & MODULES.keys() or {node.module}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    parents = {package for one in found for package in packages_of(one)} - packages_of(name)
    return ((found | parents) & MODULES.keys()) - {name}


def packages_of(name: str) -> set[str]:
    parts = name.split(".")
    return {".".join(parts[:end]) for end in range(1, len(parts))}


def at_import(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements executed at import."""
    for statement in body:
        yield statement
        if isinstance(statement, ast.If | ast.Try | ast.With):
            for field in ("body", "orelse", "finalbody", "handlers"):
                for inner in getattr(statement, field, []):
                    yield from at_import(inner.body if isinstance(inner, ast.ExceptHandler) else [inner])


CODE = [*FILES, *(path for room in ("scripts", "benchmarks") for path in (ROOT / room).rglob("*.py"))]


def test_a_class_name_means_one_class() -> None:
    paths = [path for path in CODE if not path.is_relative_to(ROOT / "benchmarks")]
    names = Counter(node.name for path in paths for node in tree(path).body if isinstance(node, ast.ClassDef))
    assert not [name for name, count in names.items() if count > 1]


def test_only_tests_import_unittest() -> None:
    imports = re.compile(r"^\s*(import|from) unittest", re.MULTILINE)
    assert not [path for path in CODE if imports.search(path.read_text())]


def test_one_function_makes_the_optimizer_step() -> None:
    calls = re.compile(r"(?<!def )clip_gradients\(")
    assert [path for path in CODE if calls.search(path.read_text())] == [FORGE / "train" / "step.py"]


def test_a_shard_is_immutable() -> None:
    with pytest.raises(FrozenInstanceError):
        Shard.whole("w", torch.zeros(2)).heads = 2  # type: ignore[misc]


def test_no_class_is_replaced_no_state_is_hidden_and_no_import_is_for_types_alone() -> None:
    found = [str(path.relative_to(ROOT)) for path in FILES if HIDDEN.search(path.read_text())]
    assert not found


def test_only_one_file_replaces_the_forwards_of_blocks() -> None:
    replaces = re.compile(r"\.(forward|attend|feed)(, \w+\.\w+)* = (?!sdpa_attention)")
    found = [path for path in (FORGE / "parallel").rglob("*.py") if replaces.search(path.read_text())]
    # Context parallelism sets the attention function, an extension point of the model; logits.py wraps it to observe.
    assert {path.relative_to(FORGE / "parallel").as_posix() for path in found} == {
        "blocks.py",
        "context/__init__.py",
        "logits.py",
    }


def test_a_file_can_be_read_in_one_sitting() -> None:
    for path in FILES:
        assert len(path.read_text().splitlines()) <= sizes.MAX_FILE_LINES, path


def test_the_architecture_page_names_functions_in_the_files_that_hold_them() -> None:
    page = (ROOT / "docs" / "internals" / "architecture.md").read_text()
    rows = re.findall(r"^\| `([\w.]+)` \| `(forge/[\w/]+\.py)` \|", page, re.M)
    assert len(rows) > 20
    for name, file in rows:
        found = pkgutil.resolve_name(f"{file.removesuffix('.py').replace('/', '.')}:{name}")
        assert found.__module__.replace(".", "/") + ".py" == file, name


@pytest.mark.long
def test_no_dialect() -> None:
    kinds = ("*.py", "*.md", "*.toml")
    folders = ("forge", "scripts", "docs", "configs", "tests", "benchmarks")
    pages = [path for folder in folders for kind in kinds for path in (ROOT / folder).rglob(kind)]
    pages = [
        path for path in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *pages] if path != Path(__file__)
    ]
    found = {str(path.relative_to(ROOT)): DIALECT.findall(path.read_text()) for path in pages}
    assert not {path: words for path, words in found.items() if words}


@pytest.mark.long
def test_no_test_imports_from_another_test() -> None:
    for path in (ROOT / "tests").rglob("*.py"):
        homes = ("tests.support.", ".".join(path.relative_to(ROOT).parent.parts) + ".")
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tests"):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
                others = [name for name in names if ".test_" in name or not name.startswith(homes)]
                assert not others, (
                    f"{path.relative_to(ROOT)} imports {others}: shared code stands in tests/support"
                )


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a clone")
def test_git_tracks_no_ignored_file() -> None:
    """A tracked link in place of an ignored folder, e.g. `data`, would delete the folder at a checkout."""
    command = ["git", "-C", str(ROOT), "ls-files", "--cached", "--ignored", "--exclude-standard"]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    assert not found.stdout
