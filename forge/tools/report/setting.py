"""Sections of the report on the setting of runs: layout, memory, plan and measurements, configuration, environment."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from forge.observe.metrics import flat
from forge.tools.report.parts import PageSection, Part, Table, TextBlock
from forge.tools.report.read import RunRecord

GIB = 1024**3
PLANNED = (
    "Planned memory is that of the rank that needs most, as in train.py --plan. Measured memory is that of rank 0 in "
    "its first step; on a CPU, the growth of the process. A planned step time needs known or measured hardware. The "
    "measured step time is the median. Plan and measurements are those of the latest start that trained."
)


def setting_sections(runs: Sequence[RunRecord]) -> list[PageSection]:
    """Return the sections on layout, memory, plan and measurements, configuration and environment."""
    return [
        PageSection("Layout", parts=_layout(runs)),
        PageSection("Memory", parts=_memory(runs)),
        PageSection("Planned and measured", PLANNED if any(run.plan for run in runs) else "", _planned(runs)),
        PageSection("Configuration", parts=_config(runs)),
        PageSection("Environment", parts=_environment(runs)),
    ]


def _columns(caption: str, of_runs: dict[str, dict[str, Any]]) -> list[Part]:
    """Return a table with one column per run and one row per key; [] without keys. of_runs: run -> key -> value."""
    keys = list(dict.fromkeys(key for values in of_runs.values() for key in values))
    rows = [[key, *(values.get(key) for values in of_runs.values())] for key in keys]
    return [Table(caption, ["", *of_runs], rows)] if rows else []


def _layout(runs: Sequence[RunRecord]) -> list[Part]:
    found = {}
    for run in runs:
        if started := run.last_event("started"):
            found[run.name] = {
                "ranks": started.get("world_size"),
                "launcher": started.get("launcher"),
                "engine": started.get("data_parallel", run.config.get("parallel", {}).get("data_parallel")),
                **started.get("layout", {}),
            }
    return _columns("Degrees of parallelism of the latest start", found)


def _memory(runs: Sequence[RunRecord]) -> list[Part]:
    found = {
        run.name: {
            key.removesuffix("_bytes"): value / GIB for key, value in last.items() if key.endswith("_bytes")
        }
        for run in runs
        if (last := run.last_event("memory"))
    }
    return _columns("Memory of rank 0, in GiB", found)


# Kinds of memory, named as in a plan. The event `memory` adds the suffix "_bytes".
KINDS = ("parameters", "masters", "gradients", "optimizer", "buckets", "activations")


def _planned(runs: Sequence[RunRecord]) -> list[Part]:
    parts: list[Part] = []
    for run in runs:
        if not run.plan:
            continue
        if "problem" in run.plan:
            parts.append(TextBlock(f"{run.name}: no plan", run.plan["problem"]))
            continue
        latest = run.latest_training()
        planned, memory = run.plan["memory"], latest.last_event("memory")
        measured = {kind: memory.get(f"{kind}_bytes") for kind in KINDS} if memory else {}
        rows: list[list[Any]] = []
        for kind in KINDS:
            pair = planned[kind], measured.get(kind)
            if any(pair):
                rows.append([f"{kind}, GiB", *(None if one is None else one / GIB for one in pair)])
        total = sum(size or 0 for size in measured.values()) / GIB if measured else None
        rows.append(["all of these at the peak of a step, GiB", planned["peak"] / GIB, total])
        everything = max(latest.series("memory_gib")[1], default=None)
        if everything is not None:
            guess = (planned["peak"] + planned["other"]) / GIB if planned["other"] else None
            rows.append(["all memory of the process, GiB", guess, everything])
        times = latest.series("step_time_s")[1]
        step = None if run.plan["time"] is None else run.plan["time"]["step_s"]
        if step is not None or times:
            rows.append(["time of a step, s", step, median(times) if times else None])
        parts.append(Table(f"{run.name}: the plan against the run", ["", "planned", "measured"], rows))
    return parts


def _config(runs: Sequence[RunRecord]) -> list[Part]:
    configs = [dict(flat(run.config)) for run in runs]
    keys = list(dict.fromkeys(key for config in configs for key in config))
    names = [run.name for run in runs]
    if len(runs) > 1:
        rows = [
            [key, *(_text(config.get(key)) for config in configs)]
            for key in keys
            if len({_text(config.get(key)) for config in configs}) > 1
        ]
        return [Table("Keys that differ", ["key", *names], rows)] if rows else []
    return (
        [Table("config.toml", ["key", names[0]], [[key, _text(configs[0][key])] for key in keys])]
        if keys
        else []
    )


def _text(value: Any) -> str:
    return "" if value is None else str(value)


def _environment(runs: Sequence[RunRecord]) -> list[Part]:
    found = {
        run.name: run.last_event("started").get("environment", {})
        | {"host of rank 0": run.status.get("host")}
        for run in runs
    }
    return _columns("The latest start", found)
