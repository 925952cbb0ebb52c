"""docs/internals/performance.md quotes the plans of the shipped layouts."""

from __future__ import annotations

import pytest

from forge.config import check_world, load_config
from forge.tools.plan.hardware import find_hardware
from forge.tools.plan.plan import make_plan
from forge.tools.plan.show import as_json
from tests.support.pages import REPOSITORY

PAGE = REPOSITORY / "docs" / "internals" / "performance.md"
LAYOUTS = {
    "llama3-8b": 64,
    "llama3-70b": 256,
    "qwen3-30b-a3b": 64,
    "qwen3-next-80b-a3b": 128,
    "deepseek-v3": 1024,
}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", LAYOUTS)
def test_the_row_of_a_shipped_layout_is_its_plan(name: str) -> None:
    world = LAYOUTS[name]
    config = load_config(["--config", name])
    time = as_json(make_plan(config, check_world(config, world), find_hardware("h100")))["time"]
    seconds = (f"{time[key]:.1f}" for key in ("step_s", "compute_s", "communication_s"))
    row = f"| `{name}` | {world} | {' | '.join(seconds)} | {time['mfu']:.2f} |"
    assert row in PAGE.read_text("utf-8"), row
