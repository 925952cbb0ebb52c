"""What scripts on a trained model have in common: which one, on what it computes, and exit codes."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Callable

import torch

from forge import compat
from forge.errors import FAILED, FINISHED, STOPPED, UserError
from forge.parallel.precision import DTYPES
from forge.train.open import Opened, open_checkpoint


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """The options that `open_model` reads."""
    add = parser.add_argument
    add(
        "--checkpoint",
        required=True,
        metavar="DIR",
        help="a run's folder or its checkpoints folder (the newest whole one counts), one checkpoint, or what "
        "convert.py from-hf made",
    )
    add(
        "--device",
        default="auto",
        metavar="NAME",
        help="cpu, cuda, cuda:1 (%(default)s: a CUDA card if there is one)",
    )
    add("--dtype", choices=list(DTYPES), help="compute in this (the run's precision.compute)")
    add(
        "--context",
        type=positive,
        metavar="N",
        help="tokens that the model sees at once (the run's train.seq_len)",
    )
    add("--no-verify", action="store_true", help="trust the files: compare sizes, not checksums")


def open_model(given: argparse.Namespace) -> Opened:
    """The model that the options name; UserError where they, or the checkpoint, are wrong."""
    return open_checkpoint(
        given.checkpoint,
        _device(given.device),
        compute=given.dtype,
        context=given.context,
        verify=not given.no_verify,
    )


def _device(name: str) -> torch.device:
    if name == "auto":
        return compat.training_device(0)
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"--device {name}: cannot be used: {reason}; use cpu, or leave it out") from None
    return device


def exit_code_of(work: Callable[[], None]) -> int:
    """Do `work`; what goes wrong becomes one sentence on stderr and the exit code, which is returned."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s", stream=sys.stderr)
    try:
        work()
        sys.stdout.flush()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:  # `| head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return FAILED
    except torch.OutOfMemoryError as error:
        print(f"error: out of memory: {str(error).splitlines()[0]}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        return STOPPED
    return FINISHED


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value
