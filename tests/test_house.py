"""Imports go down only, and files stay small enough to read."""

import ast
from pathlib import Path

import pytest

FORGE = Path(__file__).parents[1] / "forge"
GROUND = {"errors", "files", "shard", "compat", "fault", "distributed", "config", "model"}
MIDDLE = {"parallel", "data", "optim", "checkpoint", "resilience", "observe"}
CORE = GROUND | MIDDLE | {"train"}
MAY_IMPORT = {
    "errors": set(),
    "files": set(),
    "fault": set(),
    "compat": set(),
    "shard": set(),
    "distributed": {"compat", "errors"},
    "config": {"errors"},
    "model": {"errors", "config"},
    **{room: GROUND for room in MIDDLE},
    "train": GROUND | MIDDLE | {"inference"},
    # Satellites: the core does not import them, and they do not import each other.
    "prepare": CORE,
    "hf": CORE,
    "inference": CORE,
}
FILES = sorted(FORGE.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(FORGE)))
def test_a_file_imports_only_from_its_own_room_and_from_below(path: Path) -> None:
    room = path.relative_to(FORGE).parts[0].removesuffix(".py")
    if room == "__init__":
        return
    imported = {name for name in rooms_imported(path) if name != room}
    assert imported <= MAY_IMPORT[room], f"{path.name} reaches for {sorted(imported - MAY_IMPORT[room])}"


def rooms_imported(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= (
                {f"{node.module}.{alias.name}" for alias in node.names}
                if node.module == "forge"
                else {node.module}
            )
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return {name.split(".")[1] for name in names if name.startswith("forge.")}


def test_the_model_sees_only_its_own_section_of_the_config() -> None:
    for path in (FORGE / "model").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("forge.config"):
                assert node.module == "forge.config.model", path


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(FORGE)))
def test_a_file_can_be_read_in_one_sitting(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 450
