"""Elastic runs on this machine: a rendezvous, and one agent in place of each node. Each runs in its own processes."""

from __future__ import annotations

import base64
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from forge.tools.elastic.meeting import Meeting
from tests.support.launchers import ROOT
from tests.support.runs import BASE, FLOAT64, Run, wait_for

SCRIPT = str(ROOT / "scripts" / "elastic.py")
LOST_AFTER_S = 8
# 24 sequences are divisible by 6, 4 and 2 ranks. Steps are slow enough for a fault between two of them.
BATCH = ["--train.global_batch_size=24", "--train.micro_batch_size=2"]


class Nodes:
    """Agents of one run in `folder`, all with the same options of train.py. NODE in an option means the agent's name."""

    def __init__(self, folder: Path, nodes: str, processes: int, *options: str, agent: Sequence[str] = ()):
        self.run = Run(folder)
        self._folder, self._nodes, self._processes = folder, nodes, processes
        self._agent = agent
        self._options = [*BASE, f"--run.output_dir={folder}", *BATCH, *options]
        self._meeting, self._closed = Meeting(0), threading.Event()
        self.port = self._meeting.port
        self._serving = threading.Thread(target=self._meeting.serve, args=(self._closed, 1.0), daemon=True)
        self._serving.start()
        self.agents: dict[str, subprocess.Popen] = {}

    def start(self, *names: str, **environment: str) -> None:
        """Start an agent for each name."""
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "RANK", "WORLD", "FORGE"))}
        for name in names:
            settings = [f"--nodes={self._nodes}", f"--processes={self._processes}"]
            settings += [
                f"--meeting=localhost:{self.port}",
                f"--lost-after={LOST_AFTER_S}",
                "--gather=3",
                "--patience=240",
            ]
            with open(self._folder / f"agent-{name}.txt", "ab") as terminal:
                self.agents[name] = subprocess.Popen(
                    [
                        sys.executable,
                        SCRIPT,
                        "agent",
                        *settings,
                        *self._agent,
                        "--",
                        *(o.replace("NODE", name) for o in self._options),
                    ],
                    cwd=self._folder,
                    env=clean | {"OMP_NUM_THREADS": "1"} | environment,
                    stdout=terminal,
                    stderr=subprocess.STDOUT,
                )

    def freeze(self, *names: str) -> None:
        """Send SIGSTOP to these agents and their ranks, to imitate a hanging node: their connections stay open."""
        for name in names:
            for pid in (self.agents[name].pid, *self.ranks(name)):
                os.kill(pid, signal.SIGSTOP)

    def thaw(self, *names: str) -> None:
        """Send SIGCONT to the ranks of these agents, then to the agents."""
        for name in names:
            for pid in (*self.ranks(name), self.agents[name].pid):
                os.kill(pid, signal.SIGCONT)

    def ranks(self, name: str) -> list[int]:
        """Return the process ids of this agent's ranks."""
        return [pid for pid in _processes() if _parent(pid) == self.agents[name].pid]

    def first(self) -> str:
        """Return the agent of rank 0."""
        pid = self.run.status()["pid"]
        return next(name for name in self.agents if pid in self.ranks(name))

    def kill(self, *names: str) -> None:
        """Send SIGKILL to these agents; the kernel kills their ranks."""
        for name in names:
            self.agents[name].kill()
        for name in names:
            self.agents.pop(name).wait()

    def wait_for_step(self, step: int) -> None:
        """Return after the run has written its metrics line of `step`."""

        def there() -> bool:
            for name, agent in self.agents.items():
                assert agent.poll() is None, self.output(name)
            path = self.run.path / "metrics.jsonl"
            return path.exists() and f'"step": {step},'.encode() in path.read_bytes()

        wait_for(there, 240)

    def wait_for_spare(self) -> None:
        """Return after the state of PyTorch's rendezvous shows a waiting spare node."""

        def waits() -> bool:
            state = pickle.loads(base64.b64decode(self._meeting.read("torch.rendezvous.forge")))
            return bool(state.redundancy_list)

        wait_for(waits, 240)

    def finish(self, seconds: float = 240) -> dict[str, int]:
        """Wait for every agent; return their exit codes."""
        return {name: agent.wait(seconds) for name, agent in self.agents.items()}

    def output(self, name: str) -> str:
        return (self._folder / f"agent-{name}.txt").read_text()

    def close(self) -> None:
        for name, agent in self.agents.items():
            if agent.poll() is None:
                ranks = self.ranks(name)
                agent.kill()
                agent.wait()
                for pid in ranks:  # the kernel has killed older ranks, but not one started a moment ago
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
        self._closed.set()
        self._serving.join()


def _processes() -> list[int]:
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal()]


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:  # the process has ended
        return 0


@contextmanager
def elastic(
    folder: Path, nodes: str, processes: int, *options: str, agent: Sequence[str] = ()
) -> Iterator[Nodes]:
    """Start agents with the options `agent` of elastic.py; kill them after the body."""
    folder.mkdir(exist_ok=True)
    group = Nodes(folder, nodes, processes, *options, agent=agent)
    try:
        yield group
    finally:
        group.close()


def assert_same_course(run: Run, whole: Run, tolerance: float = 1e-9, steps: int | None = None) -> None:
    """Assert that each step occurs once, with the metrics of the undisturbed run to `tolerance`.

    steps: compare only this number of first steps.
    """
    found, expected = run.metrics()[:steps], whole.metrics()[:steps]
    assert [line["step"] for line in found] == [line["step"] for line in expected]
    for one, other in zip(found, expected, strict=True):
        assert _close(one, other, tolerance), (one["step"], one, other)


def _close(one: Any, other: Any, tolerance: float) -> bool:
    """Return whether two lines of metrics are equal, with numbers compared to `tolerance`."""
    if isinstance(other, dict):
        return one.keys() == other.keys() and all(_close(one[key], other[key], tolerance) for key in other)
    if isinstance(other, list):
        return len(one) == len(other) and all(map(_close, one, other, [tolerance] * len(other)))
    if isinstance(other, float):
        return abs(one - other) <= tolerance * max(1.0, abs(other))
    return one == other


FLOAT64_EXPERTS = [*FLOAT64, "--model.moe.n_experts=4", "--model.moe.top_k=2", "--model.moe.expert_dim=32"]


def own_memory() -> None:
    """Give each pair of ranks its own memory folder, like the ranks of one node. A patch for `Run.start`."""
    from forge.run import tiers

    node = int(os.environ["RANK"]) // 2
    tiers.MEMORY = Path(os.environ["RUN_UNDER_TEST"]).parent / "memory" / f"node-{node}"
