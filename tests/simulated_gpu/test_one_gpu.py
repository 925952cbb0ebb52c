"""Documented commands on a node with one simulated GPU: the tests, a run, and two ranks on the same GPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import gpu_variants as variants
from tests.support import gpus
from tests.support.no_waits import NO_WAITS
from tests.support.runs import BASE, Run

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(not gpus.is_simulated(), reason="there is no simulated GPU: make simgpu")


# With the second variable PyTorch itself reads CUDA_VISIBLE_DEVICES. The simulated driver does not.
ONE_GPU = {"SIMGPU_DEVICES": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}


def command(*words: str) -> subprocess.CompletedProcess[str]:
    """Run `python WORDS` in a process that sees one GPU, without changing this process's environment for later tests."""
    return subprocess.run(
        [sys.executable, *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | ONE_GPU,
    )


def test_tests_of_several_ranks_run_on_the_cpu() -> None:
    done = command(
        "-m", "pytest", "-p", "no:cacheprovider", "--reruns=0", "tests/train/test_source_losses.py"
    )
    assert done.returncode == 0, done.stdout


def test_tests_of_a_real_gpu_are_skipped() -> None:
    done = command("-m", "pytest", "-p", "no:cacheprovider", "-m", "gpu", "tests/train/test_results.py")
    assert done.returncode == 0 and "2 skipped" in done.stdout, done.stdout


def test_two_ranks_under_torchrun_get_one_sentence_and_exit_code_2(tmp_path: Path) -> None:
    ranks = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0")
    done = command(*ranks, "train.py", *BASE, f"--run.output_dir={tmp_path}")
    assert re.findall("^forge: .*", done.stderr, re.MULTILINE) == [
        "forge: 2 processes on one node need 2 GPUs, but each sees 1: start at most 1 per node "
        "(torchrun --nproc-per-node 1), or set CUDA_VISIBLE_DEVICES= to train on the CPU"
    ]
    assert re.search(r"exitcode *: 2 ", done.stderr) and not (tmp_path / "run").exists()


def test_a_run_of_one_process_trains_on_the_gpu(tmp_path: Path) -> None:
    done = command("train.py", *BASE, "--train.steps=2", f"--run.output_dir={tmp_path}")
    assert done.returncode == 0, done.stderr
    assert "NVIDIA H200" in (tmp_path / "run" / "events.jsonl").read_text()


@pytest.mark.parametrize("name", ["dense", "documents", "narrow heads", "experts", "muon", "int8 moments"])
def test_a_variant_runs_as_on_a_real_gpu(name: str, tmp_path: Path) -> None:
    """tests/gpu/test_golden_variants.py runs all variants on a real GPU."""
    run = Run(tmp_path, *variants.ONE[name], NO_WAITS, base=variants.BASE)
    assert run() == 0, run.output()[-4000:]


def test_a_synchronising_step_fails_as_on_a_real_gpu(tmp_path: Path) -> None:
    run = Run(tmp_path, NO_WAITS, base=variants.BASE)
    codes = run.start(patch="tests.simulated_gpu.test_one_gpu:wait_in_the_clipping").join()
    assert codes == [1] and "called a synchronizing CUDA operation" in run.output()
    assert [line["step"] for line in run.metrics()] == [1, 2], "step 3 waits"


def wait_in_the_clipping() -> None:
    from forge.train import step

    inner = step.clip_gradients
    step.clip_gradients = lambda shards, norm, *rest: (norm.item(), inner(shards, norm, *rest))[1]
