"""Seconds and steps lost to a dead rank, a dead node and missing storage, with and without training states on the nodes.

    python benchmarks/recovery.py              two nodes of one rank on this machine; ten minutes on two CPU cores

Each agent stands for a node: when an agent dies, the kernel kills its ranks. In each row a run of two nodes meets a fault
halfway between two checkpoints, and continues; in the storage rows, the last save before the fault also fails. Seconds to
the first new step (the `recovered` event) count from the last write of status.json. They include interpreter start,
imports and, for a dead node, the timeout until the node counts as lost. Seconds to the previous position count from the
fault until the interrupted step is complete; they grow with the number of repeated steps. Prints the table and writes it,
with date, versions and settings, to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # works from a clone, installed or not

import torch

from benchmarks.measure import environment, markdown, parser, publish
from scripts.options import exit_code_of
from tests.support.elastic import LOST_AFTER_S, elastic
from tests.support.runs import wait_for

INTERVAL, LOCAL_INTERVAL = 60, 3
# Steps long enough not to vanish beside the start of processes.
MODEL = ("--model.dim=128", "--model.ffn_dim=384", "--model.n_layers=4", "--train.seq_len=64")
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
    memory = f"--checkpoint.local_dir={folder}/NODE"
    steps = [f"--checkpoint.interval={INTERVAL}", f"--train.steps={3 * INTERVAL}", memory]
    with elastic(folder, "1:2", 1, *MODEL, *steps, *options) as nodes:
        nodes.start("a", "b", **FAULTS[fault])
        nodes.wait_for_step(INTERVAL + INTERVAL // 2)
        if fault.endswith("rank"):
            os.kill(nodes.run.status()["pid"], signal.SIGKILL)
        else:
            nodes.kill("a")
        began, lost = time.monotonic(), nodes.run.metrics(times=True)[-1]
        wait_for(lambda: nodes.run.events("recovered"), 240)
        nodes.wait_for_step(lost["step"] + 1)
        until_there = time.monotonic() - began
        [recovered] = nodes.run.events("recovered")[:1]
        # Kind of work -> seconds, from the last goodput event with steps: that of the launch before the fault.
        seconds = next(
            event for event in reversed(nodes.run.events("goodput")) if event["seconds"].get("steps")
        )["seconds"]
        share = seconds.get("save", 0.0) / (seconds["steps"] + seconds.get("save", 0.0))
        return {
            "seconds": recovered["seconds"],
            "seconds until there": until_there,
            "steps lost": recovered["steps_lost"],
            "step, s": lost["step_time_s"],
            "part of saves": share,
        }


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
