"""What went wrong in a run, from the files it left: what happened first, on which rank, and what to try."""

from __future__ import annotations

import gzip
import json
import os
import re
import socket
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from forge.observe.json_lines import read_object
from forge.runtime.errors import BAD_CONFIG
from forge.tools.report.read import RunRecord, read_run
from forge.tools.report.rules import AGAIN, DIED, MACHINE, RULES, Rule
from forge.tools.report.stacks import odd_ranks, read_collectives, read_stacks

# Logs of earlier versions have no offset from UTC: their times are taken for this machine's.
_LINE = re.compile(r"(\d{4}-\d\d-\d\d[T ][\d:]{8}\.\d{3}(?:[+-]\d\d:\d\d)?) rank (\d+) ([A-Z]+) \S+: (.*)")
ENDS = ("stopped", "finished", "failed")
WIDTH, SHOWN = 110, 12


@dataclass(frozen=True)
class Incident:
    """A message or event that a rule knows. rank: the one it names, else the one that wrote it."""

    when: datetime
    rank: int
    rule: Rule
    text: str


def diagnose(path: Path) -> str:
    """Return a page of text about the run in the directory `path`. Raises UserError if it is no run's."""
    run = read_run(path)
    incidents = sorted(read_incidents(run), key=lambda incident: incident.when)
    parts = [
        _head(run),
        _first(run, incidents),
        _others(incidents),
        _starts(run),
        _standings(path),
        _traces(path),
    ]
    return "\n\n".join(part for part in parts if part)


def read_incidents(run: RunRecord) -> Iterator[Incident]:
    """Yield what the rules know of all logs and events, each message of a rank once."""
    for event in run.events:
        kind = event["event"]
        text = f"event {kind}"
        stated = event.get("reason") or event.get("problem") or event.get("error") or event.get("change")
        if kind in ENDS and kind != "finished":
            text = str(stated)
        rule = _rule_of(text if kind in ENDS else f"{text} {stated or ''}")
        if rule is not None and "time" in event and kind != "saved":
            when = datetime.fromisoformat(event["time"])
            yield Incident(
                when, int(event.get("rank", _rank_in(str(stated), 0))), rule, _words(event, stated)
            )
    seen = set()
    for log in sorted((run.path / "logs").glob("rank-*.log")):
        for when, rank, level, message in read_log(log):
            rule = _rule_of(message) if level != "INFO" else None
            if rule is not None and (rank, message) not in seen:
                seen.add((rank, message))
                yield Incident(when, _rank_in(message, rank), rule, message)


def read_log(path: Path) -> Iterator[tuple[datetime, int, str, str]]:
    """Yield time, rank, level and message of each entry of a rank's log; further lines of a message are left out."""
    with suppress(OSError):
        for line in path.read_text("utf-8", errors="replace").splitlines():
            if match := _LINE.match(line):
                when = datetime.fromisoformat(match[1]).astimezone(UTC)
                yield when, int(match[2]), match[3], match[4]


def _rule_of(text: str) -> Rule | None:
    return next((rule for rule in RULES if rule.pattern.search(text)), None)


def _rank_in(text: str, default: int) -> int:
    """The rank that a message names as the cause."""
    for pattern in (r"no answer from ranks? (\d+)", r"first to fail was rank (\d+)", r"rank (\d+)"):
        if match := re.search(pattern, text):
            return int(match[1])
    return default


