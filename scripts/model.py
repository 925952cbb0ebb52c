"""What scripts on a trained model have in common: which one, and on what it computes."""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch

from forge import compat
from forge.errors import UserError
from forge.inference.open import TrainedModel, open_checkpoint
from forge.parallel.precision import DTYPES
from scripts.options import positive


def add_model_options(add: Callable[..., object]) -> None:
    """The options that `open_model` reads."""
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


def open_model(given: argparse.Namespace) -> TrainedModel:
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
