"""Pairs of features, and features with layouts, train four steps on simulated GPUs or are refused in one sentence."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import pytest

from tests.simulated_gpu import counting
from tests.simulated_gpu.needed import simulated_gpu
from tests.support import gpu_variants as variants
from tests.support.runs import Run

pytestmark = [simulated_gpu, pytest.mark.slow]

BAD_CONFIGURATION = 2


def compatible(first: list[str], second: list[str]) -> bool:
    """Return whether no key has two values."""
    one, other = (dict(option.split("=", 1) for option in options) for options in (first, second))
    return all(one[key] == other[key] for key in one.keys() & other.keys())


def run_pair(first: list[str], second: list[str], world: int, folder: Path) -> None:
    run = Run(folder, *first, *second, base=variants.BASE)
    codes = run.start(world=world).join()
    output = run.output()
    if codes == [BAD_CONFIGURATION] * world:
        assert "Traceback" not in output and output.count("forge: ") == 1, output
        pytest.skip(output.partition("forge: ")[2].strip())
    assert codes == [0] * world, output[-4000:]
    waits = set(counting.read(run.path)["waits"]) - variants.SPLITS - variants.OFFLOAD
    assert not waits, f"a step waits for the device in {', '.join(sorted(waits))}"


PAIRS = [
    pair for pair in combinations(variants.ONE, 2) if compatible(variants.ONE[pair[0]], variants.ONE[pair[1]])
]
# A quarter of about 1,100, because each takes four processes.
PLACED = [
    (feature, layout)
    for feature in variants.ONE
    for layout in variants.FOUR
    if compatible(variants.ONE[feature], variants.FOUR[layout])
][::4]


@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_two_features_on_one_gpu(first: str, second: str, tmp_path: Path) -> None:
    run_pair(variants.ONE[first], variants.ONE[second], 1, tmp_path)


@pytest.mark.parametrize(("feature", "layout"), PLACED)
def test_a_feature_over_four_gpus(feature: str, layout: str, tmp_path: Path) -> None:
    run_pair(variants.ONE[feature], variants.FOUR[layout], 4, tmp_path)
