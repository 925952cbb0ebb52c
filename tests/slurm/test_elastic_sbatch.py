"""elastic.sbatch with stubs for srun, scontrol and the interpreter: its processes, and the job's end."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "slurm" / "elastic.sbatch"
# The stub interpreter logs its arguments. The rendezvous then runs until it is killed. After the rendezvous has logged,
# the agent exits with CODE.
PYTHON = """#!/bin/bash
echo "$@" >> "$LOG"
echo "secret $FORGE_RENDEZVOUS_SECRET" >> "$LOG"
if [[ $2 == meeting ]]; then
    [[ -n $FINISHED ]] && exit 0
    exec sleep 600
fi
[[ $1 == */job.py ]] && exit "${PROGRESS:-75}"
until grep -q "elastic.py meeting" "$LOG"; do sleep 0.02; done
exit "$CODE"
"""
# Removes srun's own options and runs the rest once, as a step on one node.
SRUN = """#!/bin/bash
echo "srun $*" >> "$LOG"
while [[ $1 == --* ]]; do shift; done
exec "$@"
"""


def job(folder: Path, code: int, **environment: str) -> tuple[int, str]:
    for name, text in {
        "python": PYTHON,
        "torchrun": "#!/bin/bash\n",
        "srun": SRUN,
        "scontrol": '#!/bin/bash\necho "scontrol $*" >> "$LOG"\n',
        "nvidia-smi": '#!/bin/bash\nfor gpu in ${GPUS:-}; do echo "GPU $gpu: NVIDIA H100"; done\n',
    }.items():
        path = folder / name
        path.write_text(text)
        path.chmod(0o755)
    slurm = {"SLURM_JOB_ID": "12345", "SLURM_JOB_NUM_NODES": "4", "SLURM_SUBMIT_DIR": str(SCRIPT.parents[2])}
    own = {"MEETING_ENDS_S": "0.1", "LOG": str(folder / "log"), "CODE": str(code)}
    path = f"{folder}:{os.environ['PATH']}"
    ended = subprocess.run(
        ["bash", str(SCRIPT), "--config", "debug.toml"],
        env={"PATH": path} | slurm | own | environment,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
    )
    return ended.returncode, (folder / "log").read_text()


def test_an_agent_starts_on_each_node_and_spares_do_not_count_in_the_maximum(tmp_path) -> None:
    code, log = job(tmp_path, 0, SPARES="1", MIN_NODES="2", PROCESSES_PER_NODE="8")
    assert code == 0 and "scontrol" not in log
    step = next(line for line in log.splitlines() if line.startswith("srun"))
    assert "--no-kill --kill-on-bad-exit=0 --wait=0 --nodes=4 --ntasks=4" in step
    agent = next(
        line for line in log.splitlines() if "elastic.py agent" in line and not line.startswith("srun")
    )
    assert "agent --nodes 2:3 --processes 8 --meeting" in agent and agent.endswith("-- --config debug.toml")
    meeting = next(line for line in log.splitlines() if "elastic.py meeting" in line)
    port = meeting.split()[-1]
    assert f":{port} " in agent and 20000 <= int(port) < 32768


@pytest.mark.parametrize(
    ("environment", "processes"),
    [({}, 1), ({"GPUS": "0 1"}, 2), ({"GPUS": "0 1", "SLURM_GPUS_ON_NODE": "4"}, 4)],
)
def test_a_node_gets_one_worker_per_gpu(tmp_path, environment: dict[str, str], processes: int) -> None:
    _, log = job(tmp_path, 0, **environment)
    assert f"agent --nodes 1:4 --processes {processes} --meeting" in log


def test_each_job_has_its_own_secret_and_agents_use_the_address_of_the_rendezvous(tmp_path) -> None:
    secrets = []
    for _ in range(2):
        _, log = job(tmp_path, 0)
        lines = [line.split() for line in log.splitlines() if not line.startswith("srun")]
        [meeting] = (line for line in lines if "meeting" in line)
        [agent] = (line for line in lines if "agent" in line)
        host, port = (meeting[meeting.index(option) + 1] for option in ("--host", "--port"))
        assert agent[agent.index("--meeting") + 1] == f"{host}:{port}"
        secrets += [line[1] for line in lines if line[0] == "secret"]
        (tmp_path / "log").unlink()
    assert secrets[0] == secrets[1] != secrets[2] == secrets[3]
    assert all(re.fullmatch("[0-9a-f]{64}", secret) for secret in secrets)


@pytest.mark.parametrize("code", [1, 2, 77])
def test_a_failure_ends_the_job_with_its_code(tmp_path, code: int) -> None:
    ended, log = job(tmp_path, code)
    assert ended == code and "scontrol" not in log


def test_a_lost_node_does_not_fail_a_finished_run(tmp_path) -> None:
    code, log = job(tmp_path, 137, FINISHED="1", MEETING_ENDS_S="20", PROGRESS="0")
    assert code == 0 and "scontrol" not in log


def test_a_stop_after_a_save_requeues_the_job_and_ends_the_rendezvous(tmp_path) -> None:
    code, log = job(tmp_path, 75)
    assert code == 0 and "scontrol requeue 12345" in log
    assert re.search(r"job.py stopped 75 \d+ --config debug.toml", log)


def test_a_stop_without_progress_ends_the_job(tmp_path) -> None:
    code, log = job(tmp_path, 75, PROGRESS="1")
    assert code == 1 and "scontrol" not in log
