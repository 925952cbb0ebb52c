"""EMA of the weights: its formula, exact skips, and equality with one process on any layout."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from forge.checkpoint import read_state
from forge.checkpoint.folders import step_name
from forge.checkpoint.loading import TensorReader
from forge.config.schema import OptimizerConfig
from forge.optim import build_optimizer
from forge.runtime.errors import UserError
from forge.shard import Shard
from forge.tools.inference.average import average
from tests.support.runs import EXPERTS, FLOAT64, Run

GO, SKIP = torch.tensor(0.0), torch.tensor(1.0)
KEPT = ["--optimizer.ema=0.9", "--checkpoint.keep_last=0"]


def make(decay: float) -> tuple[Shard, OptimizerConfig]:
    parameter = torch.nn.Parameter(torch.randn(3, 4, generator=torch.Generator().manual_seed(0)))
    parameter.grad = torch.ones(3, 4)
    return Shard.whole("layers.0.w", parameter), OptimizerConfig(ema=decay)


def test_the_mean_follows_its_formula_and_skipped_steps_change_nothing() -> None:
    shard, config = make(decay=0.2)
    optimizer = build_optimizer([shard], config)
    means = {slot: values for slot, _, values in optimizer.tensors()}
    assert set(means) == {"exp_avg", "exp_avg_sq", "ema"}
    wanted = shard.data.double()
    for updates in range(4):
        optimizer.step(0.1, GO)
        decay = min(0.2, (1 + updates) / (10 + updates))
        wanted = decay * wanted + (1 - decay) * shard.data.double()
        before = means["ema"].clone()
        optimizer.step(0.1, SKIP)
        assert torch.equal(means["ema"], before)
    torch.testing.assert_close(means["ema"].double(), wanted, rtol=1e-6, atol=1e-7)
    assert optimizer.state() == {"updates": 4, "averaged": 4}


def test_a_phase_changes_the_decay_and_the_optimizers_own_keys() -> None:
    shard, config = make(decay=0.9)
    optimizer = build_optimizer([shard], config)
    optimizer.follow(config.model_copy(update={"ema": 0.0, "weight_decay": 5.0}))  # type: ignore[attr-defined]
    before = shard.data.clone()
    optimizer.step(0.1, GO)
    means = {slot: values for slot, _, values in optimizer.tensors()}
    assert torch.equal(means["ema"], shard.data)
    # Changes by AdamW's first update and by lr * weight_decay.
    torch.testing.assert_close(shard.data, before * (1 - 0.1 * 5.0) - 0.1)


def test_state_is_restored() -> None:
    shard, config = make(decay=0.9)
    optimizer = build_optimizer([shard], config)
    optimizer.load_state({"updates": 3, "averaged": 3})
    assert optimizer.state() == {"updates": 3, "averaged": 3}


@pytest.mark.processes
def test_a_run_moved_to_other_layouts_keeps_the_mean_and_average_uses_it(
    tmp_path: Path,
) -> None:
    whole, moved = Run(tmp_path / "whole", *FLOAT64, *KEPT), Run(tmp_path / "moved", *FLOAT64, *KEPT)
    assert whole() == 0
    assert moved("--train.steps=5", "--parallel.tp=2", world=2) == 0
    assert moved("--parallel.data_parallel=zero1", world=2) == 0
    last = step_name(whole.metrics()[-1]["step"])
    paths = [run.path / "checkpoints" / last for run in (whole, moved)]
    one, other = map(TensorReader, paths)
    means = [name for name in one.tensors() if name.endswith(".ema")]
    assert len(means) > 10
    for name in means:
        torch.testing.assert_close(other.read(name), one.read(name), rtol=0, atol=1e-9)
    average([paths[0]], tmp_path / "mean", ema=True)
    made = TensorReader(tmp_path / "mean")
    for name in means:
        weights = "model." + name.removeprefix("optimizer.").removesuffix(".ema")
        torch.testing.assert_close(made.read(weights), one.read(name), rtol=0, atol=1e-15)
        assert not torch.equal(made.read(weights), one.read(weights))
    without = Run(tmp_path / "without", "--train.steps=1")
    assert without() == 0
    with pytest.raises(UserError, match="has no moving average of the weights"):
        average([without.path / "checkpoints" / step_name(1)], tmp_path / "none", ema=True)


@pytest.mark.processes
def test_enabling_or_disabling_the_mean_keeps_the_moments(tmp_path: Path) -> None:
    whole, changed = Run(tmp_path / "whole"), Run(tmp_path / "changed")
    assert whole("--train.steps=6", "--checkpoint.interval=1", "--checkpoint.keep_last=0") == 0
    assert changed("--train.steps=2") == 0
    assert changed("--train.steps=4", *KEPT) == 0
    assert (
        "step-00000002 lacks the optimizer state ema, which starts from its initial values"
        in changed.output()
    )
    with_mean = changed.path / "checkpoints" / step_name(4)
    assert read_state(with_mean)["optimizer"] == {"updates": 4, "averaged": 2}
    assert changed("--train.steps=6") == 0
    ours, theirs = (TensorReader(run.path / "checkpoints" / step_name(6)) for run in (changed, whole))
    assert ours.tensors() == theirs.tensors()
    assert all(torch.equal(ours.read(name), theirs.read(name)) for name in ours.tensors())
    # The mean began at the weights of step 2, with a share of 1/10 x 2/11 after steps 3 and 4.
    before, third, fourth, same = (
        TensorReader(run.path / "checkpoints" / step_name(step)).read("model.norm.weight").double()
        for run, step in ((whole, 2), (whole, 3), (whole, 4), (changed, 4))
    )
    wanted = 2 / 11 * (before / 10 + 9 / 10 * third) + 9 / 11 * fourth
    mean = TensorReader(with_mean).read("optimizer.norm.weight.ema")
    torch.testing.assert_close(mean.double(), wanted, rtol=1e-6, atol=1e-7)
    assert torch.equal(fourth, same)


@pytest.mark.processes
def test_experts_have_means_and_tensors_without_one_are_copied(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", *EXPERTS, *KEPT, "--train.steps=2", "--model.moe.bias_update_rate=0.01")
    assert run() == 0
    path = run.path / "checkpoints" / step_name(2)
    average([path], tmp_path / "mean", ema=True)
    saved, made = TensorReader(path), TensorReader(tmp_path / "mean")
    names = [name for name in saved.tensors() if name.startswith("model.")]
    plain = [n for n in names if f"optimizer.{n.removeprefix('model.')}.ema" not in saved.tensors()]
    assert any(saved.read(name).is_floating_point() for name in plain)
    assert any(".experts." in name for name in set(names) - set(plain))
    for name in plain:
        assert torch.equal(made.read(name), saved.read(name))


def test_the_mean_of_a_run_from_initial_weights_begins_at_them(tmp_path) -> None:
    """After one step the mean is within one update of the loaded weights, without a share of random initial weights."""
    first = Run(tmp_path / "first", "--run.seed=1")
    assert first("--train.steps=2") == 0
    origin = first.path / "checkpoints" / step_name(2)
    run = Run(tmp_path / "second", *KEPT, f"--checkpoint.init={origin}", "--run.seed=2")
    assert run("--train.steps=1", "--optimizer.lr=1e-6") == 0
    loaded, mean = TensorReader(origin), TensorReader(run.path / "checkpoints" / step_name(1))
    name = "layers.0.attention.wq.weight"
    torch.testing.assert_close(
        mean.read(f"optimizer.{name}.ema"), loaded.read(f"model.{name}"), rtol=0, atol=1e-4
    )
