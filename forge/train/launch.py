"""From the command line to an exit code: the one place where errors become messages."""

from __future__ import annotations

import logging
import os
import sys
import time

import torch.distributed as dist

from forge.config import check_world, help_text, load_config, parse_command_line, to_toml
from forge.distributed import join, read_world
from forge.errors import FAILED, FINISHED, UserError
from forge.train.run import run

log = logging.getLogger(__name__)


def main(argv: list[str]) -> int:
    """Run train.py's command line `argv` (without the program's name) and return the process's exit code."""
    try:
        world = read_world()
    except UserError as error:
        print(f"forge: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    try:
        command = parse_command_line(argv)
        if command.action == "help":
            _say(world.rank, help_text())
            return FINISHED
        config = load_config(argv)
        if command.action == "print_config":
            _say(world.rank, to_toml(config))
            return FINISHED
        degrees = check_world(config, world.size)
        join(world)
        code = run(config, degrees, world)
        dist.destroy_process_group()
        return code
    except UserError as error:
        if world.rank == 0:
            print(f"forge: {error}", file=sys.stderr, flush=True)
        else:
            # torchrun kills the other workers when the first one ends; rank 0 must have spoken by then. On a busy machine
            # ranks that have not met yet are seconds apart.
            time.sleep(2 if dist.is_initialized() else 5)
        return error.exit_code
    except Exception:
        log.exception("rank %d failed", world.rank)
        return FAILED


def _say(rank: int, text: str) -> None:
    if rank == 0:
        try:
            print(text, flush=True)
        except BrokenPipeError:  # `| head` has seen enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
