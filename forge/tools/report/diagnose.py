"""Diagnose a run from its files: name the first fault, its rank, and the remedy."""

from __future__ import annotations

import gzip
import json
import os
import re
import socket
import textwrap
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from forge.observe.json_lines import read_object
from forge.runtime.causes import AGAIN, CAUSES, Cause, Severity
from forge.runtime.errors import FAILED, USUAL_CAUSES, UserError
from forge.tools.report.read import RunRecord, read_run
from forge.tools.report.stacks import odd_ranks, read_collectives, read_stacks

# A log line with a cause. Log lines of earlier versions have no cause and do not match. A time without an offset from UTC is
# in the time zone of this machine.
_LINE = re.compile(
    r"(?P<time>\d{4}-\d\d-\d\d[T ][\d:]{8}\.\d{3}(?:[+-]\d\d:\d\d)?) rank (?P<rank>\d+) (?P<level>[A-Z]+) [\w.]+"
    r"\[(?P<cause>\w+):?(?P<ranks>[\d,]*)\]: (?P<text>.*)"
)
ENDS = ("stopped", "finished", "failed")
WIDTH, SHOWN = 110, 12


@dataclass(frozen=True)
class Incident:
    """An event or log record with a cause.

    ranks: the ranks at fault. If these are unknown, the rank that wrote the record. ends: True if the incident ended the
    run.
    """

    when: datetime
    cause: Cause
    ranks: tuple[int, ...]
    text: str
    ends: bool = False


def diagnose(path: Path) -> str:
    """Return the diagnosis of the run in `path` as a page of text.

    Raises UserError if `path` is not a run directory or has nothing to diagnose.
    """
    run = read_run(path)
    incidents = read_incidents(run)
    if not (run.events or run.lines or run.status or incidents):
        raise UserError(f"{path}: the run has recorded nothing: no event, no step and no message in logs/")
    parts = [
        _head(run),
        _first(run, incidents),
        _others(incidents),
        _starts(run),
        _standings(run),
        _traces(path),
    ]
    return "\n\n".join(part for part in parts if part)


def read_incidents(run: RunRecord) -> list[Incident]:
    """Return the incidents in all events and logs, sorted by severity of the cause, then by time.

    Causes that can end a run are the most severe. Among their incidents, those that ended a run come first.
    """
    of_starts = [one for events in _starts_of(run) for one in _of_start(events, _was_killed(run, events))]
    found = [*of_starts, *_of_logs(run.path / "logs")]
    worst = Severity.ENDS
    return sorted(
        found, key=lambda one: (one.cause.severity, one.cause.severity is worst and not one.ends, one.when)
    )


def named_first(run: RunRecord) -> Cause | None:
    """Return the cause that the diagnosis of `run` names first; None without a fault."""
    found = [end] if (end := _end(run)) else read_incidents(run)
    return found[0].cause if found else None


def _end(run: RunRecord) -> Incident | None:
    """Return the incident that ended the latest start of the run.

    None if this start is running or finished without a fault.
    """
    events = (_starts_of(run) or [[]])[-1]
    return next((one for one in _of_start(events, _was_killed(run, events)) if one.ends), None)


def _was_killed(run: RunRecord, events: list[dict[str, Any]]) -> bool:
    """Return whether one start of the run was killed: it reported no end, and none of its processes is running.

    events: the events of this start. A start is one launch of the run's processes.
    """
    latest = events[-1:] == run.events[-1:]
    return not any(event["event"] in ENDS for event in events) and not (
        latest and silent_end(run) != "killed"
    )


def _of_start(events: list[dict[str, Any]], killed: bool) -> Iterator[Incident]:
    """Yield the incidents among the events of one start.

    killed: True if the start was killed. The events then lack its end, so also yield an incident for the end.
    """
    timed = [(datetime.fromisoformat(event["time"]), event) for event in events if "time" in event]
    for when, event in timed:
        # Some events have the name of a cause. For a failure, earlier versions recorded only the exit code.
        cause = CAUSES.get(event.get("cause", "")) or CAUSES.get(event["event"])
        if event["event"] == "failed":
            cause = cause or USUAL_CAUSES.get(event.get("exit_code", FAILED), Cause.ERROR)
        if cause is not None:
            ranks = event.get("ranks", [event[key] for key in ("rank",) if key in event])
            yield Incident(when, cause, tuple(ranks), _words(event), event["event"] in ENDS)
    if killed and timed:
        yield Incident(timed[-1][0], Cause.KILLED, (), "the run reported no end", True)


