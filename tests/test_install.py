"""The package installs with each extra under constraints.txt, and runs on systems without Linux-only calls."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from forge.config.keys import read_toml
from forge.runtime.cores import cores

ROOT = Path(__file__).parents[1]
PROJECT = read_toml((ROOT / "pyproject.toml").read_text())["project"]


@pytest.mark.slow
@pytest.mark.parametrize("extra", ["", *PROJECT["optional-dependencies"]])
def test_each_extra_can_be_installed_under_the_constraints(extra: str) -> None:
    """pip resolves versions and installs nothing. A conflict is a pip error, or minutes of search."""
    own = [*PROJECT["dependencies"], *(PROJECT["optional-dependencies"].get(extra, []))]
    needed = [one for one in own if not one.startswith("forge[")]
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--dry-run",
        "--ignore-installed",
        "--no-input",
        "--quiet",
    ]
    constrained = [*command, "-c", str(ROOT / "constraints.txt"), *needed]
    ended = subprocess.run(constrained, capture_output=True, text=True, timeout=500, check=False)
    if "No matching distribution" in ended.stderr and "ResolutionImpossible" not in ended.stderr:
        pytest.skip("no package index can be reached, or it lacks a package")
    assert ended.returncode == 0, ended.stderr


def test_cores_are_counted_on_a_system_without_affinity(monkeypatch) -> None:
    assert 1 <= cores() <= (os.cpu_count() or 1)
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    assert cores() == os.cpu_count()
    for folder in ("forge", "scripts", "benchmarks"):
        for path in (ROOT / folder).rglob("*.py"):
            assert "sched_getaffinity" not in path.read_text() or path.name == "cores.py", path


def test_the_constraints_of_the_simulated_gpu_differ_in_pytorch_only() -> None:
    plain, cuda = (
        (ROOT / name).read_text().splitlines() for name in ("constraints.txt", "constraints-cuda.txt")
    )
    assert [line for line in plain if not line.startswith("torch==")] == [
        line for line in cuda if not line.startswith("torch==")
    ]
