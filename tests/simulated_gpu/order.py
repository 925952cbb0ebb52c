"""The order of collectives on the simulated GPU: read the logs of all ranks, compare them, simulate their execution.

    python -m tests.simulated_gpu.order FOLDER      checks the logs nccl.0, nccl.1, ... of a run

A rank's log has a line for each call with a wait on either side, in the host's order:

    init COMMUNICATOR SIZE RANK               the host creates a communicator, and waits for its other ranks
    split PARENT CHILD KEY                    the same for a subset of the parent's ranks; all of them take part
    call COMMUNICATOR NAME COUNT DTYPE ARGUMENT STREAM ...  NCCL calls launched as one, with six words each
    record EVENT STREAM                       wait EVENT STREAM
    synchronize-stream STREAM                 synchronize-event EVENT       synchronize-device
    host THREAD GROUP RANKS NAME COUNT DTYPE  a gloo collective: the thread (-: the main one) waits for the other ranks
"""

from __future__ import annotations

import re
import sys
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

_DTYPES = ["int8", "uint8", "int32", "uint32", "int64", "uint64", "float16", "float32", "float64", "bfloat16"]
_DTYPES += ["float8_e4m3", "float8_e5m2"]
Line = list[str]


class Operation(NamedTuple):
    """A collective or a message. ranks: participating global ranks; for a message, sender and receiver.

    kind: message, collective or connection. number: index among operations of this kind, communicator and ranks.
    """

    communicator: str
    ranks: tuple[int, ...]
    kind: str
    number: int


class Call(NamedTuple):
    """One rank's part in an operation. argument: the reduction, the root, or the peer's rank in the communicator."""

    operation: Operation
    name: str
    count: int
    dtype: str
    argument: int
    stream: str

    def __str__(self) -> str:
        communicator, ranks, kind, _ = self.operation
        between = "from rank {} to {}" if kind == "message" else "of ranks {}" + ", {}" * (len(ranks) - 1)
        return f"{self.name} of {self.count} {self.dtype} on {communicator} {between.format(*ranks)}"

    @property
    def agreed(self) -> tuple[object, ...]:
        """Return the values that must be equal on all ranks."""
        both = self.count, self.dtype
        return both if self.operation.kind == "message" else (self.name, *both, self.argument)

    @property
    def connection(self) -> Operation:
        """Return the operation that connects the ranks before the first call."""
        kind = "message" if self.operation.kind == "message" else self.name
        return self.operation._replace(kind=f"connection for {kind}", number=1)


@dataclass(frozen=True)
class Record:
    """One line, or several calls launched as one. kind: launch, host, record, wait or synchronize-...

    words: the line's arguments. thread: the calling host thread.
    """

    kind: str
    words: Line
    calls: list[Call] = field(default_factory=list)
    thread: str = "-"


def read(folder: Path) -> list[list[Record]]:
    """Return the records of each rank; AssertionError without logs."""
    logs = sorted(folder.glob("nccl.*"), key=lambda path: int(path.suffix[1:]))
    assert logs, f"{folder} has no logs"
    return parse([path.read_text() for path in logs])


def parse(logs: Sequence[str]) -> list[list[Record]]:
    """Return the records of each rank from the texts of the logs."""
    lines = [[line.split() for line in log.splitlines()] for log in logs]
    communicators = _communicators(lines)
    return [list(_records(rank, own, communicators)) for rank, own in enumerate(lines)]


def _communicators(logs: Sequence[list[Line]]) -> dict[str, tuple[int, ...]]:
    """Return each communicator's global ranks, in the order of their local ranks; -1: a rank missing from all logs."""
    found: dict[str, dict[tuple[int, ...], int]] = defaultdict(dict)
    for rank, lines in enumerate(logs):
        for kind, *words in lines:
            if kind == "init":
                absent = {(one,): -1 for one in range(int(words[1]))}
                found[words[0]] = absent | found[words[0]] | {(int(words[2]),): rank}
            elif kind == "split":
                found[words[1]][int(words[2]), rank] = rank
            elif kind == "host":
                found[words[1]] = {(int(one),): int(one) for one in words[2].split(",")}
    return {name: tuple(rank for _, rank in sorted(ranks.items())) for name, ranks in found.items()}


