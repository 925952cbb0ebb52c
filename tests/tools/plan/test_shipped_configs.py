"""The hardware named in the first line of a shipped config agrees with its plan, and its choices are near the fastest."""

import re

import pytest

from forge.config import Config, check_world, load_config
from forge.config.load import CONFIGS
from forge.runtime.errors import UserError
from forge.tools.plan.hardware import Hardware, find_hardware
from forge.tools.plan.layouts import DEFER, RESHARD, Changes, value_of, with_changes
from forge.tools.plan.plan import make_plan
from forge.tools.plan.search import usable_bytes

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


def test_most_configs_name_their_hardware() -> None:
    assert len({name for name, _, _ in claims()}) >= 10


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("name", "world", "card"), claims())
def test_it_fits_on_its_gpus(name: str, world: int, card: str) -> None:
    config, hardware = load_config(["--config", name]), find_hardware(card)
    needed = make_plan(config, check_world(config, world), hardware).worst.needed
    assert needed <= hardware.memory_bytes, f"{needed / 2**30:.1f} GiB"


def choices(config: Config, world: int) -> dict[str, Changes]:
    """Return other choices with the same numbers, by name. HSDP: one copy of the state per node."""
    nodes = world // 8
    return {
        "weights gathered once a step": {RESHARD: "never"},
        "gradients reduced once a step": {DEFER: True},
        "both once a step": {RESHARD: "never", DEFER: True},
        "zero1": {"parallel.data_parallel": "zero1"},
        "HSDP": {"parallel.dp_replicate": nodes, "parallel.dp_shard": -1},
        "larger microbatches": {"train.micro_batch_size": 2 * config.train.micro_batch_size},
        "less recomputation": {"activation_checkpoint.mode": "selective"},
        "no recomputation": {"activation_checkpoint.mode": "none"},
        "FSDP alone": {
            "parallel.tp": 1,
            "activation_checkpoint.mode": "full",
            "train.micro_batch_size": 2 * config.train.micro_batch_size,
        },
    }


def planned(config: Config, world: int, hardware: Hardware) -> tuple[float, bool]:
    """Return the seconds of a step, and whether a search would offer this layout: it leaves memory free."""
    made = make_plan(config, check_world(config, world), hardware)
    assert made.speed is not None
    return made.speed.step_s, made.worst.needed <= usable_bytes(hardware)


# A plan of kimi-k3 takes eight minutes.
FIRST_CLAIMS = [
    claim for name, claim in {claim[0]: claim for claim in reversed(claims())}.items() if name != "kimi-k3"
]


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("name", "world", "card"), FIRST_CLAIMS)
def test_no_single_choice_saves_a_fifth_of_the_planned_step(name: str, world: int, card: str) -> None:
    config, hardware = load_config(["--config", name]), find_hardware(card)
    own, _ = planned(config, world, hardware)
    faster = {}
    for choice, changes in choices(config, world).items():
        if all(value_of(config, key) == value for key, value in changes.items()):
            continue
        try:
            seconds, fits = planned(with_changes(config, changes), world, hardware)
        except UserError:
            continue  # no legal layout
        if fits and seconds < 0.8 * own:
            faster[choice] = seconds
    assert not faster, f"{own:.2f} s as shipped"
