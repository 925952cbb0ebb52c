"""The order of collectives on the simulated GPU: read the logs of all ranks, compare them, simulate their execution.

    python -m tests.simulated_gpu.order FOLDER      checks the logs nccl.0, nccl.1, ... of a run

A rank's log has a line per call that waits or is waited for, in the order in which the host makes them:

    init COMMUNICATOR SIZE RANK               the host joins a communicator, and waits for its other ranks
    split PARENT CHILD KEY                    the same, of a part of the parent's ranks; all of these take part
    call COMMUNICATOR KIND COUNT DTYPE ARGUMENT STREAM      NCCL; argument: the operation, the root or the peer
    group, call ..., end                      calls that NCCL launches as one
    record EVENT STREAM                       wait EVENT STREAM
    synchronize-stream STREAM                 synchronize-event EVENT       synchronize-device
    host THREAD GROUP RANKS KIND COUNT DTYPE  a gloo collective: the thread waits for the other ranks
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

_DTYPES = "int8 uint8 int32 uint32 int64 uint64 float16 float32 float64 bfloat16 float8e4m3 float8e5m2".split()
_MESSAGES = ("ncclSend", "ncclRecv")
# Layouts in which ranks launch collectives of several communicators in different orders, so that a GPU must run two at once.
CONCURRENT: frozenset[str] = frozenset()
Line = list[str]


class Call(NamedTuple):
    """A collective, or one side of a message. argument: the operation, the root or the peer's rank in the communicator."""

    communicator: str
    kind: str
    count: int = 0
    dtype: str = ""
    argument: int = -1
    stream: str = ""

    def __str__(self) -> str:
        peer = f" {'to' if self.kind == 'ncclSend' else 'from'} its rank {self.argument}" * self._is_message
        return f"{self.kind} of {self.count} {self.dtype}{peer} on {self.communicator}"

    @property
    def _is_message(self) -> bool:
        return self.kind in _MESSAGES

    @property
    def agreed(self) -> tuple[object, ...]:
        """The part that all participants must agree on."""
        both = self.count, self.dtype
        return both if self._is_message else (self.kind, *both, self.argument)


class Meeting(NamedTuple):
    """The n-th collective of a communicator, or the n-th message between two of its ranks. Both have ranks of the world."""

    communicator: str
    ranks: tuple[int, ...]
    is_message: bool
    number: int


@dataclass(frozen=True)
class Record:
    """One line, or calls that are launched as one. `kind`: launch, host, record, wait, or a synchronize-...

    calls: with the meeting of each. words: the line's arguments. thread: of the host; empty for the main thread.
    """

    kind: str
    words: Line
    calls: list[tuple[Call, Meeting]] = field(default_factory=list)
    thread: str = ""


def read(folder: Path) -> list[list[Record]]:
    """Return the records of all ranks. Raises AssertionError if there are none."""
    names = sorted(folder.glob("nccl.*"), key=lambda path: int(path.suffix[1:]))
    assert names, f"{folder} has no logs"
    return parse([path.read_text() for path in names])


def parse(logs: Sequence[str]) -> list[list[Record]]:
    """Return the records of all ranks from the logs' text."""
    lines = [[line.split() for line in log.splitlines()] for log in logs]
    communicators = _communicators(lines)
    return [list(_records(rank, own, communicators)) for rank, own in enumerate(lines)]


def _communicators(logs: Sequence[list[Line]]) -> dict[str, tuple[int, ...]]:
    """Return the ranks of the world that each communicator has, in the order of their ranks in it."""
    found: dict[str, dict[tuple[int, int], int]] = defaultdict(dict)
    for rank, lines in enumerate(logs):
        for kind, *words in lines:
            if kind == "init":
                found[words[0]][int(words[2]), rank] = rank
            elif kind == "split":
                found[words[1]][int(words[2]), rank] = rank
            elif kind == "host":
                found[words[1]] = {(int(one), int(one)): int(one) for one in words[2].split(",")}
    return {name: tuple(of for _, of in sorted(ranks.items())) for name, ranks in found.items()}


def _records(
    rank: int, lines: list[Line], communicators: dict[str, tuple[int, ...]]
) -> Iterator[Record]:
    seen: Counter[tuple[object, ...]] = Counter()
    group: list[tuple[Call, Meeting]] | None = None

    def met(call: Call) -> tuple[Call, Meeting]:
        ranks, message = communicators[call.communicator], call.kind in _MESSAGES
        if message:
            peer = ranks[call.argument]
            ranks = (rank, peer) if call.kind == "ncclSend" else (peer, rank)
        # By kind too: a rank may send to itself.
        key = call.communicator, ranks, message, call.kind if message else ""
        seen[key] += 1
        return call, Meeting(*key[:3], seen[key])

    for kind, *words in lines:
        if kind == "group":
            group = []
        elif kind == "call":
            name, call, count, dtype, argument, stream = words
            one = met(Call(name, call, int(count), _DTYPES[int(dtype)], int(argument), stream))
            if group is None:
                yield Record("launch", words, [one])
            else:
                group.append(one)
        elif kind == "end":
            for name in dict.fromkeys(call.communicator for call, _ in group or ()):
                yield Record("launch", words, [one for one in group or () if one[0].communicator == name])
            group = None
        elif kind in ("init", "split"):
            size = int(words[1]) if kind == "init" else 0
            yield Record("host", words, [met(Call(words[0], kind, size))])
        elif kind == "host":
            thread, name, _, call, count, dtype = words
            yield Record("host", words, [met(Call(name, call, int(count), dtype))], thread.strip("-"))
        else:
            yield Record(kind, words)


