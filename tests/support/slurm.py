"""Run a real Slurm in one folder as the current user: munged, slurmctld, and two nodes on this machine.

Requires Debian's packages `munge slurmctld slurmd slurm-client`. Other versions of Slurm are untested.
"""

from __future__ import annotations

import contextlib
import ctypes
import getpass
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

from tests.support.runs import BASE, Run, wait_for

REPOSITORY = Path(__file__).parents[2]
SCRIPT = REPOSITORY / "scripts" / "slurm" / "train.sbatch"
DAEMONS = ("munged", "slurmctld", "slurmd")
NODES = ("127.0.0.1", "127.0.0.2")
# Debian's daemons are outside an ordinary user's PATH.
PATH = os.pathsep.join([os.environ["PATH"], "/usr/sbin", "/usr/local/sbin"])
MISSING = [name for name in (*DAEMONS, "sbatch") if shutil.which(name, path=PATH) is None]

# cred_expire: seconds before a requeued job starts; 120 by default and for values below 5. SlurmdTimeout: seconds
# without an answer before a node is down.
CONFIG = """
ClusterName=test
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
ReturnToService=2
KillWait=60
SlurmdTimeout=9
SchedulerParameters=sched_interval=1,sched_min_interval=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmdParameters=config_overrides
GresTypes=gpu
NodeName={nodes[0]} NodeAddr={nodes[0]} CPUs=4 Gres=gpu:2 Port={ports[1]}
NodeName={nodes[1]} NodeAddr={nodes[1]} CPUs=4 Gres=gpu:2 Port={ports[2]}
PartitionName=usual Nodes=ALL Default=YES PriorityTier=1 MaxTime=INFINITE State=UP
PartitionName=urgent Nodes=ALL PriorityTier=10 MaxTime=INFINITE State=UP
"""
# Any two devices, because Slurm only counts them and sets CUDA_VISIBLE_DEVICES.
GPUS = "\n".join(f"NodeName=127.0.0.[1-2] Name=gpu File=/dev/{name}" for name in ("null", "zero"))


class Slurm:
    """The daemons, as children of this process."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.configuration = folder / "slurm.conf"
        self._daemons: dict[str, subprocess.Popen] = {}
        self.environment = os.environ | {
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), PATH]),
            "SLURM_CONF": str(self.configuration),
            "FORGE_HOME": str(REPOSITORY),
            "PYTHONPATH": os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")]),
            "OMP_NUM_THREADS": "1",
        }
        for node in NODES:
            (folder / node).mkdir()
        key = folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        (folder / "gres.conf").write_text(f"{GPUS}\n")
        self.configuration.write_text(
            CONFIG.format(folder=folder, user=getpass.getuser(), nodes=NODES, ports=_free_ports(3))
        )

    def start(self) -> None:
        """Start all daemons; AssertionError if the nodes are not ready in time."""
        files = {"key-file": "munge.key", "socket": "munge.socket", "pid-file": "munged.pid"}
        files |= {"log-file": "munged.log", "seed-file": "munge.seed"}
        options = [f"--{option}={self.folder / name}" for option, name in files.items()]
        self._daemon("munged", "munged", "--foreground", "--force", *options)
        wait_for((self.folder / "munge.socket").exists, 30)
        self._daemon("slurmctld", "slurmctld", "-D", "-c")
        for node in NODES:
            self.start_node(node)
        wait_for(lambda: self("sinfo", "-h", "-t", "idle", "-o", "%D") == "2", 30)

    def start_node(self, node: str) -> None:
        self._daemon(node, "slurmd", "-D", "-N", node)

    def kill_node(self, node: str) -> None:
        """Kill all processes of a node at once, as in a power failure."""
        self._daemons[node].kill()
        self._daemons[node].wait()
        for pid in self.processes(f"SLURMD_NODENAME={node}"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(_parent(pid), signal.SIGKILL)  # slurmstepd would report the task's end
                os.kill(pid, signal.SIGKILL)

    def __call__(self, *command: str, **environment: str) -> str:
        """Run a Slurm command and return its output."""
        done = subprocess.run(
            command, env=self.environment | environment, capture_output=True, text=True, timeout=240
        )
        return done.stdout.strip()

    def node_state(self, node: str) -> str:
        return self("sinfo", "-h", "-n", node, "-o", "%t", "-p", "usual")

    def processes(self, *variables: str) -> list[int]:
        """Return this cluster's processes with all of `variables` ("NAME=value") in their environment."""
        wanted, found = {f"SLURM_CONF={self.configuration}", *variables}, []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if wanted <= set((folder / "environ").read_bytes().decode(errors="replace").split("\0")):
                    found.append(int(folder.name))
        return found

    def errors(self) -> str:
        """Return the daemons' fatal errors."""
        logs = [path.read_text() for path in self.folder.glob("*.log")]
        return "; ".join(line for log in logs for line in log.splitlines() if "fatal" in line)

    def stop(self) -> None:
        for daemon in reversed(self._daemons.values()):
            daemon.kill()
            daemon.wait()
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _daemon(self, name: str, *command: str) -> None:
        with open(self.folder / f"{name}.log", "ab") as log:
            self._daemons[name] = subprocess.Popen(
                command,
                env=self.environment,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                preexec_fn=_die_with_parent,
            )