def _of_logs(folder: Path) -> Iterator[Incident]:
    """Yield an incident for each log record with a cause, over all ranks. Repeated messages of a rank count once."""
    for log in sorted(folder.glob("rank-*.log")):
        lines: dict[str, Incident] = {}
        with suppress(OSError):
            for match in map(_LINE.match, log.read_text("utf-8", errors="replace").splitlines()):
                cause = CAUSES.get(match["cause"]) if match else None
                if match and cause and match["level"] != "INFO":
                    when = datetime.fromisoformat(match["time"]).astimezone(UTC)
                    ranks = tuple(map(int, (match["ranks"] or match["rank"]).split(",")))
                    lines.setdefault(match["text"], Incident(when, cause, ranks, match["text"]))
        yield from lines.values()


def _words(event: dict[str, Any]) -> str:
    step = f" at step {event['step']}" if isinstance(event.get("step"), int) else ""
    stated = next((event[key] for key in ("reason", "problem", "error", "change") if event.get(key)), "")
    more = stated or ", ".join(
        f"{key} {event[key]}"
        for key in ("rank", "phase", "seconds", "median_s", "where", "differences", "lost", "joined")
        if event.get(key)
    )
    return f"{event['event']}{step}" + (f": {more}" if more else "")


def _head(run: RunRecord) -> str:
    status = run.status
    state, step, code = status.get("state", "unknown"), status.get("step"), status.get("exit_code")
    lines = [f"{run.path}: {state} at step {step}" + ("" if code is None else f", exit code {code}")]
    if status.get("reason"):
        lines.append(_wrapped(f"reason: {status['reason']}"))
    return "\n".join(lines)


def silent_end(run: RunRecord) -> str:
    """Return the state of the run's latest start if this start reported no end; otherwise an empty string.

    The state is "running", "elsewhere" (started on another machine, so its state is unknown here) or "killed".
    """
    if run.status.get("state") != "running":
        return ""
    holder = read_object(run.path / ".lock")
    if holder and holder.get("host") == socket.gethostname() and _lives(int(holder.get("pid", 0))):
        return "running"
    if holder and holder.get("host") != socket.gethostname():
        return "elsewhere"
    return "killed"


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return pid > 0


def _first(run: RunRecord, incidents: list[Incident]) -> str:
    """Return the first paragraphs of the diagnosis: the cause that ended the latest start, the rank at fault, the remedy.

    If no fault ended this start, the text says so.
    """
    silent = silent_end(run)
    holder = read_object(run.path / ".lock")
    if silent == "running":
        return f"It is still running, as process {holder.get('pid')} on this machine."
    if silent == "elsewhere":
        return f"It runs on {holder.get('host')}, or was killed there: look for its process on that machine."
    end = _end(run)
    if end is None and incidents:
        return "The latest start ended well; its incidents are below."
    if end is None:
        return "Nothing ended this run early."
    cause, text = end.cause, f"{end.when:%H:%M:%S} UTC: {end.text}"
    latest = (_starts_of(run) or [[]])[-1]
    odd = odd_ranks(read_stacks(run.path / "logs", _began(latest))) if cause is Cause.WATCHDOG else []
    ranks = ", ".join(map(str, odd or end.ranks))
    if cause is Cause.KILLED and not ranks:
        saving = sorted(one.name for one in (run.path / "checkpoints").glob(".partial*"))
        text += f", during a save ({saving[-1]} was left)" if saving else ""
        later = [one for one in incidents if one.when >= end.when and one.cause.severity is Severity.ENDS]
        told = "0, which the other ranks report as lost"
        ranks = told if later[1:] else "every rank, or the one whose log ends first"
    remedy = f"{cause.remedy} {AGAIN}" if cause.severity is Severity.ENDS else cause.remedy
    lines = [f"WHAT HAPPENED FIRST: {_plain(cause.meaning)} [{cause}]"]
    lines += [f"RANK: {ranks}"] if ranks else []
    return "\n".join([*lines, _wrapped(text, "  "), _wrapped(f"WHAT TO TRY: {_plain(remedy)}")])


def _plain(markdown: str) -> str:
    return markdown.replace("`", "")


def _starts_of(run: RunRecord) -> list[list[dict[str, Any]]]:
    """Return the run's events, divided into one list per start."""
    starts: list[list[dict[str, Any]]] = []
    for event in run.events:
        if event["event"] == "started" or not starts:
            starts.append([])
        starts[-1].append(event)
    return starts


