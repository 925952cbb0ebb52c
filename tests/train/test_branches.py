"""A branch from a plateau may end at any step, but its decay may not begin before the branch."""

from __future__ import annotations

from pathlib import Path

import pytest

from forge.config import Config, load_config, to_toml
from forge.run.changes import compare_for_resume
from forge.runtime.errors import UserError


def config_of(steps: int, fraction: float = 0.2) -> Config:
    options = [f"--train.steps={steps}", f"--schedule.decay_fraction={fraction}", "--schedule.warmup_steps=5"]
    return load_config(["--config=debug", *options])


@pytest.fixture
def stem(tmp_path: Path) -> Path:
    """Return a checkpoint of a run with a plateau up to step 800."""
    (tmp_path / "config.toml").write_text(to_toml(config_of(1000)))
    return tmp_path


def test_a_shorter_branch_decays_from_a_checkpoint_of_the_plateau(stem: Path) -> None:
    compare_for_resume(stem, 400, config_of(500), branch=True)
    compare_for_resume(stem, 400, config_of(480, fraction=1 / 6), branch=True)


def test_a_decay_before_the_branch_is_refused_with_a_valid_fraction(stem: Path) -> None:
    with pytest.raises(UserError, match=r"the decay begins after step 360;.*decay_fraction = 0\.111"):
        compare_for_resume(stem, 400, config_of(450), branch=True)
    compare_for_resume(stem, 400, config_of(450, fraction=0.111), branch=True)
    compare_for_resume(stem, 400, config_of(450))


def test_a_branch_from_a_decaying_stem_continues(stem: Path) -> None:
    compare_for_resume(stem, 900, config_of(950), branch=True)
