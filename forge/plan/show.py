"""A plan as text, and as the object of `--json`."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import Any

from forge.config import Config
from forge.observe.hardware import GIB
from forge.plan.hardware import Hardware
from forge.plan.plan import Plan, StagePlan
from forge.plan.search import Found
from forge.plan.speed import Speed

MEMORY = ("parameters", "masters", "gradients", "optimizer", "buckets", "activations", "other", "peak")


def as_json(plan: Plan) -> dict[str, Any]:
    """Return one object; bytes are integers."""
    worst = plan.worst
    return {
        "fits": plan.fits,
        "world_size": plan.degrees.world,
        "layout": {"data_parallel": plan.config.parallel.data_parallel} | asdict(plan.degrees),
        "memory": worst.memory,
        "peak": _peak(worst),
        "stages": [
            {
                "rank": stage.rank,
                "layers": stage.layers,
                "memory": stage.memory,
                "peak": _peak(stage),
                "collectives": _collectives(stage),
            }
            for stage in plan.stages
        ],
        "collectives": _collectives(worst),
        "flops": worst.flops,
        "bubble": plan.bubble,
        "time": None if plan.speed is None else asdict(plan.speed),
        "warnings": plan.warnings,
    }


def _peak(stage: StagePlan) -> dict[str, Any]:
    return {"at": str(stage.moment), "kinds": {kind: size for kind, size in stage.kinds.items() if size}}


def _collectives(stage: StagePlan) -> list[dict[str, Any]]:
    calls: Counter[tuple[str, str]] = Counter()
    sizes: Counter[tuple[str, str]] = Counter()
    for (axis, kind, size), number in stage.collectives.items():
        calls[axis, kind] += number
        sizes[axis, kind] += number * size
    return [
        {"axis": axis, "kind": kind, "calls": number, "bytes": sizes[axis, kind]}
        for (axis, kind), number in sorted(calls.items(), key=lambda item: -sizes[item[0]])
    ]


def as_text(plan: Plan) -> str:
    """Return the plan as a page of text; memory in GiB."""
    degrees, worst, train = plan.degrees, plan.worst, plan.config.train
    named = {name: getattr(degrees, name) for name in ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")}
    layout = " ".join(f"{name}={value}" for name, value in named.items() if value > 1)
    lines = [
        f"{plan.config.run.name} on {degrees.world} process{'es' if degrees.world > 1 else ''}: {_answer(plan)}",
        f"layout: {plan.config.parallel.data_parallel} {layout}".rstrip()
        + f"; each rank computes {degrees.accumulation} "
        f"microbatch{'es' if degrees.accumulation > 1 else ''} of {train.micro_batch_size} x {train.seq_len} tokens per step",
        "",
        "memory of the first rank of each stage, in GiB:",
        *_table(
            ["rank", *MEMORY, "holds"],
            [
                [str(stage.rank), *(f"{stage.memory[kind] / GIB:.2f}" for kind in MEMORY), stage.layers]
                for stage in plan.stages
            ],
        ),
        f"The peak of rank {worst.rank} is in the {worst.moment}: "
        + ", ".join(f"{kind} {size / GIB:.2f}" for kind, size in worst.kinds.items() if size > GIB / 1000),
        "",
        *_table_of_collectives(worst),
    ]
    if plan.speed is not None:
        lines += ["", _estimate(plan, plan.speed)]
    if plan.warnings:
        lines += ["", *(f"note: {warning}" for warning in plan.warnings)]
    return "\n".join(lines)


def _table_of_collectives(stage: StagePlan) -> list[str]:
    rows = [
        [row["axis"], row["kind"], str(row["calls"]), f"{row['bytes'] / GIB:.3f}"]
        for row in _collectives(stage)
    ]
    if not rows:
        return ["no collectives"]
    return [f"collectives of rank {stage.rank} in one step:", *_table(["axis", "kind", "calls", "GiB"], rows)]


def layout_as_json(found: Found, hardware: Hardware) -> dict[str, Any]:
    """Return one layout of a search, with the names of `as_json`."""
    return {
        "fits": found.needed <= hardware.memory_bytes,
        "world_size": found.degrees.world,
        "overrides": found.overrides,
        "layout": {"data_parallel": found.engine} | asdict(found.degrees),
        "memory": found.memory,
        "bubble": found.speed.bubble,
        "time": asdict(found.speed),
    }


def search_as_text(
    config: Config, world: int, hardware: Hardware, found: list[Found], fewest: int | None
) -> str:
    """Return the layouts of a search, the best first; `fewest`: processes on which one fits, if none does here."""
    has = f"{hardware.memory_gib:g} GiB"
    if found[0].needed > hardware.memory_bytes:
        enough = f"at least {fewest} processes" if fewest else "other hardware, or a smaller model"
        head = (
            f"{config.run.name} on {world} processes: no layout that was tried fits in {has}; it needs {enough}. "
            f"The nearest:"
        )
    else:
        head = f"{config.run.name} on {world} processes: the {len(found)} fastest layouts that fit in {has}"
    rows = [
        [
            f"{one.needed / GIB:.1f}",
            f"{one.speed.tokens_per_second:,.0f}",
            "" if one.speed.mfu is None else f"{one.speed.mfu:.0%}",
            *(
                f"{part / one.speed.step_s:.0%}"
                for part in (one.speed.compute_s, one.speed.communication_s, one.speed.idle_s)
            ),
            " ".join(one.overrides) or "(as it is)",
        ]
        for one in found
    ]
    columns = ["GiB", "tokens/s", "MFU", "computes", "waits", "idle", "overrides"]
    return "\n".join([head, *_table(columns, rows)])


def _estimate(plan: Plan, speed: Speed) -> str:
    """Two lines on time; what is guessed stands in forge/plan/estimate.py."""
    mfu = "" if speed.mfu is None else f", MFU {speed.mfu:.0%}"
    steps = plan.config.train.steps
    return (
        f"estimate: {speed.step_s:.3g} s per step, {speed.tokens_per_second:,.0f} tokens/s{mfu}; {steps} steps take "
        f"{speed.days:.2g} days\n  of a step: computation {speed.compute_s:.3g} s, communication that nothing hides "
        f"{speed.communication_s:.3g} s, idle in the pipeline {speed.idle_s:.3g} s ({speed.bubble:.0%})"
    )


def _answer(plan: Plan) -> str:
    needed = f"{plan.worst.needed / GIB:.1f} GiB"
    if plan.hardware is None:
        return f"needs {needed} on each card (--hardware NAME says whether that fits)"
    has = f"{plan.hardware.memory_gib:g} GiB"
    return f"fits, {needed} of {has}" if plan.fits else f"does not fit, {needed} of {has}"


def _table(head: list[str], rows: list[list[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]
    return [
        "  "
        + "  ".join(
            cell.rjust(width) if cell[:1].isdigit() or row is head else cell.ljust(width)
            for cell, width in zip(row, widths, strict=True)
        ).rstrip()
        for row in [head, *rows]
    ]
