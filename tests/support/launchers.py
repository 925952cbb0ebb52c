"""Start train.py in fresh interpreters, like a user or a launcher."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.support.runs import BASE

ROOT = Path(__file__).parents[2]
TORCHRUN = [str(Path(sys.executable).with_name("torchrun")), "--standalone"]


def command(*options: str) -> list[str]:
    return [str(ROOT / "train.py"), *BASE, *options]


def start(arguments: list[str], folder: Path, **environment: str) -> subprocess.Popen:
    clean = {
        key: value for key, value in os.environ.items() if not key.startswith(("SLURM", "RANK", "WORLD"))
    }
    return subprocess.Popen(
        arguments,
        cwd=folder,
        env=clean | {"OMP_NUM_THREADS": "1"} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
