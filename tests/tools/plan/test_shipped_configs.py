"""The hardware named in the first line of a shipped config agrees with its plan."""

import re

import pytest

from forge.config import check_world, load_config
from forge.config.load import CONFIGS
from forge.tools.plan.hardware import find_hardware
from forge.tools.plan.plan import make_plan

CARDS = {"80": "h100", "141": "h200", "192": "b200"}
FIRST = re.compile(r"# For (\d+) process(?:es)?: .*GPUs with (\d+) GB\.(?: By count it fits on (\d+)\.)?")


def claims() -> list[tuple[str, int, str]]:
    """Return (config, number of processes, GPU) of every claim."""
    found = []
    for path in sorted(CONFIGS.glob("*.toml")):
        if match := FIRST.match(path.read_text("utf-8")):
            sizes = [int(number) for number in match.group(1, 3) if number]
            found += [(path.stem, size, CARDS[match[2]]) for size in sizes]
    return found


def test_most_configs_say_what_they_are_for() -> None:
    assert len({name for name, _, _ in claims()}) >= 10


@pytest.mark.slow
@pytest.mark.parametrize(("name", "world", "card"), claims())
def test_it_fits_on_the_cards_that_it_is_for(name: str, world: int, card: str) -> None:
    config, hardware = load_config(["--config", name]), find_hardware(card)
    needed = make_plan(config, check_world(config, world), hardware).worst.needed
    assert needed <= hardware.memory_bytes, f"{needed / 2**30:.1f} GiB"
