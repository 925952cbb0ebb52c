"""Checkpoints by rank 0's clock, the default without checkpoint keys."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

from tests.support.runs import BASE, Run


def test_all_ranks_save_after_the_same_step_by_rank_0s_clock(tmp_path) -> None:
    """Rank 0's clock advances ten minutes per step: 30 minutes end in step 3, and all ranks know it in step 4."""
    run = Run(tmp_path)
    run._options = without_interval(tmp_path)
    patch = "tests.end_to_end.test_saving_by_time:ten_minutes_a_step"
    assert run.start("--train.steps=10", "--checkpoint.keep_last=0", world=2, patch=patch).join() == [0, 0]
    assert run.checkpoints() == [f"step-{step:08d}" for step in (4, 8, 10)]
    assert [event["step"] for event in run.events("saved")] == [4, 8, 10]


def test_interval_0_and_interval_minutes_0_save_at_the_end_only(tmp_path) -> None:
    patch = "tests.end_to_end.test_saving_by_time:ten_minutes_a_step"
    for name, option in (
        ("steps", "--checkpoint.interval=0"),
        ("minutes", "--checkpoint.interval_minutes=0"),
    ):
        run = Run(tmp_path / name)
        run._options = without_interval(tmp_path / name)
        assert run.start(option, patch=patch).join() == [0]
        assert run.checkpoints() == ["step-00000010"]


def without_interval(folder: Path) -> list[str]:
    """Return the options of every test run, with a config file without checkpoint keys."""
    import forge.config.load as load

    shipped = (load.CONFIGS / "debug.toml").read_text()
    before, _, after = shipped.partition("[checkpoint]\n")
    file = folder / "silent.toml"
    file.write_text(before + "[checkpoint]\n" + after[after.index("\n[") :])
    rest = [option for option in BASE if not option.startswith(("--config", "--checkpoint.interval"))]
    return [f"--config={file}", f"--run.output_dir={folder}", *rest]


def ten_minutes_a_step() -> None:
    """Advance rank 0's clock. The other clocks stand still, so only rank 0 can request the save."""
    import forge.run.save as save

    now = 0.0

    def step(self, number: int) -> None:
        nonlocal now
        now += 600.0
        before(self, number)

    before = save.Saves.before_gradients
    if os.environ.get("RANK", "0") == "0":
        save.Saves.before_gradients = step
    save.time = SimpleNamespace(monotonic=lambda: now)
