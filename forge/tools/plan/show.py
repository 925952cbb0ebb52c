"""Render a plan as text, and as the object of `--json`."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import Any

from forge.config import Config
from forge.observe.hardware import GIB
from forge.tools.plan.advice import Remedy
from forge.tools.plan.hardware import Hardware
from forge.tools.plan.plan import CROWDED, Plan, local_states
from forge.tools.plan.search import Found
from forge.tools.plan.speed import Speed
from forge.tools.plan.stage import StagePlan
from forge.tools.plan.trace import Peak

MEMORY = ("parameters", "masters", "gradients", "optimizer", "buckets", "activations", "other", "peak")


def as_json(plan: Plan, crowded: int | None = None, remedy: Remedy | None = None) -> dict[str, Any]:
    """Return the plan as one JSON object; bytes are integers. crowded: from `crowded_bytes`. remedy: from `remedy_for`."""
    worst, train = plan.worst, plan.config.train
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
                "peaks": [_peak_as_json(peak) for peak in stage.peaks.values()],
                "collectives": _collectives(stage),
                "flops": _flops(stage),
                "host_bytes_of_activations": stage.offloaded,
                "host_bytes_of_state": stage.state_on_host,
                "host_bytes_of_save": stage.host,
                "host_bytes_of_local_states": local_states(plan, stage),
            }
            for stage in plan.stages
        ],
        "collectives": _collectives(worst),
        "flops": _flops(worst),
        "bubble": plan.bubble,
        "timeline": _timeline(plan),
        "time": None if plan.speed is None else _time(plan.speed),
        "tokens_per_step": train.global_batch_size * train.seq_len,
        "steps": train.steps,
        "host_bytes_of_node": plan.host_bytes,
        "checkpoint_bytes": sum(stage.checkpoint for stage in plan.stages),
        "needed_when_crowded": crowded,
        "remedy": remedy_as_json(remedy),
        "warnings": plan.warnings,
    }


def remedy_as_json(remedy: Remedy | None) -> dict[str, Any] | None:
    """Return the remedy as a JSON object: its overrides, and the bytes needed with all of them."""
    return None if remedy is None else asdict(remedy)


def remedy_as_text(remedy: Remedy, hardware: Hardware) -> str:
    """Return a line: the remedy's overrides, the memory needed with all of them, and whether this memory fits."""
    fits = remedy.needed <= hardware.memory_bytes
    return (
        f"with {' '.join(remedy.overrides)} the run needs {remedy.needed / GIB:.1f} of {hardware.memory_gib:g} GiB"
        + ("" if fits else ", which is still too much: use more processes or a smaller model")
    )


def _peak(stage: StagePlan) -> dict[str, Any]:
    peak = stage.peak
    return {"at": str(peak.moment), "kinds": {kind: size for kind, size in peak.kinds.items() if size}}


def _peak_as_json(peak: Peak) -> dict[str, Any]:
    return asdict(peak.moment) | {"bytes": {kind: size for kind, size in peak.kinds.items() if size}}


def _flops(stage: StagePlan) -> dict[str, Any]:
    """Return a dict from phase to FLOPs. Forward and backward have a dict from submodule to FLOPs, the update one number."""
    flops: dict[str, Any] = {}
    for (phase, part), number in stage.flops.items():
        flops |= {phase: flops.get(phase, {}) | {part: number}} if part else {phase: number}
    return flops


def _timeline(plan: Plan) -> list[list[tuple[str, float, float]]] | None:
    """Return (action, start, end) of each action of each pp rank, in the unit of `Plan.timeline`."""
    if plan.timeline is None:
        return None
    return [[(str(action), start, stop) for action, start, stop in of_rank] for of_rank in plan.timeline]


def _time(speed: Speed) -> dict[str, Any]:
    return {name: value for name, value in vars(speed).items() if name != "timeline"}


def _collectives(stage: StagePlan) -> list[dict[str, Any]]:
    calls: Counter[tuple[str, str, bool]] = Counter()
    sizes: Counter[tuple[str, str, bool]] = Counter()
    for (axis, kind, size, hidden), number in stage.collectives.items():
        calls[axis, kind, hidden] += number
        sizes[axis, kind, hidden] += number * size
    return [
        {
            "axis": axis,
            "kind": kind,
            "calls": number,
            "bytes": sizes[axis, kind, hidden],
            "can_be_hidden": hidden,
            "over": str(stage.spans.get(axis, "")),
        }
        for (axis, kind, hidden), number in sorted(calls.items(), key=lambda item: -sizes[item[0]])
    ]


