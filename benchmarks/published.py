"""Planned throughput of published runs, compared with the published figures.

    python benchmarks/published.py                  # all rows of benchmarks/published.toml; minutes
    python benchmarks/published.py --only "MPT"     # rows with this text in their name

Prints a table in Markdown. Rows are sorted by tokens per second. The planner was fitted to rows 1, 3, 5, and so on. The
other rows are held out.
"""

from __future__ import annotations

import argparse
import sys
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # works from a clone, installed or not

from forge.config import Config, check_world, load_config
from forge.tools.plan.hardware import Hardware, find_hardware
from forge.tools.plan.plan import Plan, make_plan
from scripts.options import exit_code_of

FILE = Path(__file__).with_name("published.toml")
# A row counts as within BAR if its planned figure differs from the published figure by at most this fraction.
BAR = 0.15


@dataclass(frozen=True)
class Row:
    """A published run. tokens_per_s: per GPU. differs: known differences between the run and forge's plan."""

    name: str
    source: str
    hardware: str
    gpus: int
    tokens_per_s: float
    config: str
    overrides: list[str] = field(default_factory=list)
    differs: str = ""

    def loaded(self) -> Config:
        """Return the configuration of the run."""
        return load_config([f"--config={self.config}", *(f"--{override}" for override in self.overrides)])

    def plan(self, hardware: Hardware) -> Plan:
        """Return forge's plan of the run on `hardware`."""
        config = self.loaded()
        return make_plan(config, check_world(config, self.gpus), hardware)


def read(path: Path = FILE) -> tuple[list[Row], dict[str, Hardware]]:
    """Return the rows sorted by tokens per second, and hardware name -> hardware of the rows."""
    found = tomllib.loads(path.read_text("utf-8"))
    rows = sorted((Row(**row) for row in found["row"]), key=lambda row: row.tokens_per_s)
    changed = found.get("hardware", {})
    return rows, {row.hardware: _hardware(changed.get(row.hardware, {"base": row.hardware})) for row in rows}


def _hardware(keys: dict[str, Any]) -> Hardware:
    base = find_hardware(keys["base"]).model_dump()
    return Hardware.model_validate(base | {key: value for key, value in keys.items() if key != "base"})


def is_fitted(number: int) -> bool:
    """Return whether the planner was fitted to the row with this number, counted from 0."""
    return number % 2 == 0


def line(number: int, row: Row, planned: float) -> str:
    """Return a line of the table. planned: tokens per second per GPU."""
    error = planned / row.tokens_per_s - 1
    half = "fitted" if is_fitted(number) else "held out"
    return f"| {row.name} | {row.tokens_per_s:,.0f} | {planned:,.0f} | {error:+.0%} | {half} |"


def compare(only: str) -> int:
    """Print the table, and the number of rows within BAR. Return the exit code: 1 if no row's name contains `only`."""
    rows, hardware = read()
    print("| run | published | planned | error | half |\n|---|---|---|---|---|")
    within: dict[bool, list[bool]] = {True: [], False: []}
    for number, row in enumerate(rows):
        if only in row.name:
            speed = row.plan(hardware[row.hardware]).speed
            assert speed is not None
            planned = speed.tokens_per_second / row.gpus
            within[is_fitted(number)].append(abs(planned / row.tokens_per_s - 1) <= BAR)
            print(line(number, row, planned), flush=True)
    for fitted, found in within.items():
        print(f"\n{'fitted' if fitted else 'held out'}: {sum(found)} of {len(found)} within {BAR:.0%}")
    return 0 if any(within.values()) else 1


def main(arguments: list[str] | None = None) -> int:
    """Print the comparison and return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="rows whose name contains this")
    given = parser.parse_args(arguments)
    return exit_code_of(lambda: compare(given.only))


if __name__ == "__main__":
    sys.exit(main())
