"""A random run with a change of layout halfway has the metrics of the same run in one process, in float64."""

from pathlib import Path

import pytest

from forge.config import to_toml
from tests.support.layouts import slow_unless
from tests.support.random_runs import draw_run, numbers, write_tokens
from tests.support.runs import Run

# Seeds on two ranks (`make test` draws the first), and seeds of the slow tests.
NARROW = 2
SLOW = 40


def check(folder: Path, seed: int, worlds: tuple[int, ...]) -> None:
    write_tokens(folder)
    config, first, second = draw_run(seed, worlds, folder)
    print(first.name, "then", second.name, to_toml(config))

    def run(name: str, text: str) -> Run:
        (folder / f"{name}.toml").write_text(text)
        return Run(folder / name, f"--config={folder / name}.toml", "--run.name=run", base=[])

    alone = run("alone", to_toml(config))
    assert alone() == 0
    changing = run("changing", first.text(config))
    assert changing("--train.steps=2", world=first.world) == 0
    (folder / "changing.toml").write_text(second.text(config))
    assert changing(world=second.world) == 0

    wanted, found = numbers(alone.metrics()), numbers(changing.metrics())
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        near = value if value is None else pytest.approx(value, rel=1e-7, abs=1e-9)
        assert found[name] == near, name


@pytest.mark.parametrize("seed", [pytest.param(s, marks=slow_unless(s == 0)) for s in range(NARROW)])
def test_a_run_on_two_ranks(tmp_path: Path, seed: int) -> None:
    check(tmp_path, seed, (2,))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1000, 1000 + SLOW))
def test_a_run_on_some_ranks(tmp_path: Path, seed: int) -> None:
    check(tmp_path, seed, (2, 4, 4))
