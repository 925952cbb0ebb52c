"""Every shipped config loads and fits the number of processes in its first line."""

import re

import pytest

from forge.config import check_world, load_config
from forge.config.load import CONFIGS
from forge.model import parameter_counts
from forge.parallel.build import build_meta_model

SHIPPED = sorted(path.stem for path in CONFIGS.glob("*.toml"))


def test_the_promised_configs_exist() -> None:
    assert {"debug", "160m", "1b", "7b", "13b", "70b", "moe_debug", "moe_16b"} <= set(SHIPPED)


@pytest.mark.parametrize("name", SHIPPED)
def test_it_fits_the_hardware_in_its_first_line(name: str) -> None:
    first_line = (CONFIGS / f"{name}.toml").read_text().splitlines()[0]
    named = re.match(r"# For (\d+) process(?:es)?: ", first_line)
    assert named, f"{name}.toml must begin with the hardware that it is for"
    config = load_config(["--config", name])
    assert check_world(config, int(named[1])).accumulation >= 1
    assert config.run.name == name


SIZES = {
    "160m": (0.15e9, 0.17e9),
    "1b": (1.2e9, 1.3e9),
    "7b": (7.9e9, 8.1e9),
    "13b": (13e9, 13.6e9),
    "70b": (70e9, 71e9),
    "moe_16b": (15.5e9, 16.6e9),
}


@pytest.mark.parametrize("name", SIZES)
def test_its_size_matches_its_name(name: str) -> None:
    total = parameter_counts(build_meta_model(load_config(["--config", name]))).total
    assert SIZES[name][0] < total < SIZES[name][1]


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_debug_runs_on_a_few_processes(processes: int) -> None:
    assert check_world(load_config(["--config", "debug"]), processes).dp == processes