def as_text(plan: Plan, crowded: int | None = None, remedy: Remedy | None = None) -> str:
    """Return the plan as a page of text, memory in GiB. crowded: from `crowded_bytes`. remedy: from `remedy_for`."""
    degrees, worst, train = plan.degrees, plan.worst, plan.config.train
    named = {name: getattr(degrees, name) for name in ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")}
    layout = " ".join(f"{name}={value}" for name, value in named.items() if value > 1)
    lines = [
        f"{plan.config.run.name} on {degrees.world} process{'es' if degrees.world > 1 else ''}: {_answer(plan)}",
        f"layout: {plan.config.parallel.data_parallel} {layout}".rstrip()
        + f"; each rank computes {degrees.accumulation} "
        f"microbatch{'es' if degrees.accumulation > 1 else ''} of {train.micro_batch_size} x {train.seq_len} tokens per step",
        *([] if remedy is None or plan.hardware is None else [remedy_as_text(remedy, plan.hardware)]),
        "",
        "memory of the first rank of each stage, in GiB:",
        *_table(
            ["rank", *MEMORY, "holds"],
            [
                [str(stage.rank), *(f"{stage.memory[kind] / GIB:.2f}" for kind in MEMORY), stage.layers]
                for stage in plan.stages
            ],
        ),
        f"The peak of rank {worst.rank} is in the {worst.peak.moment}: "
        + ", ".join(
            f"{kind} {size / GIB:.2f}" for kind, size in worst.peak.kinds.items() if size > GIB / 1000
        ),
        "",
        *_table_of_collectives(worst),
        "",
        *_lines_of_work(plan),
    ]
    if plan.speed is not None:
        lines += ["", _estimate(plan, plan.speed)]
    if crowded is not None:
        lines += [
            "",
            f"the fullest rank needs {crowded / GIB:.1f} GiB if its experts receive {CROWDED:g} times an equal share of the "
            "tokens",
        ]
    if plan.warnings:
        lines += ["", *(f"note: {warning}" for warning in plan.warnings)]
    return "\n".join(lines)


def _table_of_collectives(stage: StagePlan) -> list[str]:
    rows = [
        [
            *(row["axis"], row["kind"], str(row["calls"]), f"{row['bytes'] / GIB:.3f}"),
            "yes" if row["can_be_hidden"] else "no",
            row["over"],
        ]
        for row in _collectives(stage)
    ]
    if not rows:
        return ["no collectives"]
    return [
        f"collectives of rank {stage.rank} in one step:",
        *_table(["axis", "kind", "calls", "GiB", "can be hidden", "over"], rows),
        *_shared_nic(stage),
    ]


def _shared_nic(stage: StagePlan) -> list[str]:
    """Return a line that names the axes whose collectives share each rank's NIC; empty for fewer than two such axes.

    The times of these collectives add up.
    """
    axes = sorted(
        {axis for axis, *_ in stage.collectives if axis in stage.spans and stage.spans[axis].nodes > 1}
    )
    return [f"{' and '.join(axes)} share each rank's NIC"] if len(axes) > 1 else []


def _lines_of_work(plan: Plan) -> list[str]:
    worst, train = plan.worst, plan.config.train
    of = {phase: found for phase, found in _flops(worst).items() if isinstance(found, dict)}
    flops = "; ".join(
        f"{phase} " + ", ".join(f"{part} {number / 1e12:.3g}" for part, number in found.items())
        for phase, found in of.items()
    )
    checkpoint = sum(stage.checkpoint for stage in plan.stages)
    local = local_states(plan, worst)
    lines = []
    if local:
        of_local = f"{local / GIB:.2f} GiB of host memory for rank {worst.rank}"
        lines.append(f"states on the nodes (checkpoint.local_interval) take {of_local}")
    if worst.offloaded:
        of_activations = f"{worst.offloaded / GIB:.2f} GiB of host memory for rank {worst.rank}"
        lines.append(f"offloaded activations take {of_activations}")
    if worst.state_on_host:
        of_state = f"{worst.state_on_host / GIB:.2f} GiB of host memory for rank {worst.rank}"
        lines.append(f"parameters, gradients and optimizer state (parallel.cpu_offload) take {of_state}")
    return [
        *lines,
        f"operations of one microbatch on rank {worst.rank}, in 10^12: {flops}",
        f"a step trains on {train.global_batch_size * train.seq_len:,} tokens; a checkpoint has "
        f"{checkpoint / GIB:.1f} GiB, and saving it takes {worst.host / GIB:.2f} GiB of host memory for rank {worst.rank}",
    ]


def layout_as_json(found: Found) -> dict[str, Any]:
    """Return one layout of a search as a JSON object: the plan as in `as_json`, and the overrides."""
    return as_json(found.plan) | {"overrides": found.overrides}


def search_as_text(
    config: Config, world: int, hardware: Hardware, found: list[Found], fewest: int | None
) -> str:
    """Return the layouts of a search as text, in the order of `found`. fewest: from `fewest_ranks`, if no layout fits."""
    has = f"{hardware.memory_gib:g} GiB"
    if found[0].plan.fits_hosts is False:
        has += f" and {hardware.host_memory_gib:,.0f} GiB of host memory"
    if not found[0].fits:
        enough = f"at least {fewest} processes" if fewest else "other hardware, or a smaller model"
        head = (
            f"{config.run.name} on {world} processes: none of the tried layouts fits in {has}; the run needs {enough}. "
            f"The layout closest to fitting:"
        )
    else:
        head = f"{config.run.name} on {world} processes: the {len(found)} fastest layouts that fit in {has}"
    rows = [
        [
            f"{one.needed / GIB:.1f}",
            f"{one.speed.tokens_per_second:,.0f}",
            "" if one.speed.mfu is None else f"{one.speed.mfu:.0%}",
            *(f"{share:.0%}" for share in _shares(one.speed).values()),
            max(_shares(one.speed).items(), key=lambda item: item[1])[0],
            " ".join(one.overrides) or "(no overrides)",
        ]
        for one in found
    ]
    columns = ["GiB", "tokens/s", "MFU", "computes", "waits", "idle", "limit", "overrides"]
    return "\n".join([head, *_table(columns, rows)])


def _shares(speed: Speed) -> dict[str, float]:
    """Return a dict from cause to its fraction of a step's time.

    The column `limit` of a search names the cause with the largest fraction.
    """
    parts = {"compute": speed.compute_s, "communication": speed.communication_s, "bubble": speed.idle_s}
    return {name: seconds / speed.step_s for name, seconds in parts.items()}


def _estimate(plan: Plan, speed: Speed) -> str:
    """Return two lines. The first has step time, speed and duration of the run. The second has the parts of a step.

    docs/internals/plan-accuracy.md compares estimates with published runs.
    """
    mfu = "" if speed.mfu is None else f", MFU {speed.mfu:.0%}"
    steps = plan.config.train.steps
    return (
        f"estimate: {speed.step_s:.3g} s per step ({speed.step_s_low:.3g} to {speed.step_s_high:.3g}), "
        f"{speed.tokens_per_second:,.0f} tokens/s{mfu}; {steps} steps take "
        f"{speed.days:.2g} days\n  of a step: computation {speed.compute_s:.3g} s, exposed communication "
        f"{speed.communication_s:.3g} s, idle in the pipeline {speed.idle_s:.3g} s ({speed.bubble:.0%})"
    )


def _answer(plan: Plan) -> str:
    needed = f"{plan.worst.needed / GIB:.1f} GiB"
    if plan.hardware is None:
        return f"needs {needed} on each GPU (--hardware NAME says whether that fits)"
    of_gpu = f"{needed} of {plan.hardware.memory_gib:g} GiB"
    if plan.fits_hosts is False:
        of_host = f"{plan.host_bytes / GIB:,.1f} of {plan.hardware.host_memory_gib:,.1f} GiB"
        return f"does not fit, {of_gpu} of GPU memory, {of_host} of a node's host memory"
    return f"fits, {of_gpu}" if plan.fits else f"does not fit, {of_gpu}"


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