class Job:
    """A train.sbatch job on both nodes, training until `finish_soon`."""

    def __init__(self, slurm: Slurm, folder: Path, *options: str, **environment: str):
        self._slurm, self._config, self.log_file = slurm, folder / "run.toml", folder / "job.log"
        self.run = Run(folder)
        self._set_steps(1_000_000)
        name = f"--config={self._config}"
        arguments = [name, *(argument for argument in BASE if not argument.startswith("--config"))]
        arguments = [argument for argument in arguments if not argument.startswith("--train.steps")]
        # A short time limit, below Slurm's usual notice, so a killed test's leftovers end soon.
        times = ["--time=5", "--signal=SIGTERM@30"]
        command = ["sbatch", "--parsable", "--nodes=2", "--exclusive", *times, f"--output={self.log_file}"]
        train = [*arguments, f"--run.output_dir={folder}", "--checkpoint.interval=0", *options]
        submitted = subprocess.run(
            [*command, str(SCRIPT), *train],
            env=slurm.environment | {"PROCESSES_PER_NODE": "1"} | environment,
            cwd=folder,
            capture_output=True,
            text=True,
        )
        assert submitted.returncode == 0, submitted.stderr
        self.number = submitted.stdout.strip()

    def signal(self) -> None:
        """Send SIGTERM to the processes of the step, like sbatch `--signal`."""
        self._slurm("scancel", "--signal=TERM", self.number)

    def tasks(self) -> list[int]:
        """Return the processes of the step."""
        return self._slurm.processes(f"SLURM_JOB_ID={self.number}", "SLURM_STEP_ID=0")

    def handles_signals(self) -> bool:
        """Return whether both tasks have a handler for SIGTERM."""
        masks = []
        for pid in self.tasks():
            with contextlib.suppress(OSError):
                masks += re.findall(r"SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())
        return sum(int(mask, 16) >> (signal.SIGTERM - 1) & 1 for mask in masks) == 2

    def finish_soon(self) -> None:
        """Let the next job run finish a few steps after the last checkpoint."""
        self._set_steps(self.step + 3)

    @property
    def step(self) -> int:
        return json.loads((self.run.path / "status.json").read_text())["step"] if self.state() else 0

    def state(self) -> str:
        """Return `state` of status.json."""
        path = self.run.path / "status.json"
        return json.loads(path.read_text())["state"] if path.exists() else ""

    def ended(self) -> bool:
        return self._slurm("squeue", "-h", "-j", self.number) == ""

    def log(self) -> str:
        return self.log_file.read_text() if self.log_file.exists() else ""

    def cancel(self) -> None:
        self._slurm("scancel", self.number)

    def _set_steps(self, steps: int) -> None:
        whole = (REPOSITORY / "configs" / "debug.toml").read_text()
        lines = [
            line if not line.startswith("steps =") else f"steps = {steps}" for line in whole.splitlines()
        ]
        assert f"steps = {steps}" in lines
        self._config.write_text("\n".join(lines) + "\n")


def _die_with_parent() -> None:
    """In a child: die when pytest is killed. Running jobs end at their time limit."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