def _words(event: dict[str, Any], stated: Any) -> str:
    step = f" at step {event['step']}" if isinstance(event.get("step"), int) else ""
    more = stated or ", ".join(
        f"{key} {event[key]}"
        for key in ("rank", "phase", "seconds", "median_s", "cause", "where", "differences")
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
    """How the latest start ended, where it could not report that itself: killed, or still running; else empty."""
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
    """What happened first in the latest start that did not end well."""
    began = _last_bad_start(run)
    silent = silent_end(run)
    recent = [one for one in incidents if began is not None and one.when >= began]
    grave = [one for one in recent if one.rule.grave]
    if silent == "running":
        return (
            f"It is still running, as process {read_object(run.path / '.lock').get('pid')} on this machine."
        )
    if silent == "elsewhere":
        host = read_object(run.path / ".lock").get("host")
        return f"It runs on {host}, or was killed there: ask that machine whether its process lives."
    if grave and not (silent == "killed" and not _ended_badly(run)):
        first = grave[0]
        odd = odd_ranks(read_stacks(run.path / "logs")) if "hangs" in first.rule.name else []
        rank = (
            ", ".join(map(str, odd)) if odd else _dead(recent) if first.rule.name == DIED else str(first.rank)
        )
        return "\n".join(
            [
                f"WHAT HAPPENED FIRST: {first.rule.name}",
                f"RANK: {rank}",
                _wrapped(f"{first.when:%H:%M:%S} UTC: {first.text}", "  "),
                _wrapped(f"WHAT TO TRY: {first.rule.remedy}"),
            ]
        )
    if silent == "killed":
        saving = sorted(one.name for one in (run.path / "checkpoints").glob(".partial*"))
        lost = any(one.rule.name == DIED for one in grave)
        during = f" during a save ({saving[-1]} was left)" if saving else ""
        return "\n".join(
            [
                f"WHAT HAPPENED FIRST: the processes were killed{during}: the run reported no end",
                "RANK: "
                + (
                    "0, which the others report lost"
                    if lost
                    else "every rank, or the one whose log ends first"
                ),
                _wrapped(f"WHAT TO TRY: {MACHINE} {AGAIN}"),
            ]
        )
    if run.status.get("state") == "failed":
        read = f"Read the end of the logs in {run.path / 'logs'}. {AGAIN}"
        refused = run.status.get("exit_code") == BAD_CONFIG
        remedy = "Fix what the message names, and start the same command again." if refused else read
        return f"WHAT HAPPENED FIRST: {run.status.get('reason')}\nWHAT TO TRY: {remedy}"
    if run.status.get("state") == "stopped":
        return f"Nothing failed: it was stopped on request.\nWHAT TO TRY: {AGAIN}"
    return (
        "Nothing ended this run early."
        if not incidents
        else "The latest start ended well; what it met is below."
    )


def _dead(incidents: Sequence[Incident]) -> str:
    """The ranks that others had no answer from. A rank that lost a connection need not know whose it was."""
    named = {
        int(number)
        for one in incidents
        for ranks in re.findall(r"no answer from ranks? (\d+(?:, \d+)*)", one.text)
        for number in ranks.split(", ")
    }
    return ", ".join(map(str, sorted(named))) or "not known; the one whose log ends first"


def _ended_badly(run: RunRecord) -> bool:
    return bool(run.events) and any(event["event"] == "failed" for event in _of_last_start(run))


def _of_last_start(run: RunRecord) -> list[dict[str, Any]]:
    starts = [at for at, event in enumerate(run.events) if event["event"] == "started"]
    return run.events[starts[-1] :] if starts else run.events


def _last_bad_start(run: RunRecord) -> datetime | None:
    """When the latest start began, if it did not end well."""
    events = _of_last_start(run)
    if not events or events[-1]["event"] in ("stopped", "finished"):
        return None
    times = [event["time"] for event in events if "time" in event]
    return datetime.fromisoformat(times[0]) if times else None


def _others(incidents: list[Incident]) -> str:
    """Every fault that was met, over all starts: how often, when first, on which ranks, and what to try."""
    lines = []
    counts = Counter(one.rule.name for one in incidents)
    for name, count in sorted(
        counts.items(), key=lambda item: next(i.when for i in incidents if i.rule.name == item[0])
    ):
        own = [one for one in incidents if one.rule.name == name]
        ranks = sorted({one.rank for one in own})
        shown = ", ".join(map(str, ranks[:SHOWN])) + (", ..." if len(ranks) > SHOWN else "")
        times = f", {count} messages" if count > 1 else ""
        lines.append(f"- {name} (rank {shown}{times})")
        lines.append(_wrapped(f"{own[0].when:%Y-%m-%d %H:%M:%S} UTC: {own[0].text}", "    "))
        lines.append(_wrapped(f"try: {own[0].rule.remedy}", "    "))
    return "\n".join(["EVERYTHING THAT THE RUN MET, in order:", *lines]) if lines else ""


def _starts(run: RunRecord) -> str:
    """One line for each start: where it began and how it ended."""
    starts: list[list[dict[str, Any]]] = []
    for event in run.events:
        if event["event"] == "started" or not starts:
            starts.append([])
        starts[-1].append(event)
    lines = []
    for number, events in enumerate(starts, 1):
        begun = next((event for event in events if event["event"] in ("fresh", "resumed")), None)
        end = next((event for event in reversed(events) if event["event"] in ENDS), None)
        where = f"from step {begun['step']}" if begun else "before it loaded anything"
        how = (
            f"{end['event']} at step {end['step']}"
            if end
            else "no report of an end: killed, or still running"
        )
        world = events[0].get("world_size")
        lines.append(f"  {number}. {events[0].get('time', '')[:19]} {world or '?'} ranks, {where}: {how}")
    if len(lines) < 2:
        return ""
    left_out = [f"  ... {len(lines) - SHOWN} earlier ones"] if len(lines) > SHOWN else []
    return "\n".join(["STARTS OF THIS RUN:", *left_out, *lines[-SHOWN:]])


def _standings(path: Path) -> str:
    """Where the ranks stood when they were ended."""
    standings, collectives = read_stacks(path / "logs"), read_collectives(path / "logs")
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
    """What took the most time in the traces, if there are any."""
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