def _records(rank: int, lines: list[Line], communicators: dict[str, tuple[int, ...]]) -> Iterator[Record]:
    seen: Counter[tuple[object, ...]] = Counter()

    def call(
        communicator: str, name: str, count: int, dtype: str, argument: int = -1, stream: str = ""
    ) -> Call:
        ranks, kind = communicators[communicator], "collective"
        if name in ("ncclSend", "ncclRecv"):
            peer, kind = ranks[argument], "message"
            ranks = (rank, peer) if name == "ncclSend" else (peer, rank)
        # Sends and receives have separate counts, because a rank may send to itself.
        key = communicator, ranks, kind, name if kind == "message" else ""
        seen[key] += 1
        return Call(Operation(communicator, ranks, kind, seen[key]), name, count, dtype, argument, stream)

    for kind, *words in lines:
        if kind == "call":
            calls = [
                call(communicator, name, int(count), _DTYPES[int(dtype)], int(argument), stream)
                for communicator, name, count, dtype, argument, stream in zip(*[iter(words)] * 6, strict=True)
            ]
            for communicator in dict.fromkeys(one.operation.communicator for one in calls):
                own = [one for one in calls if one.operation.communicator == communicator]
                yield Record("launch", words, own)
        elif kind in ("init", "split"):
            yield Record("host", words, [call(words[0], kind, len(communicators[words[0]]), "ranks")])
        elif kind == "host":
            thread, group, _, name, count, dtype = words
            yield Record("host", words, [call(group, name, int(count), dtype)], thread)
        else:
            yield Record(kind, words)


def volume(records: Sequence[Record]) -> dict[str, dict[str, list[int]]]:
    """Return a rank's calls and their bytes by communicator and kind: {"COMMUNICATOR": {"ncclAllReduce": [calls, bytes]}}.

    Communicators without a parent are numbered, because their names come from NCCL's random ids.
    """
    found: dict[str, dict[str, list[int]]] = {}
    roots: dict[str, str] = {}
    for call in (call for record in records if record.kind == "launch" for call in record.calls):
        root, *parts = call.operation.communicator.split(".")
        name = ".".join([roots.setdefault(root, f"root{len(roots)}"), *parts])
        total = found.setdefault(name, {}).setdefault(call.name, [0, 0])
        total[0] += 1
        total[1] += call.count * int(re.findall(r"\d+", call.dtype)[0]) // 8
    return found


def compare(logs: Sequence[list[Record]]) -> list[str]:
    """Return the first difference between ranks for each communicator, and for each pair of ranks with messages."""
    found: dict[Operation, dict[int, Call]] = defaultdict(dict)
    for rank, records in enumerate(logs):
        for record in records:
            for call in record.calls:
                found[call.operation][rank] = call
    problems: dict[tuple[object, ...], str] = {}
    for operation, calls in sorted(found.items(), key=lambda item: item[0].number):
        if set(operation.ranks) != calls.keys() or len({call.agreed for call in calls.values()}) > 1:
            each = [f"rank {rank}: {calls.get(rank, 'nothing')}" for rank in sorted(set(operation.ranks))]
            problems.setdefault(operation[:3], f"{operation.kind} {operation.number}: {'; '.join(each)}")
    return list(problems.values())


@dataclass(eq=False)
class _Task:
    """A launch, or a wait of a stream or of the host.

    It starts after all tasks in `after` are done. It is done when all ranks of each of its operations have started theirs.
    """

    rank: int
    text: str
    after: list[_Task]
    operations: list[Operation] = field(default_factory=list)
    started: bool = False
    done: bool = False


