"""scripts/slurm/prepare.sbatch prepares parts on all nodes and then joins them on one, unless the command is wrong."""

import os
import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPT = REPOSITORY / "scripts" / "slurm" / "prepare.sbatch"


@pytest.mark.parametrize(
    ("parts", "join", "ends"), [(0, 0, 0), (0, 3, 3), (137, 0, 0), (1, 0, 0), (137, 1, 1), (2, 0, 2)]
)
def test_the_join_prepares_a_lost_nodes_parts_and_determines_the_exit_code(
    tmp_path, parts: int, join: int, ends: int
) -> None:
    calls = tmp_path / "calls"
    srun = tmp_path / "srun"
    srun.write_text(f'#!/bin/bash\necho "$*" >> {calls}\n[[ $* == *--part* ]] && exit {parts}\nexit {join}\n')
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
        f"--no-kill --kill-on-bad-exit=0 --cpus-per-task=8 {command} --part slurm",
        f"--no-kill --nodes=1 --ntasks=1 --cpus-per-task=8 {command}",
    ]
    assert done.returncode == ends, done.stderr
    assert calls.read_text().splitlines() == expected[: 1 if parts == 2 else 2]


@pytest.mark.parametrize("name", ["train", "prepare", "elastic"])
def test_a_job_outside_forges_folder_is_refused(name: str, tmp_path) -> None:
    script = SCRIPT.with_name(f"{name}.sbatch")
    environment = {"PATH": os.environ["PATH"], "SLURM_SUBMIT_DIR": str(tmp_path)}
    done = subprocess.run(["bash", str(script)], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr.startswith(f"{name}.sbatch: {tmp_path} has no train.py; call sbatch in forge's folder")