def compare(logs: Sequence[list[Record]]) -> list[str]:
    """Return how the ranks disagree: for each communicator, and each two ranks with messages, the first difference."""
    found: dict[Meeting, dict[int, Call]] = defaultdict(dict)
    for rank, records in enumerate(logs):
        for record in records:
            for call, meeting in record.calls:
                found[meeting][rank] = call
    problems: dict[tuple[object, ...], str] = {}
    for meeting, calls in sorted(found.items(), key=lambda item: item[0].number):
        absent = set(meeting.ranks) - calls.keys()
        if absent or len({call.agreed for call in calls.values()}) > 1:
            each = [f"rank {rank}: {call}" for rank, call in sorted(calls.items())]
            each += [f"rank {rank}: nothing" for rank in sorted(absent)]
            kind = "message" if meeting.is_message else "collective"
            problems.setdefault(meeting[:3], f"{kind} {meeting.number}: {'; '.join(each)}")
    return list(problems.values())


@dataclass(eq=False)
class _Task:
    """A launch, or a wait of a stream or of the host. It starts when all tasks of `after` are done, and has met all
    others of `meetings` before it is done."""

    rank: int
    text: str
    after: list[_Task]
    meetings: list[Meeting] = field(default_factory=list)
    started: bool = False
    done: bool = False


def simulate(logs: Sequence[list[Record]], *, serial: bool = False) -> str:
    """Return the deadlock in which the ranks end, or "" if they all finish.

    A stream does its work in order, and so does a communicator. Streams are concurrent, unless `serial`: then a GPU runs one
    launch at a time, in the order of the host.
    """
    tasks = [task for rank, records in enumerate(logs) for task in _tasks(rank, records, serial)]
    users: dict[_Task, list[_Task]] = defaultdict(list)
    for task in tasks:
        for other in task.after:
            users[other].append(task)
    left = {task: len(task.after) for task in tasks}
    absent: dict[Meeting, set[int]] = {}
    here: dict[Meeting, list[_Task]] = defaultdict(list)
    ready = deque(task for task in tasks if not task.after)
    while ready:
        task = ready.popleft()
        task.started = True
        left[task] = len(task.meetings)
        ended = [] if task.meetings else [task]
        for meeting in task.meetings:
            here[meeting].append(task)
            absent.setdefault(meeting, set(meeting.ranks)).discard(task.rank)
            if not absent[meeting]:
                for other in here.pop(meeting):
                    left[other] -= 1
                    ended += [other] * (left[other] == 0)
        for other in ended:
            other.done = True
            for user in users[other]:
                left[user] -= 1
                ready += [user] * (left[user] == 0)
    owners = {(meeting, task.rank): task for task in tasks for meeting in task.meetings}
    return "\n".join(
        f"rank {task.rank}: {task.text} waits for "
        + ", ".join(_behind(rank, owners.get((meeting, rank))) for rank in sorted(absent[meeting]))
        for task in tasks
        if task.started and not task.done
        for meeting in task.meetings
        if absent[meeting]
    )


def _behind(rank: int, task: _Task | None) -> str:
    """Return why a rank has not come to a meeting: `task` is its call there."""
    if task is None:
        return f"rank {rank}, which never calls it"
    while not task.started:
        task = next(other for other in task.after if not other.done)
    return f"rank {rank}, where it is behind {task.text}"


def _tasks(rank: int, records: list[Record], serial: bool) -> Iterator[_Task]:
    """Yield the tasks of a rank in the order of its host. An event is the task that was its stream's last when recorded."""
    streams: dict[str, _Task | None] = {}
    events: dict[str, _Task | None] = {}
    communicators: dict[str, _Task] = {}
    threads: dict[str, _Task] = {}

    def task(text: str, *after: _Task | None, meetings: Sequence[Meeting] = ()) -> _Task:
        return _Task(rank, text, [other for other in dict.fromkeys(after) if other], list(meetings))

    for record in records:
        host = threads.get(record.thread)
        meetings = [meeting for _, meeting in record.calls]
        text = ", ".join(str(call) for call, _ in record.calls)
        if record.kind == "launch":
            own = {call.stream for call, _ in record.calls}
            order = "" if serial else record.calls[0][0].communicator
            before = (host, communicators.get(order), *map(streams.get, own))
            communicators[order] = new = task(text, *before, meetings=meetings)
            streams |= dict.fromkeys(own, new)
        elif record.kind == "record":
            event, stream = record.words
            events[event] = streams.get(stream)
            continue
        elif record.kind == "wait":
            event, stream = record.words
            streams[stream] = new = task("a wait", host, streams.get(stream), events.get(event))
        else:
            waits: list[_Task | None] = []
            if record.kind == "synchronize-stream":
                waits = [streams.get(record.words[0])]
            elif record.kind == "synchronize-event":
                waits = [events.get(record.words[0])]
            elif record.kind == "synchronize-device":
                waits = list(streams.values())
            threads[record.thread] = new = task(text or "a wait of the host", host, *waits, meetings=meetings)
        yield new


def check(folder: Path) -> str:
    """Return the deadlock that the ranks would end in if a GPU ran one launch at a time, or "".

    Raises AssertionError if they disagree, or end in a deadlock in any case.
    """
    logs = read(folder)
    assert any(record.kind == "launch" for record in logs[0]), "the logs have no NCCL call"
    problems = compare(logs)
    assert not problems, "the ranks disagree\n" + "\n".join(problems)
    deadlock = simulate(logs)
    assert not deadlock, f"a deadlock\n{deadlock}"
    return simulate(logs, serial=True)


if __name__ == "__main__":
    serial = check(Path(sys.argv[1]))
    print(f"with one launch at a time a deadlock:\n{serial}" if serial else "no deadlock")
