"""The child interpreter of the refactoring table: execute runs of one checkout of forge and report their results.

Started as a script, with the checkout as PYTHONPATH and working directory: `python -P server.py JOBS.json`. It imports
torch and the checkout's forge once, and then forks every rank. The server itself never computes and never joins a process
group, so a rank starts from the same state as a fresh interpreter. It depends only on forge's command line, its run
directory and the `main` imported by `train.py`.

JOBS.json: {"checkout": folder, "cores": ranks at once, "jobs": [{"name": text, "folder": working folder, "options": [...],
"phases": [{"options": [...], "world": ranks, "fault": text}], "keep": folder or null, "start": folder or null}]}.

If `start` is given, a job begins with a copy of that run directory. After its first phase it copies its run directory to
`keep`. It writes result.json and terminal.txt to its folder.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import importlib
import json
import os
import pkgutil
import re
import shutil
import signal
import socket
import sys
import time
import traceback
from pathlib import Path
from typing import Any

# Fields of metrics.jsonl that depend on the clock or on the machine's memory.
CLOCK = ("tokens_per_second", "step_time_s", "data_time_s", "gc_time_s", "memory_gib", "mfu")
# Events that a busy machine can add.
CLOCK_EVENTS = ("straggler",)
# Events whose numbers are results of the computation.
DECISIONS = ("spike", "skipped", "rolled_back", "stopped", "finished", "failed")
PHASE_TIMEOUT_S = 180.0


def main(jobs_file: str) -> int:
    """Execute all jobs of `jobs_file`, concurrently while their ranks fit the cores."""
    spec = json.loads(Path(jobs_file).read_text())
    import_checkout(Path(spec["checkout"]))
    # Forked processes share these objects. Without this call, garbage collection would copy their pages.
    gc.collect()
    gc.freeze()
    running: dict[int, int] = {}  # process id -> cores in use
    for job in spec["jobs"]:
        cores = min(spec["cores"], max(phase["world"] for phase in job["phases"]))
        while sum(running.values()) + cores > spec["cores"]:
            running.pop(os.wait()[0], None)
        pid = os.fork()
        if pid == 0:
            os._exit(execute(job))
        running[pid] = cores
    while running:
        running.pop(os.wait()[0], None)
    return 0


def import_checkout(checkout: Path) -> None:
    """Import torch and every module of forge once, for all ranks."""
    for name in ("_inductor.compile_fx", "distributed.checkpoint", "distributed.fsdp", "distributed.tensor"):
        importlib.import_module(f"torch.{name}")
    forge = importlib.import_module("forge")

    assert Path(forge.__path__[0]).parent.samefile(checkout), f"forge was imported from {forge.__path__[0]}"
    for module in pkgutil.walk_packages(forge.__path__, "forge."):
        if module.name.endswith("__main__"):  # a command: importing it would run it
            continue
        with contextlib.suppress(ImportError):  # of optional packages
            importlib.import_module(module.name)


def execute(job: dict[str, Any]) -> int:
    """Execute one job in its own process, and write its result.json."""
    folder = Path(job["folder"])
    began = time.monotonic()
    try:
        folder.mkdir(parents=True)
        write_tokens(folder / "tokens.bin")
        if job["start"]:
            shutil.copytree(job["start"], folder / "run")
        codes = []
        for number, phase in enumerate(job["phases"]):
            options = [
                option.replace("{work}", str(folder)) for option in [*job["options"], *phase["options"]]
            ]
            codes.append(execute_phase(folder, options, phase))
            if job["keep"] and number == 0:
                shutil.copytree(folder / "run", job["keep"])
        result = {"codes": codes, **read_run(folder / "run"), "seconds": time.monotonic() - began}
        (folder / "result.json").write_text(json.dumps(result))
        return 0
    except BaseException:
        with (folder / "terminal.txt").open("a") as stream:
            traceback.print_exc(file=stream)
        return 1


def write_tokens(path: Path) -> None:
    """Write 64 kB of token ids below 64 as uint16. Token 0 ends a document."""
    import numpy as np

    np.random.default_rng(0).integers(0, 64, 1 << 15).astype("<u2").tofile(path)


def execute_phase(folder: Path, options: list[str], phase: dict[str, Any]) -> list[int]:
    """Run one phase. Return the exit codes in rank order, -N after signal N.

    When one rank is killed, kill the others too, like a launcher. Otherwise the exit codes would depend on timing.
    """
    world = phase["world"]
    # The kernel gives a bound port to nobody else. The socket does not listen, so rank 0 may.
    with socket.socket() as port:
        port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        port.bind(("127.0.0.1", 0))
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port.getsockname()[1])}
        environment = meeting if world > 1 else {}
        if phase["fault"]:
            environment["FORGE_FAULT"] = phase["fault"]
        pids = [
            start_rank(rank, world, [f"--run.output_dir={folder}", *options], environment, folder)
            for rank in range(world)
        ]
        codes: dict[int, int] = {}
        deadline = time.monotonic() + PHASE_TIMEOUT_S
        while len(codes) < world:
            for pid in [pid for pid in pids if pid not in codes]:
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    codes[pid] = os.waitstatus_to_exitcode(status)
            late = time.monotonic() > deadline
            if late or -signal.SIGKILL in codes.values():
                for pid in [pid for pid in pids if pid not in codes]:
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
                return [-signal.SIGALRM if late else -signal.SIGKILL] * world
            time.sleep(0.01)
        return [codes[pid] for pid in pids]


def start_rank(rank: int, world: int, argv: list[str], environment: dict[str, str], folder: Path) -> int:
    """Fork one rank of train.py and return its process id."""
    pid = os.fork()
    if pid:
        return pid
    code = 70
    try:
        terminal = os.open(folder / "terminal.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(terminal, 1)
        os.dup2(terminal, 2)
        os.environ.update(environment)
        if world > 1:
            os.environ.update(
                RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world)
            )
        import torch

        torch.set_num_threads(1)
        # Older checkouts have the command in another module, named in their train.py.
        (module,) = re.findall(r"from (forge[.\w]+launch) import main", Path("train.py").read_text())
        code = importlib.import_module(module).main(argv)
    except BaseException:
        traceback.print_exc()
    os._exit(code)


def read_run(run: Path) -> dict[str, Any]:
    """Return a run directory's invariants: metrics, decisions, last checkpoint and names of fields."""
    metrics = [
        {key: value for key, value in line.items() if key not in CLOCK}
        for line in json_lines(run / "metrics.jsonl")
    ]
    events = json_lines(run / "events.jsonl")
    decisions = [
        {key: value for key, value in event.items() if key == "event" or not isinstance(value, str)}
        for event in events
        if event["event"] in DECISIONS
    ]
    fields = {event["event"]: sorted(event) for event in events if event["event"] not in CLOCK_EVENTS}
    if (run / "status.json").exists():
        fields["status.json"] = sorted(json.loads((run / "status.json").read_text()))
    checkpoints = sorted(
        path
        for path in (run / "checkpoints").glob("step-*")
        if re.fullmatch(r"step-\d{8}", path.name) and (path / "manifest.json").exists()
    )
    last = checkpoints[-1] if checkpoints else None
    return {
        "metrics": metrics,
        "decisions": decisions,
        "checkpoint": last.name if last else None,
        "state": json.loads((last / "trainer.json").read_text()) if last else None,
        "tensors": tensor_digests(last) if last else {},
        "fields": fields,
    }


def json_lines(path: Path) -> list[dict[str, Any]]:
    """Return the complete lines of `path`; a kill may leave an incomplete one. A missing file has none.

    The job's folder, which has another name each time, becomes `{work}`.
    """
    lines = []
    text = path.read_text() if path.exists() else ""
    for line in text.replace(str(path.parent.parent), "{work}").splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            lines.append(json.loads(line))
    return lines


def tensor_digests(checkpoint: Path) -> dict[str, str]:
    """Return name -> dtype, shape and SHA-256 of every whole tensor of a checkpoint.

    The result does not depend on the tensors' distribution over files.
    """
    import torch
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    tensors: dict[str, Any] = {}
    _load_state_dict(
        tensors,
        storage_reader=FileSystemReader(checkpoint),
        planner=_EmptyStateDictLoadPlanner(),
        no_dist=True,
    )
    digests = {}
    for name, values in sorted(flatten(tensors).items()):
        content = values.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        shape = "x".join(map(str, values.shape))
        digests[name] = f"{values.dtype} [{shape}] {hashlib.sha256(content).hexdigest()}"
    return digests


def flatten(nested: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in nested.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


if __name__ == "__main__":
    code = main(sys.argv[1])
    sys.stdout.flush()
    os._exit(code)