def simulate(logs: Sequence[list[Record]], *, serial: bool = False) -> str:
    """Return the ranks' final deadlock, or "" if they finish.

    Each stream and each communicator works in order. Streams are concurrent, unless `serial`: then a GPU runs one launch
    at a time, in the host's order. The host waits for the first collective of each kind and for the first message to each
    rank, because NCCL connects the ranks in these calls.
    """
    tasks = [task for rank, records in enumerate(logs) for task in _tasks(rank, records, serial)]
    users: dict[_Task, list[_Task]] = defaultdict(list)
    for task in tasks:
        for other in task.after:
            users[other].append(task)
    left = {task: len(task.after) for task in tasks}  # tasks before the start, then operations before the end
    started: dict[Operation, list[_Task]] = defaultdict(list)
    absent: dict[Operation, set[int]] = {}
    ready = deque(task for task in tasks if not task.after)
    while ready:
        task = ready.popleft()
        task.started, left[task] = True, len(task.operations)
        ended = [] if task.operations else [task]
        for operation in task.operations:
            started[operation].append(task)
            absent.setdefault(operation, set(operation.ranks)).discard(task.rank)
            if not absent[operation]:
                for other in started.pop(operation):
                    left[other] -= 1
                    ended += [other] * (left[other] == 0)
        for other in ended:
            other.done = True
            for user in users[other]:
                left[user] -= 1
                ready += [user] * (left[user] == 0)
    owners = {(operation, task.rank): task for task in tasks for operation in task.operations}
    return "\n".join(
        f"rank {task.rank}: {task.text} waits for "
        + ", ".join(_behind(rank, owners.get((operation, rank))) for rank in sorted(absent[operation]))
        for task in tasks
        if task.started and not task.done
        for operation in task.operations
        if absent[operation]
    )


def _behind(rank: int, task: _Task | None) -> str:
    """Return the reason why a rank does not start `task`, its call of an operation."""
    if task is None:
        return f"rank {rank}, which never calls it"
    while not task.started:
        task = next(other for other in task.after if not other.done)
    return f"rank {rank}, where it is behind {task.text}"


def _tasks(rank: int, records: list[Record], serial: bool) -> Iterator[_Task]:
    """Yield a rank's tasks in the host's order. An event means its stream's last task at the time of the record."""
    streams: dict[str, _Task | None] = {}
    events: dict[str, _Task | None] = {}
    communicators: dict[str, _Task] = {}
    threads: dict[str, _Task] = {}
    connected: set[Operation] = set()

    def task(text: str, *after: _Task | None, operations: Sequence[Operation] = ()) -> _Task:
        return _Task(rank, text, [other for other in dict.fromkeys(after) if other], list(operations))

    for record in records:
        host, text = threads.get(record.thread), ", ".join(map(str, record.calls))
        operations = [call.operation for call in record.calls]
        if record.kind == "launch":
            own, order = {call.stream for call in record.calls}, "" if serial else operations[0].communicator
            new = {call.connection for call in record.calls} - connected
            if new:
                connected |= new
                yield (host := task(f"the connection for {text}", host, operations=sorted(new)))
                threads[record.thread] = host
            last = task(text, host, communicators.get(order), *map(streams.get, own), operations=operations)
            communicators[order] = last
            streams |= dict.fromkeys(own, last)
            yield last
        elif record.kind == "record":
            event, stream = record.words
            events[event] = streams.get(stream)
        elif record.kind == "wait":
            event, stream = record.words
            streams[stream] = last = task("a wait", host, streams.get(stream), events.get(event))
            yield last
        else:
            handle = record.words[0] if record.words else ""
            before = {
                "synchronize-stream": [streams.get(handle)],
                "synchronize-event": [events.get(handle)],
                "synchronize-device": list(streams.values()),
            }.get(record.kind, [])
            text = text or "a wait of the host"
            threads[record.thread] = last = task(text, host, *before, operations=operations)
            yield last


def check(folder: Path) -> str:
    """Return the ranks' deadlock with one launch at a time on each GPU, or "".

    AssertionError: ranks differ, or also deadlock with concurrent launches.
    """
    logs = read(folder)
    assert any(record.kind == "launch" for record in logs[0]), "the logs have no NCCL call"
    problems = compare(logs)
    assert not problems, "ranks differ\n" + "\n".join(problems)
    deadlock = simulate(logs)
    assert not deadlock, f"a deadlock\n{deadlock}"
    return simulate(logs, serial=True)


if __name__ == "__main__":
    found = check(Path(sys.argv[1]))
    print(f"a deadlock, if a GPU runs one launch at a time\n{found}" if found else "no deadlock")
