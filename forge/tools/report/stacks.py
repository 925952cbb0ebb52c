"""Positions of ranks in the code when the watchdog ended them.

The sources are Python stacks, and PyTorch's flight record of the last collectives.
"""

from __future__ import annotations

import io
import pickle
import re
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_FRAME = re.compile(r'  File "(.+)", line (\d+) in (\S+)')
_FILE = re.compile(r"(?:stacks|collectives)-rank-(\d+)")


@dataclass(frozen=True)
class Standing:
    """The position of a rank's main thread.

    reason: why the watchdog ended the rank. where: function and line, in forge or in the user's code. collective: the
    collective in which the thread waits; empty if none.
    """

    reason: str
    where: str
    collective: str


def read_stacks(logs: Path, since: float = 0.0) -> dict[int, Standing]:
    """Return a dict from rank to code position, for each rank with a stack file in the folder `logs`, in rank order.

    since: leave out files last written before this time, in seconds since 1970. They are of an earlier start.
    """
    found = {}
    for path in logs.glob("stacks-rank-*.txt"):
        with suppress(OSError):
            if path.stat().st_mtime >= since:
                found[_rank(path)] = standing(path.read_text("utf-8", errors="replace"))
    return dict(sorted(found.items()))


def standing(text: str) -> Standing:
    """Return the code position of a rank's main thread.

    text: the rank's stack file, written by the watchdog. It has one stack per thread, with the main thread last.
    """
    head, *threads = re.split(r"^(?:Current thread|Thread) .*\n", text, flags=re.M)
    frames = _FRAME.findall(threads[-1]) if threads else []
    collective = next((name for file, _, name in frames if file.endswith("distributed_c10d.py")), "")
    own = [frame for frame in frames if "/torch/" not in frame[0] and "/site-packages/" not in frame[0]]
    where = "unknown"
    if own:
        file, line, name = own[0]
        where = f"{name} ({'/'.join(Path(file).parts[-2:])}:{line})"
    return Standing(head.strip().partition(": ")[2], where, collective)


def odd_ranks(standings: Mapping[int, Standing]) -> list[int]:
    """Return the ranks that probably delay the others.

    If some ranks wait in a collective and others do not, return the others. Otherwise, if more than half of all ranks are at
    one position, return the ranks at other positions.
    """
    if len(standings) < 2:
        return []
    outside = [rank for rank, one in standings.items() if not one.collective]
    if outside and len(outside) < len(standings):
        return outside
    [(usual, most)] = Counter(one.where for one in standings.values()).most_common(1)
    odd = [rank for rank, one in standings.items() if one.where != usual]
    return odd if most * 2 > len(standings) else []


def read_collectives(logs: Path) -> dict[int, str]:
    """Return a dict from rank to its last recorded collective, as text: name, number in its process group, and state."""
    found = {}
    for path in logs.glob("collectives-rank-*"):
        with suppress(OSError, pickle.UnpicklingError, EOFError, ValueError, AttributeError, IndexError):
            record = _Plain(io.BytesIO(path.read_bytes())).load()
            entries = record.get("entries", []) if isinstance(record, dict) else []
            if entries:
                found[_rank(path)] = _last(entries)
    return dict(sorted(found.items()))


def _last(entries: list[dict[str, Any]]) -> str:
    last = max(entries, key=lambda entry: entry.get("record_id", 0))
    number = last.get("collective_seq_id", last.get("record_id"))
    return f"{last.get('profiling_name', 'a collective')}, number {number} of its group: {last.get('state', 'unknown')}"


class _Plain(pickle.Unpickler):
    """An unpickler for plain values. It refuses to import anything, so a file in a run directory cannot execute code."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"refused to load {module}.{name} from a record of collectives")


def _rank(path: Path) -> int:
    match = _FILE.match(path.name)
    assert match is not None
    return int(match[1])
