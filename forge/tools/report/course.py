"""Sections of the report on the course of runs: curves over steps, events, and goodput."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any

from forge.tools.report.draw import WIDE, Curve, Lane, Mark, curves, lanes, shares
from forge.tools.report.parts import PageSection, Picture, Table, sampled
from forge.tools.report.read import Points, RunRecord

# Event -> mark (a key of MARKS in draw.py), drawn in the curves at the event's step.
MARKED = {
    "resumed": "restart",
    "skipped": "skipped",
    "spike": "spike",
    "rolled_back": "rolled back",
    "straggler": "slow rank",
    "watchdog": "watchdog",
    "failed": "failed",
}
EVENTS_SHOWN = 40


def _steps_of(run: RunRecord) -> int | None:
    """Return the number of steps of the whole run; None if it is unknown."""
    begun = [event["of"] for event in run.events_of("fresh", "resumed") if "of" in event]
    return begun[-1] if begun else run.config.get("train", {}).get("steps")


def summary(runs: Sequence[RunRecord]) -> Table:
    """Return the summary table at the head of the page: one column per run."""
    rows: list[tuple[str, Callable[[RunRecord], Any]]] = [
        ("state", lambda run: run.status.get("state", "unknown")),
        ("reason", lambda run: run.status.get("reason", "")),
        ("steps made", lambda run: run.status.get("step")),
        ("of", _steps_of),
        ("last loss", lambda run: _last(run.series("loss"))),
        ("tokens", lambda run: _last(run.series("tokens"))),
        ("tokens/s, last", lambda run: _last(run.series("tokens_per_second"))),
        ("goodput", lambda run: _share(run.last_event("goodput").get("goodput"))),
        ("starts", lambda run: len(run.events_of("started"))),
        ("skipped steps", lambda run: len(run.history_events_of("skipped"))),
        ("roll-backs", lambda run: len(run.history_events_of("rolled_back"))),
        ("world size", lambda run: run.last_event("started").get("world_size")),
    ]
    held_out = dict.fromkeys(name for run in runs for name in run.names("eval"))
    cells = [[title, *(of(run) for run in runs)] for title, of in rows]
    cells += [[f"held out: {name}", *(_last(run.series("eval", name)) for run in runs)] for name in held_out]
    return Table("How the runs stand", ["", *(run.name for run in runs)], cells)


def _last(points: Points) -> float | None:
    return points[1][-1] if points[1] else None


def _share(value: float | None) -> str | None:
    return None if value is None else f"{value:.1%}"


def course_sections(runs: Sequence[RunRecord]) -> list[PageSection]:
    """Return the sections on learning, speed and memory, events, and goodput."""
    learning = PageSection(
        "Learning", parts=_pictures(_loss(runs), _field(runs, "grad_norm"), _field(runs, "lr"))
    )
    of_source = _pictures(*(_by_source(run, number) for number, run in enumerate(runs)))
    if len(of_source):
        learning.parts += of_source
    speed = PageSection(
        "Speed and memory",
        parts=_pictures(
            _field(runs, "tokens_per_second"),
            _data_wait(runs),
            _field(runs, "memory_gib"),
            _field(runs, "mfu"),
        ),
    )
    return [learning, speed, _events(runs), _time(runs)]


def _pictures(*made: Picture | None) -> list[Any]:
    return [one for one in made if one is not None]


def marks_of(run: RunRecord) -> list[Mark]:
    """Return marks for a run's curves: one per event of its history that is listed in MARKED and has a step.

    A roll-back is marked at the step to which the run returned.
    """
    found = [(event.get("step", event.get("to_step")), event) for event in run.history_events_of(*MARKED)]
    return [Mark(float(step), MARKED[event["event"]]) for step, event in found if isinstance(step, int)]


def picture(
    key: str, caption: str, drawn: Sequence[Curve], unit: str, *, marks: Sequence[Mark] = (), **options: Any
) -> Picture | None:
    """Return a figure of the curves with a table of their numbers; None if no curve has a point.

    key: prefix of the ids in the SVG; must be unique in the page. options: keyword arguments of `draw.curves`.
    """
    drawn = [curve for curve in drawn if curve.points[0]]
    if not drawn:
        return None
    svg = curves(key, drawn, unit, marks=marks, **options)
    columns = [dict(zip(*curve.points, strict=True)) for curve in drawn]
    steps = sampled(sorted({step for column in columns for step in column}))
    rows = [[step, *(column.get(step) for column in columns)] for step in steps]
    table = Table(f"{caption}, in {unit}", ["step", *(curve.name for curve in drawn)], rows)
    return Picture(caption, svg, table, wide=options.get("size") == WIDE)


def loss_curves(runs: Sequence[RunRecord]) -> list[Curve]:
    """For each run, return the curve of the training loss and one curve per held-out source."""
    drawn = []
    for number, run in enumerate(runs):
        of = f"{run.name}: " if len(runs) > 1 else ""
        drawn.append(Curve(f"{of}training", run.series("loss"), number, number))
        for place, name in enumerate(run.names("eval")):
            color = number if len(runs) > 1 else place + 1
            drawn.append(Curve(f"{of}held out: {name}", run.series("eval", name), color, place + 1))
    return drawn


def _loss(runs: Sequence[RunRecord]) -> Picture | None:
    drawn = loss_curves(runs)
    marks = marks_of(runs[0]) if len(runs) == 1 else []
    return picture("loss", "Loss, and what happened", drawn, "nats per token", size=WIDE, marks=marks)


# Field of the metrics -> (caption, unit, options of `draw.curves`).
FIELDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "grad_norm": ("Norm of the gradient", "L2 norm", {"log": True}),
    "lr": ("Learning rate", "per step", {}),
    "tokens_per_second": ("Throughput", "tokens per second", {}),
    "memory_gib": ("Most memory held by rank 0", "GiB", {}),
    "mfu": ("Model FLOPs utilisation", "per cent of peak", {"share": True}),
}


def _field(runs: Sequence[RunRecord], field: str) -> Picture | None:
    caption, unit, options = FIELDS[field]
    drawn = [Curve(run.name, run.series(field), number, number) for number, run in enumerate(runs)]
    return picture(field, caption, drawn, unit, **options)


def _data_wait(runs: Sequence[RunRecord]) -> Picture | None:
    drawn = []
    for number, run in enumerate(runs):
        pairs = [
            (int(line["step"]), line["data_time_s"] / line["step_time_s"])
            for line in run.lines
            if line.get("step_time_s") and line.get("data_time_s") is not None
        ]
        drawn.append(
            Curve(run.name, ([step for step, _ in pairs], [share for _, share in pairs]), number, number)
        )
    return picture("wait", "Waiting for data", drawn, "per cent of the step", share=True)


def _by_source(run: RunRecord, number: int) -> Picture | None:
    names = run.names("sources")
    drawn = [Curve(name, run.series("sources", name), color) for color, name in enumerate(names)]
    return picture(f"sources{number}", f"{run.name}: training loss by source", drawn, "nats per token")


def _events(runs: Sequence[RunRecord]) -> PageSection:
    section = PageSection("Events")
    for number, run in enumerate(runs):
        timed = [(datetime.fromisoformat(event["time"]), event) for event in run.events if "time" in event]
        if not timed:
            continue
        begin, kinds = timed[0][0], dict[str, Lane]()
        for when, event in timed:
            if event["event"] not in ("goodput", "memory"):
                lane = kinds.setdefault(event["event"], Lane(event["event"]))
                lane.minutes.append((when - begin).total_seconds() / 60)
        rows = [
            [event["time"][:19], event["event"], event.get("step"), _details(event)]
            for _, event in timed
            if event["event"] not in ("goodput", "memory")
        ]
        table = Table(
            f"{run.name}: the last {min(len(rows), EVENTS_SHOWN)} of {len(rows)} events",
            ["time (UTC)", "event", "step", "more"],
            rows[-EVENTS_SHOWN:],
        )
        caption = f"{run.name}: what happened, by the clock"
        section.parts.append(
            Picture(caption, lanes(f"events{number}", list(kinds.values())), table, wide=True)
        )
    return section


def _details(event: dict[str, Any]) -> str:
    left_out = ("time", "event", "step", "environment")
    return "; ".join(
        f"{key} {_short(value)}" for key, value in event.items() if key not in left_out and value is not None
    )


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict):
        return " ".join(f"{key}={inner}" for key, inner in value.items() if inner not in (1, None))
    return str(value) if len(str(value)) <= 300 else str(value)[:297] + "..."


def _time(runs: Sequence[RunRecord]) -> PageSection:
    """Return the section on goodput: the wall-clock time of each run, in seconds, divided by kind of activity."""
    spent = {run.name: last["seconds"] for run in runs if (last := run.last_event("goodput"))}
    section = PageSection("Where the time went")
    if spent:
        kinds = list(dict.fromkeys(kind for seconds in spent.values() for kind in seconds))
        rows = [[kind, *(seconds.get(kind, 0.0) for seconds in spent.values())] for kind in kinds]
        table = Table("Wall time by kind, in seconds", ["", *spent], rows)
        caption = "Goodput: wall time since the first start, by kind"
        section.parts.append(
            Picture(caption, shares("goodput", spent, "seconds", absent="down"), table, wide=True)
        )
    return section
