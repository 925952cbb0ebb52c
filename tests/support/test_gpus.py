"""GPUs are hidden from ordinary tests, and two ranks on one GPU are refused."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from tests.support.gpus import hide, needs_gpus
from tests.support.runs import BASE, Run


def test_the_environment_of_tests_hides_gpus() -> None:
    """Neither this process nor its children see a GPU."""
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "" and not torch.cuda.is_available()


@pytest.mark.parametrize(
    ("markers", "paths", "needed"),
    [
        ("not slow", ["tests"], False),
        ("gpu", ["tests"], True),
        ("not (slow or gpu)", ["tests"], False),
        ("", ["tests/gpu"], True),
        ("", ["tests/gpu/test_runs.py::test_a_plain_run_learns", "tests/simulated_gpu"], True),
        ("", ["tests/gpu", "tests/train"], False),
    ],
)
def test_only_a_pytest_process_of_gpu_tests_sees_gpus(
    monkeypatch: pytest.MonkeyPatch, markers: str, paths: list[str], needed: bool
) -> None:
    monkeypatch.chdir(Path(__file__).parents[2])
    assert needs_gpus(markers, paths) == needed


def test_hiding_overrides_the_users_own_choice() -> None:
    environment = {"CUDA_VISIBLE_DEVICES": "0,1"}
    hide(environment)
    assert environment == {"CUDA_VISIBLE_DEVICES": ""}


def show_one_gpu() -> None:
    torch.cuda.is_available = lambda: True
    torch.cuda.device_count = lambda: 1


def test_two_ranks_on_one_gpu_get_one_sentence_from_rank_0(tmp_path: Path) -> None:
    run = Run(tmp_path, base=BASE)
    assert run.start(world=2, patch="tests.support.test_gpus:show_one_gpu").join() == [2, 2]
    assert run.output() == (
        "forge: 2 processes on one node need 2 GPUs, but each sees 1: start at most 1 per node "
        "(torchrun --nproc-per-node 1), or set CUDA_VISIBLE_DEVICES= to train on the CPU\n"
    )
