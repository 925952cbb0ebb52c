"""Hide GPUs from tests, except in a pytest process for tests that need one.

On a machine with one GPU, all ranks of a test would choose this GPU, and NCCL refuses two ranks on one GPU.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping, Sequence
from pathlib import Path

import torch

ON_THE_CPU = "tests.support.gpus:hide"
ON_ONE_GPU = "tests.support.gpus:share_the_first"
"""Patches for `Run.start`."""
TESTS = Path(__file__).parents[1]
FOLDERS = (TESTS / "gpu", TESTS / "simulated_gpu")


def needs_gpus(markers: str, paths: Sequence[str]) -> bool:
    """Return whether `pytest -m MARKERS PATHS` selects only tests that need a GPU."""
    given = [Path(path.partition("::")[0]).resolve() for path in paths]
    return markers == "gpu" or all(any(path.is_relative_to(each) for each in FOLDERS) for path in given)


def hide(environment: MutableMapping[str, str] = os.environ) -> None:
    """Hide the GPUs from this process and its children. Call before CUDA starts."""
    environment["CUDA_VISIBLE_DEVICES"] = ""


def share_the_first() -> None:
    """Let this rank of several use GPU 0, as if each rank were alone on its node.

    NCCL refuses two ranks of one host on one GPU. With a host name of its own, each rank sends over sockets.
    """
    os.environ |= {
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "NCCL_HOSTID": f"rank-{os.environ['RANK']}",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_IB_DISABLE": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }


def is_simulated() -> bool:
    return "libsimgpu.so" in os.environ.get("LD_PRELOAD", "")


def why_no_gpu() -> str:
    """Return the reason to skip tests of a real GPU. Empty: a GPU is usable."""
    if is_simulated():
        return "the GPU is simulated"
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return "GPUs are hidden: python -m pytest -m gpu"
    return "" if torch.cuda.is_available() else "there is no GPU"
