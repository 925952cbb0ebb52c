"""Every shipped config is equal on each allowed axis, and with any optimizer on random layouts."""

from __future__ import annotations

import itertools
import random

import pytest

from forge.config import load_config
from forge.config.load import CONFIGS
from forge.tools.verify.layouts import AXES, Case, at_random, why_illegal
from forge.tools.verify.record import Settings
from forge.tools.verify.run import Verifier
from forge.tools.verify.shrink import shrink
from tests.tools.verify.algorithms import OPTIONS

pytestmark = pytest.mark.processes

SHIPPED = [path.stem for path in sorted(CONFIGS.glob("*.toml"))]
DEBUG = {
    "debug": Case.of({"dp_replicate": 2}),
    "moe_debug": Case.of({"dp_shard": 2, "ep": 2}),
    "mla_debug": Case.of({"pp": 2}),
    "hybrid_debug": Case.of({"cp": 2}),
    "k3_debug": Case.of({"pp": 2}),
}
DRAWN = 4


def verify(config: str, options: tuple[str, ...], cases: list[Case] | int, steps: int = 3) -> list[str]:
    """Return the names of equal layouts. cases: valid layouts, or the number of random ones."""
    small, _ = shrink(load_config(["--config", config, *options]))
    if isinstance(cases, int):
        cases = list(itertools.islice(at_random(small, [2, 4], seed=len(config)), cases))
    verifier = Verifier(
        small, Settings(steps=steps, lr=small.optimizer.lr, borders=True, uneven=True, held_out=True)
    )
    try:
        found = [verifier.check(case) for case in cases if why_illegal(small, case) is None]
    finally:
        verifier.close()
    for one in found:
        assert one.status == "equal", (config, options, one.case.name, one.finding or one.error)
    return [one.case.name for one in found]


# k3_debug also has linear-attention layers.
@pytest.mark.parametrize(
    "config", [pytest.param(one, marks=pytest.mark.slow) if one == "hybrid_debug" else one for one in DEBUG]
)
def test_a_debug_config_is_equal_on_a_layout(config: str) -> None:
    assert verify(config, (), [DEBUG[config]], steps=2) == [DEBUG[config].name]


@pytest.mark.slow
@pytest.mark.parametrize("config", SHIPPED)
def test_a_shipped_config_is_equal_on_each_axis(config: str) -> None:
    equal = verify(config, (), [Case.of({axis: 2}) for axis in AXES])
    print(f"\nequal: {len(equal)} of {config}")
    assert {"dp_shard=2", "dp_replicate=2", "cp=2", "tp=2", "pp=2"} <= set(equal)


@pytest.mark.slow
@pytest.mark.parametrize("config", SHIPPED)
def test_a_shipped_config_is_equal_with_a_drawn_optimizer_on_layouts_at_random(config: str) -> None:
    qk_norm = load_config(["--config", config]).model.qk_norm
    allowed = [name for name in OPTIONS if name != "qk_clip" or not qk_norm]
    option = random.Random(config).choice(allowed)
    equal = verify(config, OPTIONS[option], DRAWN)
    print(f"\nequal: {len(equal)} of {config} with {option}")
    assert len(equal) == DRAWN