def _others(incidents: list[Incident]) -> str:
    """Return all causes over all starts as text, each with its ranks, count, first message and remedy."""
    lines = []
    for cause in dict.fromkeys(one.cause for one in incidents):
        own = [one for one in incidents if one.cause is cause]
        ranks = sorted({rank for one in own for rank in one.ranks})
        shown = ", ".join(map(str, ranks[:SHOWN])) + (", ..." if len(ranks) > SHOWN else "")
        more = [f"rank {shown}"] * bool(ranks) + [f"{len(own)} messages"] * (len(own) > 1)
        lines.append(f"- {_plain(cause.meaning)} [{cause}]" + (f" ({', '.join(more)})" if more else ""))
        lines.append(_wrapped(f"{own[0].when:%Y-%m-%d %H:%M:%S} UTC: {own[0].text}", "    "))
        lines.append(_wrapped(f"try: {_plain(cause.remedy)}", "    "))
    return "\n".join(["ALL INCIDENTS OF THE RUN, the worst first:", *lines]) if lines else ""


def _starts(run: RunRecord) -> str:
    """Return one line per start, with time, ranks, first step and end. Empty for fewer than two starts."""
    lines = []
    for number, events in enumerate(_starts_of(run), 1):
        begun = next((event for event in events if event["event"] in ("fresh", "resumed")), None)
        end = next((event for event in reversed(events) if event["event"] in ENDS), None)
        where = f"from step {begun['step']}" if begun else "before any state was loaded"
        how = f"{end['event']} at step {end['step']}" if end else "no report of an end"
        world = events[0].get("world_size")
        lines.append(f"  {number}. {events[0].get('time', '')[:19]} {world or '?'} ranks, {where}: {how}")
    if len(lines) < 2:
        return ""
    left_out = [f"  ... {len(lines) - SHOWN} earlier starts"] if len(lines) > SHOWN else []
    return "\n".join(["STARTS OF THIS RUN:", *left_out, *lines[-SHOWN:]])


def _began(events: list[dict[str, Any]]) -> float:
    """Return the time at which a start began, in seconds since 1970; 0 if it is unknown. events: the events of the start."""
    times = [event["time"] for event in events if event["event"] == "started" and "time" in event]
    return datetime.fromisoformat(times[0]).timestamp() if times else 0.0


def _standings(run: RunRecord) -> str:
    """Return one line per rank: its position in the code when the watchdog ended it. Empty without stack files.

    Ranks of the last start with stack files. A rank overwrites its file of an earlier start.
    """
    logs, starts = run.path / "logs", _starts_of(run) or [[]]
    found = (read_stacks(logs, _began(events)) for events in reversed(starts))
    standings, collectives = next(filter(None, found), {}), read_collectives(logs)
    odd = odd_ranks(standings)
    lines = []
    for rank, one in standings.items():
        waits = f", waiting in {one.collective}" if one.collective else ", in no collective"
        lines.append(
            f"  rank {rank}: {one.where}{waits}{'   <- the others wait for it' if rank in odd else ''}"
        )
        if rank in collectives:
            lines.append(f"    last collective: {collectives[rank]}")
    return "\n".join(["WHERE THE RANKS STOOD when the watchdog ended them:", *lines]) if lines else ""


def _traces(path: Path) -> str:
    """Return one line per profiler trace, with step times in ms and the four slowest operators. Empty without traces."""
    lines = []
    for trace in sorted((path / "profile").glob("rank-*.json.gz")):
        with suppress(OSError, ValueError, EOFError):
            spans = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
            times: Counter[str] = Counter()
            for span in spans:
                if span.get("ph") == "X" and span.get("cat") in ("kernel", "cpu_op"):
                    times[span["name"]] += span["dur"]
            steps = [
                span["dur"] / 1e3
                for span in spans
                if re.fullmatch(r"step \d+", str(span.get("name"))) and "dur" in span
            ]
            top = ", ".join(f"{name} {micro / 1e3:.1f} ms" for name, micro in times.most_common(4))
            shown = ", ".join(f"{step:.1f}" for step in steps[:6])
            lines.append(_wrapped(f"{trace.name}: steps of {shown} ms; most time in {top}", "  "))
    return "\n".join(["TRACES:", *lines]) if lines else ""


def _wrapped(text: str, indent: str = "") -> str:
    text = text if len(text) <= 600 else text[:597] + "..."
    return textwrap.fill(text, WIDTH, initial_indent=indent, subsequent_indent=indent + "  ")
