"""Checkpoints opened while their run saves and removes them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from forge.checkpoint.folders import step_name
from forge.checkpoint.loading import TensorReader
from forge.runtime.errors import FAILED, UserError
from forge.tools.inference import open as opening
from tests.support.runs import Run

CPU = torch.device("cpu")
pytestmark = pytest.mark.processes


def removing(run: Run, monkeypatch: pytest.MonkeyPatch, module: object, name: str) -> None:
    """Make the first call of `module.name` remove the run's checkpoint of step 2 and bring back that of step 4."""
    folder, original = run.path / "checkpoints", getattr(module, name)
    newer = run.path / "newer"
    (folder / step_name(4)).rename(newer)

    def call(*args: object, **options: object) -> object:
        if newer.exists():
            newer.rename(folder / step_name(4))
            shutil.rmtree(folder / step_name(2))
        return original(*args, **options)

    monkeypatch.setattr(module, name, call)


@pytest.mark.parametrize("name", ["find_damage", "load"])
def test_a_checkpoint_removed_meanwhile_is_replaced_by_a_newer_one(
    tmp_path: Path, monkeypatch, name: str
) -> None:
    run = Run(tmp_path, "--train.steps=4")
    assert run() == 0
    removing(run, monkeypatch, opening, name)
    assert opening.open_checkpoint(run.path, CPU).step == 4


def test_a_removed_checkpoint_is_not_called_damaged(tmp_path: Path, monkeypatch) -> None:
    run = Run(tmp_path, "--train.steps=4")
    assert run() == 0
    from forge.checkpoint import loading

    removing(run, monkeypatch, loading, "find_damage")
    with pytest.raises(UserError, match="was removed by its run") as error:
        TensorReader.verified(run.path / "checkpoints" / step_name(2))
    assert error.value.exit_code == FAILED
