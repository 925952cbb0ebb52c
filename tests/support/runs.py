"""Run train.py's `main` on forked ranks, and read the run directory.

Each rank is a real process with real signals and a real rendezvous. Forking saves only the interpreter's start and the
imports.
"""

from __future__ import annotations

import importlib
import json
import os
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from forge.checkpoint import read_state
from forge.checkpoint.folders import step_name
from tests.support.harness import TIMEOUT_S, start_ranks
from tests.support.scripts import prepare_rank

# A model with steps of a few milliseconds, on synthetic data.
BASE = [
    "--config=debug.toml",
    "--run.name=run",
    "--model.dim=32",
    "--model.n_layers=2",
    "--model.n_heads=4",
    "--model.n_kv_heads=2",
    "--model.ffn_dim=64",
    "--model.vocab_size=64",
    '--data.sources=[{path="synthetic",weight=1.0}]',
    "--data.validation=[]",
    "--train.seq_len=32",
    "--train.global_batch_size=8",
    "--train.micro_batch_size=2",
    "--train.steps=10",
    "--schedule.name=constant",
    "--schedule.warmup_steps=0",
    "--evaluate.interval=0",
    "--evaluate.sample_interval=0",
    "--metrics.log_interval=1",
    "--metrics.tensorboard=false",
    "--checkpoint.interval=2",
]
FLOAT64 = ["--precision.storage=float64", "--precision.compute=float64", "--precision.reduce=float64"]
EXPERTS = ["--model.moe.n_experts=4", "--model.moe.top_k=2", "--model.moe.expert_dim=32"]
TIMES = ("tokens_per_second", "step_time_s", "data_time_s", "gc_time_s", "memory_gib", "mfu")


class Run:
    """A run directory under `folder`, and its command. base: options of the command, without a name of another run."""

    def __init__(self, folder: Path, *options: str, base: Sequence[str] = BASE):
        self.path = folder / "run"
        self._terminal = folder / "terminal.txt"
        folder.mkdir(exist_ok=True)
        self._options = [*base, f"--run.output_dir={folder}", *options]

    def start(
        self,
        *options: str,
        world: int = 1,
        fault: str = "",
        patch: str = "",
        variables: dict[str, str] | None = None,
    ) -> Any:
        """Start the command; `.join()` of the result returns the exit codes in rank order.

        patch: "module:function", called on every rank first to plant a defect, with the run's path in the environment
        variable RUN_UNDER_TEST. variables: further environment variables.
        """
        self._terminal.unlink(missing_ok=True)
        environment = (variables or {}) | {"RUN_UNDER_TEST": str(self.path)}
        environment |= {"FORGE_FAULT": fault} if fault else {}
        port, meeting = reserve_port() if world > 1 else (None, {})
        environment |= meeting
        ranks = start_ranks(_main, world, [*self._options, *options], environment, self._terminal, patch)
        ranks.port = port
        return ranks

    def __call__(self, *options: str, world: int = 1, fault: str = "") -> int:
        """Run the command to its end. Return the exit code, which must be equal on all ranks."""
        codes = self.start(*options, world=world, fault=fault).join()
        assert len(set(codes)) == 1, f"exit codes differ: {codes}"
        return codes[0]

    def metrics(self, *, times: bool = False) -> list[dict[str, Any]]:
        """Return the lines of metrics.jsonl. times: also return the numbers that depend on the clock."""
        lines = [json.loads(line) for line in (self.path / "metrics.jsonl").read_text().splitlines()]
        return lines if times else [{k: v for k, v in line.items() if k not in TIMES} for line in lines]

    @property
    def stepping(self) -> bool:
        """Return whether the run has done a few steps. Its last line may be incomplete."""
        path = self.path / "metrics.jsonl"
        return path.exists() and path.read_bytes().count(b"\n") > 3

    def losses(self) -> list[float]:
        return [line["loss"] for line in self.metrics() if "loss" in line]

    def events(self, kind: str = "") -> list[dict[str, Any]]:
        """Return all events, or all events of one kind, without an incomplete last line."""
        path = self.path / "events.jsonl"
        text = path.read_text() if path.exists() else ""
        lines = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
        return [line for line in lines if kind in ("", line["event"])]

    def status(self) -> dict[str, Any]:
        return json.loads((self.path / "status.json").read_text())

    def checkpoints(self) -> list[str]:
        """Return the names in checkpoints/, including hidden ones."""
        return sorted(path.name for path in (self.path / "checkpoints").iterdir())

    def output(self) -> str:
        """Return the terminal output of the last start, all ranks together."""
        return self._terminal.read_text()

    def log(self, rank: int = 0) -> str:
        return (self.path / "logs" / f"rank-{rank}.log").read_text()


def refused(run: Run, *options: str, world: int = 1, code: int = 2) -> str:
    """Assert the refusal of a command: exit code `code`, one error, no traceback. Return its output."""
    assert run(*options, world=world) == code
    output = run.output()
    assert "Traceback" not in output
    assert output.count("forge: ") == 1, output
    return output


def sources(path: Path | str) -> str:
    return f'--data.sources=[{{path="{path}",weight=1.0}}]'


def tensor_files(run: Run, step: int) -> dict[str, str]:
    """Return name -> checksum of a checkpoint's files with parameters and moments."""
    manifest = json.loads((run.path / "checkpoints" / step_name(step) / "manifest.json").read_text())
    return {name: entry["sha256"] for name, entry in manifest["files"].items() if name.endswith(".distcp")}


def assert_same_history(run: Run, whole: Run, *, swept: bool = True) -> None:
    """Assert bitwise equality of all metrics except times, and of every tensor in the last checkpoint.

    swept: the last start has saved, so it must have removed the unfinished saves of earlier starts.
    """
    assert run.metrics() == whole.metrics()
    last = whole.metrics()[-1]["step"]
    assert tensor_files(run, last) == tensor_files(whole, last)
    states = [read_state(each.path / "checkpoints" / step_name(last)) for each in (run, whole)]
    assert states[0] == states[1]
    assert not swept or not [name for name in run.checkpoints() if name.startswith((".partial", ".pruned"))]


def flip_a_bit(run: Run, step: int) -> None:
    """Flip one bit in the middle of a checkpoint's largest file."""
    folder = run.path / "checkpoints" / step_name(step)
    file = max(folder.rglob("*.distcp"), key=lambda path: path.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def wait_for(condition: Callable[[], object], seconds: float = TIMEOUT_S) -> None:
    """Wait until `condition` holds; AssertionError after `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds:.0f} s"
        time.sleep(0.02)


def _main(
    rank: int, world: int, argv: list[str], environment: dict[str, str], terminal: Path, patch: str
) -> None:
    prepare_rank(rank, world, environment, terminal)
    from forge.run import launch

    if patch:
        module, _, function = patch.partition(":")
        getattr(importlib.import_module(module), function)()
    os._exit(launch.main(argv))


def reserve_port() -> tuple[socket.socket, dict[str, str]]:
    """Reserve the ranks' rendezvous port. Return a socket to keep open until they end, and the environment variables.

    The kernel gives a bound port to no other process. The socket does not listen, so rank 0 may listen on the port: both set
    SO_REUSEADDR.
    """
    port = socket.socket()
    port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    port.bind(("127.0.0.1", 0))
    return port, {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port.getsockname()[1])}
