"""Options of commands on a trained model: checkpoint, device and precision."""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch

from forge.parallel.precision import DTYPES
from forge.runtime import compat
from forge.runtime.errors import UserError
from forge.tools.inference.open import TrainedModel, open_checkpoint
from scripts.options import add_trust_option, positive


def add_model_options(add: Callable[..., object]) -> None:
    """Add the options of `open_model`."""
    add(
        "--checkpoint",
        required=True,
        metavar="DIR",
        help="the folder of a run or of its checkpoints (the newest complete one is used), a checkpoint, or a folder "
        "written by convert.py from-hf",
    )
    add(
        "--device",
        default="auto",
        metavar="NAME",
        help="cpu, cuda or cuda:1 (%(default)s: a GPU if there is one)",
    )
    add("--dtype", choices=list(DTYPES), help="dtype of the computation (the run's precision.compute)")
    add(
        "--context",
        type=positive,
        metavar="N",
        help="maximum context in tokens (the sequence length of the last step)",
    )
    add("--float8", action="store_true", help="compute in the run's precision.float8")
    add_trust_option(add)
    add("--no-verify", action="store_true", help="compare only the sizes of files, not their checksums")


def open_model(given: argparse.Namespace) -> TrainedModel:
    """Open the model named by the options. Raises UserError if an option or the checkpoint is invalid."""
    return open_checkpoint(
        given.checkpoint,
        _device(given.device),
        compute=given.dtype,
        context=given.context,
        verify=not given.no_verify,
        trust=given.trust,
        float8=given.float8,
    )


def _device(name: str) -> torch.device:
    if name == "auto":
        return compat.training_device(0)
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(
            f"--device {name}: cannot be used: {reason}; use cpu, or leave out --device"
        ) from None
    return device
