"""The layout for the available processes: the config's own, or the first matching fallback."""

from __future__ import annotations

import pytest

from forge.config import choose_layout, load_command, parse_command_line
from forge.runtime.errors import UserError

BASE = [
    "--config=debug.toml",
    "--train.global_batch_size=24",
    "--train.micro_batch_size=4",
    "--parallel.tp=2",
]
FALLBACKS = '--parallel.fallbacks=["train.micro_batch_size=2","parallel.tp=1 train.micro_batch_size=1"]'


def chosen(world: int, *options: str):
    command = parse_command_line([*BASE, *options])
    return choose_layout(command, load_command(command), world)


def test_a_matching_layout_is_used_unchanged() -> None:
    config, degrees, fallback = chosen(4, FALLBACKS)
    assert (config.parallel.tp, degrees.dp_shard, degrees.accumulation, fallback) == (2, 2, 3, "")


def test_the_first_matching_fallback_is_used_with_all_its_keys() -> None:
    config, degrees, fallback = chosen(8, FALLBACKS)
    assert (config.train.micro_batch_size, degrees.tp, degrees.accumulation) == (2, 2, 3)
    assert fallback == "train.micro_batch_size=2"
    config, degrees, fallback = chosen(3, FALLBACKS)
    assert (degrees.tp, degrees.dp_shard, degrees.accumulation) == (1, 3, 8)
    assert fallback == "parallel.tp=1 train.micro_batch_size=1"


def test_a_fallback_also_limits_the_microbatches_of_phases() -> None:
    ends = "{until_tokens=65536,micro_batch_size=3},{until_tokens=131072,micro_batch_size=1},{until_tokens=262144}"
    phases = f"--phase=[{ends}]"
    config, _, fallback = chosen(8, FALLBACKS, phases)
    assert fallback == "train.micro_batch_size=2"
    assert [phase.micro_batch_size for phase in config.phase] == [1, 1, 2]
    config, _, fallback = chosen(2, FALLBACKS, phases)
    assert [phase.micro_batch_size for phase in config.phase] == [3, 1, None] and not fallback


def test_without_a_matching_fallback_the_error_is_the_layouts() -> None:
    with pytest.raises(UserError, match=r"parallel\.dp_shard .* none of the 2 parallel\.fallbacks"):
        chosen(5, FALLBACKS)
    with pytest.raises(UserError, match=r"^parallel\.dp_shard (?!.*fallbacks)"):
        chosen(3)


def test_an_invalid_fallback_or_one_that_changes_results_is_refused() -> None:
    for text in ("train.steps=5", "parallel.tp", "optimizer.lr=1 parallel.tp=1"):
        with pytest.raises(UserError, match=r"parallel\.fallbacks"):
            chosen(2, f'--parallel.fallbacks=["{text}"]')
    with pytest.raises(UserError, match=r'parallel\.fallbacks, "parallel\.tp=0"'):
        chosen(2, '--parallel.fallbacks=["parallel.tp=0"]')
