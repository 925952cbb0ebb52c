"""Which GPUs tests see: none, except in a pytest process for the tests that need one.

Several ranks of a test on a machine with one GPU would all choose it, and NCCL refuses two ranks on one GPU.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping, Sequence
from pathlib import Path

import torch

TESTS = Path(__file__).parents[1]
FOLDERS = (TESTS / "gpu", TESTS / "simulated_gpu")


def needs_gpus(markers: str, paths: Sequence[str]) -> bool:
    """Return whether pytest with `-m markers` and `paths` runs only tests that need a GPU."""
    given = [Path(path.partition("::")[0]).resolve() for path in paths]
    return markers == "gpu" or all(any(path.is_relative_to(each) for each in FOLDERS) for path in given)


def hide(environment: MutableMapping[str, str] = os.environ) -> None:
    """Hide the GPUs from this process and its children. Call before CUDA starts."""
    environment["CUDA_VISIBLE_DEVICES"] = ""


def is_simulated() -> bool:
    return "libsimgpu.so" in os.environ.get("LD_PRELOAD", "")


def why_no_gpu() -> str:
    """Return why tests that need a real GPU cannot run here; empty if they can."""
    if is_simulated():
        return "the GPU is simulated"
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return "GPUs are hidden: python -m pytest -m gpu"
    return "" if torch.cuda.is_available() else "there is no GPU"
