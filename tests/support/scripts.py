"""Run `python SCRIPT ARGUMENTS` in forked processes, without the cost of an interpreter start."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

from tests.support.harness import may_start_processes


def prepare_rank(
    rank: int, world: int, environment: dict[str, str], out: Path, err: Path | None = None
) -> None:
    """Set this forked process's rank and world size, and redirect its output to files. err None: stderr to `out`, too."""
    import torch

    for number, path in ((1, out), (2, err or out)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    torch.set_num_threads(1)
    os.environ.update(environment)
    if world > 1:
        os.environ.update(
            RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world)
        )


def run_script(
    rank: int,
    world: int,
    words: list[str],
    folder: Path,
    environment: dict[str, str],
    out: Path,
    err: Path | None = None,
) -> None:
    """Run `python WORDS` in this process, in `folder`."""
    prepare_rank(rank, world, environment, out, err)
    may_start_processes()
    os.chdir(folder)
    sys.argv = words
    try:
        runpy.run_path(words[0], run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
