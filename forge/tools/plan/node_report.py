"""Compare the measurements of all ranks (`forge/tools/plan/node.py`) with the rates assumed by a plan."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from forge.tools.plan.collectives import Collective
from forge.tools.plan.estimate import PACES, seconds_of
from forge.tools.plan.hardware import Hardware
from forge.tools.plan.links import cost_of
from forge.tools.plan.node import COLLECTIVES, IN_A_NODE, RankChecks, Sizes, attention_flops
from forge.tools.plan.work import Work

# Default required fractions of the planned rates. They are the slow end of the plan's range.
COMPUTE, LINKS = (round(1 / pace, 2) for pace in (PACES[-1].compute, PACES[-1].links))
# A GPU must report at least this share of the memory in the hardware file. Drivers reserve different amounts.
MEMORY = 0.98


@dataclass(frozen=True)
class Check:
    """The rates of one check over all ranks, in `unit`. status: "ok", "slow", "wrong", or "no figure" (not compared).

    planned: the planned rate; None if the hardware is unknown. ratio: `slowest` divided by `planned`. least: the smallest
    ratio that passes. rank, host: of the slowest rank.
    """

    name: str
    unit: str
    slowest: float
    median: float
    planned: float | None
    ratio: float | None
    least: float
    rank: int
    host: str
    status: str

    @property
    def collective(self) -> bool:
        return is_collective(self.name)

    def is_slow(self, rate: float) -> bool:
        return self.planned is not None and rate < self.least * self.planned

    def describe(self, rate: float) -> str:
        return f"{self.name}: {rate:.4g} {self.unit}, below {self.least:g} times the planned {self.planned:.4g} {self.unit}"


def is_collective(name: str) -> bool:
    """Return whether the check named `name` measures a collective, e.g. "all_gather in a node"."""
    return name.partition(" ")[0] in COLLECTIVES


def compare(
    records: Sequence[RankChecks], hardware: Hardware | None, sizes: Sizes, *, compute: float, links: float
) -> list[Check]:
    """Return a Check for each measurement. hardware: the source of planned rates; None: compare nothing.

    compute, links: required fractions of the planned rates, for kernels and for collectives.
    """
    return [
        _check(records, name, hardware, sizes, links if is_collective(name) else compute)
        for name in records[0].timed
    ]


def _check(
    records: Sequence[RankChecks], name: str, hardware: Hardware | None, sizes: Sizes, least: float
) -> Check:
    timed = [record.timed[name] for record in records]
    unit, scale = ("TFLOP/s", 1e12) if name in ("matrix product", "attention") else ("GB/s", 1e9)
    worst = max(records, key=lambda record: record.timed[name].seconds)
    amount, seconds = timed[0].amount / scale, worst.timed[name].seconds
    planned = None if hardware is None else planned_s(name, records, sizes, hardware)
    ratio = planned / seconds if planned else None
    if any(one.problem for one in timed):
        status = "wrong"
    else:
        status = "no figure" if ratio is None else "slow" if ratio < least else "ok"
    return Check(
        name=name,
        unit=unit,
        slowest=amount / seconds,
        median=amount / statistics.median(one.seconds for one in timed),
        planned=amount / planned if planned else None,
        ratio=ratio,
        least=least,
        rank=worst.rank,
        host=worst.host,
        status=status,
    )


def planned_s(name: str, records: Sequence[RankChecks], sizes: Sizes, hardware: Hardware) -> float:
    """Return the planned seconds of one call of the check named `name`."""
    if is_collective(name):
        kind, _, place = name.partition(" ")
        ranks = records[0].gpus if place == IN_A_NODE else len(records)
        call = Collective(kind, sizes.message // ranks * ranks)
        return cost_of(call, list(range(ranks)), hardware).seconds
    if name == "memory":
        return seconds_of(Work("copy", "int32", 0.0, 2.0 * sizes.copied), hardware)
    dtype = "bfloat16" if hardware.card else "float32"
    if name == "matrix product":
        return seconds_of(Work("product", dtype, 2.0 * sizes.n**3, 0.0), hardware)
    # Forward has two of the seven products, backward five.
    calls = [Work("attention", dtype, share / 7 * attention_flops(sizes), 0.0) for share in (2, 5)]
    return sum(seconds_of(call, hardware) for call in calls)


def problems_of(
    records: Sequence[RankChecks], checks: Sequence[Check], hardware: Hardware | None, gpus: int
) -> list[str]:
    """Return a sentence for each bad device, wrong result and slow rate.

    gpus: required number on each node; 0: any number.
    """
    found = [
        f"{host}: checked {number} GPUs, expected {gpus}: look at nvidia-smi, or give --gpus {number}"
        for host, number in {record.host: record.gpus for record in records}.items()
        if gpus and number != gpus
    ]
    for record in records:
        where = f"{record.host}, rank {record.rank}"
        found += [f"{where}: {problem}" for problem in _device_problems(record, hardware)]
        found += [f"{where}: {name}: {one.problem}" for name, one in record.timed.items() if one.problem]
        for check in checks:
            rate = check.slowest * record_ratio(record, check, records)
            # The ranks of a collective wait for each other, so its times cannot name the slow rank.
            if check.is_slow(rate) and not check.collective and not record.timed[check.name].problem:
                found.append(f"{where}: {check.describe(rate)}")
    slow = [check for check in checks if check.collective and check.status == "slow"]
    return found + [check.describe(check.slowest) for check in slow]


def record_ratio(record: RankChecks, check: Check, records: Sequence[RankChecks]) -> float:
    """Return the rate of one rank (`record`) in `check`, divided by the rate of the slowest rank."""
    return max(one.timed[check.name].seconds for one in records) / record.timed[check.name].seconds


def _device_problems(record: RankChecks, hardware: Hardware | None) -> list[str]:
    found = []
    if hardware is not None and hardware.card and record.name != hardware.card:
        found.append(f"the GPU is {record.name}, expected {hardware.card}")
    elif hardware is not None and hardware.card and record.memory_gib < MEMORY * hardware.memory_gib:
        found.append(f"{record.memory_gib:.1f} GiB of GPU memory, expected {hardware.memory_gib} GiB")
    if record.uncorrected.isdecimal() and int(record.uncorrected):
        found.append(f"{record.uncorrected} uncorrected memory errors since the driver was loaded (ECC)")
    return found


def table(records: Sequence[RankChecks], checks: Sequence[Check]) -> str:
    """Return a text with a line for each kind of device and a table of the checks."""
    devices = Counter(
        f"{record.name}, {record.memory_gib:.1f} GiB, driver {record.driver or 'unknown'}, "
        f"ECC {record.ecc or 'unknown'}"
        if record.name
        else "a CPU: its name, memory, driver and ECC are not compared"
        for record in records
    )
    lines = [f"{number} x {device}" for device, number in devices.items()]
    row = "{:28} {:>8} {:>9} {:>9} {:>9} {:>8} {:>6}  {}".format
    lines += ["", row("check", "unit", "slowest", "median", "planned", "ratio", "least", "result")]
    for check in checks:
        planned = "-" if check.planned is None else f"{check.planned:.4g}"
        ratio = "-" if check.ratio is None else f"{check.ratio:.2f}"
        numbers = (f"{check.slowest:.4g}", f"{check.median:.4g}", planned, ratio, f"{check.least:g}")
        lines.append(row(check.name, check.unit, *numbers, check.status))
    return "\n".join(lines)


def as_json(
    records: Sequence[RankChecks], checks: Sequence[Check], problems: Sequence[str]
) -> dict[str, Any]:
    """Return the object printed by `check_node.py --json`."""
    devices = [{key: value for key, value in asdict(one).items() if key != "timed"} for one in records]
    rates = [asdict(check) for check in checks]
    return {"ok": not problems, "devices": devices, "checks": rates, "problems": list(problems)}
