"""Seconds and steps that a lost rank or node costs, with states on the nodes and without.

    python benchmarks/recovery.py              two nodes of one rank on this machine; five minutes on two CPU cores

Agents stand for nodes. In each row a run of two nodes meets a fault halfway between two checkpoints and goes on. Seconds are
those from the last sign of life before the fault to the result of the first new step (the `recovered` event), so they contain
the start of an interpreter, imports, and, for a node, the wait until it counts as lost. Prints the table and writes it, with
date, versions and settings, to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # works from a clone, installed or not

import torch

from benchmarks.measure import environment, markdown, parser, publish
from scripts.options import exit_code_of
from tests.support.elastic import LOST_AFTER_S, elastic
from tests.support.runs import wait_for

INTERVAL, LOCAL_INTERVAL = 100, 5
TIERS = {"shared storage alone": [], "states on the nodes": [f"--checkpoint.local_interval={LOCAL_INTERVAL}"]}


def main(arguments: list[str] | None = None) -> int:
    given = parser(__doc__, tiny=False).parse_args(arguments)
    return exit_code_of(lambda: measure(given))


def measure(given: argparse.Namespace) -> None:
    """Run all cases, print and write the table."""
    about = environment(torch.device("cpu"))
    about["settings"] = {
        "device": "cpu",
        "checkpoint.interval": INTERVAL,
        "checkpoint.local_interval": LOCAL_INTERVAL,
        "lost after": f"{LOST_AFTER_S} s",
        "nodes": 2,
    }
    rows = []
    for fault in ("rank", "node"):
        for tier, options in TIERS.items():
            with tempfile.TemporaryDirectory() as folder:
                rows.append({"lost": fault, "resumes from": tier} | _case(Path(folder), fault, options))
    publish("recovery", given.output, about, {"rows": rows}, _table(rows))


def _case(folder: Path, fault: str, options: list[str]) -> dict[str, Any]:
    memory = f"--checkpoint.local_dir={folder}/NODE"
    steps = [f"--checkpoint.interval={INTERVAL}", f"--train.steps={3 * INTERVAL}", memory]
    with elastic(folder, "1:2", 1, *steps, *options) as nodes:
        nodes.start("a", "b")
        nodes.wait_for_step(INTERVAL + INTERVAL // 2)
        if fault == "rank":
            os.kill(nodes.run.status()["pid"], signal.SIGKILL)
        else:
            nodes.kill("a")
        wait_for(lambda: nodes.run.events("recovered"), 240)
        [recovered] = nodes.run.events("recovered")[:1]
        # Of the start before the fault, by the run's own ledger.
        seconds = next(
            event for event in reversed(nodes.run.events("goodput")) if event["seconds"].get("steps")
        )["seconds"]
        share = seconds.get("save", 0.0) / (seconds["steps"] + seconds.get("save", 0.0))
        return {
            "seconds": recovered["seconds"],
            "steps lost": recovered["steps_lost"],
            "part of saves": share,
        }


def _table(rows: list[dict[str, Any]]) -> str:
    head = [
        "lost",
        "resumes from",
        "seconds until the first new step",
        "steps made again",
        "part of the time that saves take",
    ]
    lines = [
        [
            row["lost"],
            row["resumes from"],
            f"{row['seconds']:.1f}",
            str(row["steps lost"]),
            f"{row['part of saves']:.3f}",
        ]
        for row in rows
    ]
    return markdown(head, lines)


if __name__ == "__main__":
    sys.exit(main())
