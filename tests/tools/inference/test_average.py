"""The mean of checkpoints is a checkpoint of weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from forge.checkpoint import trained_config
from forge.checkpoint.folders import step_name
from forge.checkpoint.loading import TensorReader
from forge.runtime.errors import UserError
from forge.tools.inference.average import average
from tests.support.runs import EXPERTS, Run

pytestmark = pytest.mark.processes


def test_a_mean_has_the_mean_of_every_weight_and_a_run_starts_from_it(tmp_path: Path) -> None:
    run = Run(tmp_path / "one", *EXPERTS, "--train.steps=4", "--checkpoint.keep_last=0")
    assert run() == 0
    paths = [run.path / "checkpoints" / step_name(step) for step in (2, 4)]
    count = average(paths, tmp_path / "mean")
    readers, mean = [TensorReader(path) for path in paths], TensorReader(tmp_path / "mean")
    weights = [name for name in readers[0].tensors() if name.startswith("model.")]
    assert sorted(mean.tensors()) == sorted(weights) and count == len(weights)
    for name in weights:
        first, second = (reader.read(name) for reader in readers)
        if not first.is_floating_point():
            assert torch.equal(mean.read(name), second)
            continue
        first, second = first.double(), second.double()
        torch.testing.assert_close(mean.read(name).double(), (first + second) / 2, rtol=1e-6, atol=1e-7)
    later = Run(tmp_path / "two", *EXPERTS, "--train.steps=1", f"--checkpoint.init={tmp_path / 'mean'}")
    assert later() == 0
    with pytest.raises(UserError, match="exists already"):
        average(paths, tmp_path / "mean")
    other = Run(tmp_path / "three", *EXPERTS, "--train.steps=2", "--model.n_layers=1")
    assert other() == 0
    with pytest.raises(UserError, match=r"has another model than .*: model\.n_layers = 1"):
        average([*paths, other.path / "checkpoints" / step_name(2)], tmp_path / "none")


def test_checkpoints_before_and_after_a_change_that_a_resume_accepts_are_averaged(tmp_path: Path) -> None:
    paths = []
    for steps, std in ((2, 0.02), (4, 0.01)):
        options = f"--train.steps={steps}", f"--model.init_std={std}", "--checkpoint.keep_last=0"
        run = Run(tmp_path / "one", *options)
        assert run() == 0
        paths.append(run.path / "checkpoints" / step_name(steps))
    average(paths, tmp_path / "mean")
    assert trained_config(tmp_path / "mean").model.init_std == 0.01


def test_a_mean_has_the_window_of_the_last_phase(tmp_path: Path) -> None:
    run = Run(
        tmp_path / "one", "--train.steps=2", "--model.sliding_window=4", "--phase=[{sliding_window=24}]"
    )
    assert run() == 0
    average([run.path / "checkpoints" / step_name(2)], tmp_path / "mean")
    assert trained_config(tmp_path / "mean").model.sliding_window == 24
