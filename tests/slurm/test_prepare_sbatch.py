"""scripts/slurm/prepare.sbatch: parts on all nodes, and then, only if they have succeeded, the join on one."""

import os
import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPT = REPOSITORY / "scripts" / "slurm" / "prepare.sbatch"


@pytest.mark.parametrize("code", [0, 3])
def test_parts_come_before_the_join_and_a_failure_ends_the_job(tmp_path, code) -> None:
    calls = tmp_path / "calls"
    srun = tmp_path / "srun"
    srun.write_text(f'#!/bin/bash\necho "$*" >> {calls}\nexit {code}\n')
    srun.chmod(0o755)
    environment = os.environ | {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "FORGE_HOME": str(REPOSITORY),
        "PYTHON": "python",
        "SLURM_CPUS_PER_TASK": "8",
    }
    words = ["--input", "a folder", "--output", "out"]
    done = subprocess.run(
        ["bash", str(SCRIPT), *words], env=environment, capture_output=True, text=True, timeout=60
    )
    command = f"python {REPOSITORY}/scripts/prepare_data.py --input a folder --output out"
    expected = [
        f"--cpus-per-task=8 {command} --part slurm",
        f"--nodes=1 --ntasks=1 --cpus-per-task=8 {command}",
    ]
    assert done.returncode == code, done.stderr
    assert calls.read_text().splitlines() == expected[: 2 if code == 0 else 1]
