"""Seconds and steps lost to a dead rank, a dead node and missing storage, with and without training states on the nodes.

    python benchmarks/recovery.py              two nodes of one rank on this machine; ten minutes on two CPU cores

Each agent stands for a node. When an agent dies, the kernel kills its ranks. In each row, a fault hits a run of two nodes
halfway between two checkpoints, and the run continues. In the storage rows, the last save before the fault also fails.
Seconds to the first new step (the `recovered` event) count from the last write of status.json. They include interpreter
start, imports and, for a dead node, the timeout until the node counts as lost. Seconds to the previous position count from
the fault until the interrupted step is complete. They grow with the number of repeated steps. Prints the table and writes
it, with date, versions and settings, to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # works from a clone, installed or not

import torch

from benchmarks.measure import environment, markdown, parser, publish
from forge.runtime.errors import FAILED, UserError
from forge.tools.elastic.meeting import Meeting
from scripts.options import exit_code_of

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "elastic.py"
INTERVAL, LOCAL_INTERVAL = 60, 3
LOST_AFTER_S, TIMEOUT_S = 8, 240
AGENT = (
    "--nodes=1:2",
    "--processes=1",
    f"--lost-after={LOST_AFTER_S}",
    "--gather=3",
    f"--patience={TIMEOUT_S}",
)
# Steps that are not negligible compared with the start of processes.
RUN = (
    *("--config=debug.toml", "--run.name=run", f"--train.steps={3 * INTERVAL}"),
    *(
        "--model.dim=128",
        "--model.ffn_dim=384",
        "--model.n_layers=4",
        "--model.n_heads=4",
        "--model.n_kv_heads=2",
    ),
    *("--model.vocab_size=64", '--data.sources=[{path="synthetic",weight=1.0}]', "--data.validation=[]"),
    *("--train.seq_len=64", "--train.global_batch_size=24", "--train.micro_batch_size=2"),
    *("--schedule.name=constant", "--schedule.warmup_steps=0", f"--checkpoint.interval={INTERVAL}"),
    *("--evaluate.interval=0", "--evaluate.sample_interval=0"),
    *("--metrics.log_interval=1", "--metrics.tensorboard=false"),
)
# The first save fails, as without shared storage.
NO_SAVE = {"FORGE_FAULT": f"save.between_shards:{INTERVAL}:*:raise"}
FAULTS = {"rank": {}, "node": {}, "storage, then a rank": NO_SAVE, "storage, then a node": NO_SAVE}
TIERS = {"shared storage alone": [], "states on the nodes": [f"--checkpoint.local_interval={LOCAL_INTERVAL}"]}


def main(arguments: list[str] | None = None) -> int:
    """Measure, write the results and return the exit code."""
    given = parser(__doc__, tiny=False).parse_args(arguments)
    return exit_code_of(lambda: measure(given))


def measure(given: argparse.Namespace) -> None:
    """Run all cases; print and write the table."""
    about = environment(torch.device("cpu"))
    about["settings"] = {
        "device": "cpu",
        "checkpoint.interval": INTERVAL,
        "checkpoint.local_interval": LOCAL_INTERVAL,
        "lost after": f"{LOST_AFTER_S} s",
        "nodes": 2,
    }
    rows = []
    for fault in FAULTS:
        for tier, options in TIERS.items():
            with tempfile.TemporaryDirectory() as folder:
                rows.append({"lost": fault, "resumes from": tier} | _case(Path(folder), fault, options))
    publish("recovery", given.output, about, {"rows": rows}, _table(rows))


def _case(folder: Path, fault: str, options: list[str]) -> dict[str, Any]:
    run = folder / "run"
    with _two_nodes(folder, options, FAULTS[fault]) as agents:
        _wait_for(lambda: _last_step(run) >= INTERVAL + INTERVAL // 2)
        if fault.endswith("rank"):
            os.kill(json.loads((run / "status.json").read_text())["pid"], signal.SIGKILL)
        else:
            agents[0].kill()
        began, lost = time.monotonic(), _lines(run / "metrics.jsonl")[-1]
        _wait_for(lambda: _events(run, "recovered"))
        _wait_for(lambda: _last_step(run) > lost["step"])
        until_there = time.monotonic() - began
        recovered = _events(run, "recovered")[0]
        # The last goodput event with steps is from the launch before the fault. It has the seconds by kind of work.
        of_launches = [event["seconds"] for event in _events(run, "goodput")]
        seconds = [one for one in of_launches if one.get("steps")][-1]
        share = seconds.get("save", 0.0) / (seconds["steps"] + seconds.get("save", 0.0))
        return {
            "seconds": recovered["seconds"],
            "seconds until there": until_there,
            "steps lost": recovered["steps_lost"],
            "step, s": lost["step_time_s"],
            "part of saves": share,
        }


@contextmanager
def _two_nodes(
    folder: Path, options: list[str], variables: dict[str, str]
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Start a meeting (rendezvous server) and two agents of one run in `folder`; end them after the body.

    variables: environment variables of the agents.
    """
    meeting, closed = Meeting(0), threading.Event()
    serving = threading.Thread(target=meeting.serve, args=(closed, 1.0), daemon=True)
    serving.start()
    settings = [
        *AGENT,
        f"--meeting=localhost:{meeting.port}",
        "--",
        *RUN,
        f"--run.output_dir={folder}",
        *options,
    ]
    agents = []
    for name in ("a", "b"):
        with open(folder / f"agent-{name}.txt", "wb") as terminal:
            command = [
                sys.executable,
                str(SCRIPT),
                "agent",
                *settings,
                f"--checkpoint.local_dir={folder / name}",
            ]
            environment = os.environ | {"OMP_NUM_THREADS": "1"} | variables
            agents.append(
                subprocess.Popen(
                    command, cwd=folder, env=environment, stdout=terminal, stderr=subprocess.STDOUT
                )
            )
    try:
        yield agents
    except UserError as error:
        texts = [(folder / f"agent-{name}.txt").read_text()[-2000:] for name in ("a", "b")]
        raise UserError("\n".join([str(error), *texts]), FAILED) from None
    finally:
        for agent in agents:
            agent.kill()
        for agent in agents:
            agent.wait()
        closed.set()
        serving.join()


def _wait_for(condition: Callable[[], object]) -> None:
    """Return once `condition` holds. Raises UserError after TIMEOUT_S seconds."""
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        if time.monotonic() > deadline:
            raise UserError(f"the run made no progress within {TIMEOUT_S} s", FAILED)
        time.sleep(0.02)


def _lines(path: Path) -> list[dict[str, Any]]:
    """Return the complete lines of a JSON-lines file; none if the file is missing."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def _events(run: Path, kind: str) -> list[dict[str, Any]]:
    return [event for event in _lines(run / "events.jsonl") if event["event"] == kind]


def _last_step(run: Path) -> int:
    return max((line["step"] for line in _lines(run / "metrics.jsonl")), default=0)


def _table(rows: list[dict[str, Any]]) -> str:
    head = [
        "lost",
        "resumes from",
        "seconds until the first new step",
        "until where it was",
        "steps made again",
        "seconds of a step",
        "part of the time that saves take",
    ]
    lines = [
        [
            row["lost"],
            row["resumes from"],
            f"{row['seconds']:.1f}",
            f"{row['seconds until there']:.1f}",
            str(row["steps lost"]),
            f"{row['step, s']:.2f}",
            f"{row['part of saves']:.3f}",
        ]
        for row in rows
    ]
    return markdown(head, lines)


if __name__ == "__main__":
    sys.exit(main())
