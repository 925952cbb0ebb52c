"""Run one node of an elastic run: PyTorch's elastic agent, set up to survive lost nodes.

    meeting (on any permanent machine)  <-  agents, one per node  ->  ranks (train.py)

The rendezvous removes an agent whose heartbeat has stopped. The remaining agents then kill their ranks, meet again and
restart the ranks, which resume the run on the remaining nodes. When a new agent arrives, the other agents stop their ranks.
The ranks save before they exit, and all agents meet. Beyond the largest number of nodes, an agent waits as a spare.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, tzinfo
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.rendezvous import dynamic_rendezvous
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousTimeoutError,
)

from forge.config import load_command, load_config, parse_command_line
from forge.config.world import choose_layout
from forge.observe.json_lines import read_object
from forge.observe.run_directory import RunDirectory
from forge.runtime.causes import Cause
from forge.runtime.errors import BAD_CONFIG, FAILED, FINISHED, NO_CHECKPOINT, STOPPED, UserError
from forge.tools.elastic.meeting import LAUNCH, OVER, clock_offset
from forge.tools.elastic.rendezvous import Rendezvous
from forge.tools.elastic.secret import VARIABLE, SignedStore, read_secret

TRAIN = Path(__file__).resolve().parents[3] / "train.py"
# Seconds from a stop signal to SIGKILL, in which ranks finish the step and save. elastic.sbatch gets the signal 300 s early.
GRACE_S = 240
SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"


@dataclass(frozen=True)
class Node:
    """Settings of an agent.

    least, most: smallest and largest number of nodes. processes: ranks on this node. meeting: "HOST:PORT" of the rendezvous
    server. restarts: largest number of restarts after a failed rank. lost_after_s: seconds without a heartbeat after which a
    node counts as lost. gather_s: seconds to wait for more nodes after `least` nodes have arrived. patience_s: seconds to
    wait for `least` nodes.
    """

    least: int
    most: int
    processes: int
    meeting: str
    restarts: int = 100
    lost_after_s: int = 10
    gather_s: int = 5
    patience_s: int = 24 * 3600


def layouts(argv: Sequence[str], node: Node) -> dict[int, str]:
    """Return a dict from a number of nodes, `node.least` to `node.most`, to a description of the run's layout.

    argv: arguments of train.py. Raises UserError if the config is invalid or a number of nodes has no layout.
    """
    command = parse_command_line(list(argv))
    config, found = load_command(command), {}
    for nodes in range(node.least, node.most + 1):
        try:
            _, degrees, fallback = choose_layout(command, config, nodes * node.processes)
        except UserError as error:
            raise UserError(f"{nodes} nodes with {node.processes} processes each: {error}") from None
        shape = ", ".join(
            f"{axis} {getattr(degrees, axis)}" for axis in ("pp", "dp", "cp", "tp", "accumulation")
        )
        found[nodes] = f"{shape}{f' ({fallback})' if fallback else ''}"
    return found


def run_agent(node: Node, argv: Sequence[str]) -> int:
    """Run the ranks of this node with train.py's arguments `argv`. Return the exit code of the run.

    0: finished. 75: the run or this node was stopped. Otherwise the exit code of the first failed rank. Raises UserError if
    no rendezvous server answers at `node.meeting`, if the server has another secret, or if too few nodes arrive in time.
    """
    store = _meet(node.meeting)
    os.environ.pop(VARIABLE, None)  # do not hand the secret to the ranks
    nodes = node.least, node.most
    os.environ |= {
        # Without this setting, agents keep the address of the first round's store, even after the store's node is lost.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "TORCHELASTIC_SIGNALS_TO_HANDLE": SIGNALS,
        "FORGE_NODES": f"{node.least}:{node.most}",
    }
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    times_s, holder = (node.lost_after_s, node.gather_s, node.patience_s), _directory(argv).holder
    try:
        os.environ["FORGE_LAUNCH"] = store.get(LAUNCH).decode()
        _share_clock(clock_offset(store))
        rendezvous = Rendezvous.at(store, nodes, *times_s, holder)
    except (dist.DistError, RendezvousConnectionError):
        raise _lost_connection(node) from None
    spec = WorkerSpec(
        "default",
        node.processes,
        rendezvous,
        entrypoint=sys.executable,
        args=("-u", str(TRAIN), *argv),
        max_restarts=node.restarts,
    )
    if threading.current_thread() is threading.main_thread():
        # PyTorch handles the signal only while ranks run, so it would kill a waiting agent.
        signal.signal(signal.SIGTERM, _leave)
    agent = _Agent(spec, _directory(argv).status)
    try:
        result = agent.run()
    except SignalException:
        return STOPPED
    except RendezvousClosedError:
        result = None
    except RendezvousTimeoutError as error:
        rendezvous.shutdown()
        raise UserError(
            f"no rendezvous within --patience {node.patience_s} s: {error or 'too few nodes came'}", FAILED
        ) from None
    except RendezvousConnectionError:
        raise _lost_connection(node) from None
    rendezvous.shutdown()
    if result is None:  # the rendezvous was closed while this node waited, so the run has ended
        return exit_code_at_end(argv) if _is_over(store) else FAILED
    if result.is_failed():
        return min(result.failures.values(), key=lambda one: one.timestamp).exitcode or FAILED
    store.set(OVER, "1")
    return exit_code_at_end(argv)


def _lost_connection(node: Node) -> UserError:
    return UserError(
        f"--meeting {node.meeting}: lost the connection to the rendezvous server before the run finished; "
        "start `elastic.py meeting` and the agents again",
        FAILED,
    )


# Exit codes with which ranks refuse to start.
REFUSALS = (BAD_CONFIG, NO_CHECKPOINT)
# Causes of a run that ends because it cannot roll back, or because roll-backs have not helped. Without COPIES_DIFFER: after
# a bit flip, a restart may help.
DIAGNOSES = (Cause.BAD_STEPS, Cause.SPIKE)


class _Agent(LocalElasticAgent):
    """PyTorch's elastic agent, with two changes.

    After the loss of another node, it kills the ranks instead of stopping them. Stopped ranks save before they exit. After
    the loss of a node, the ranks of this node cannot save, because they wait in a collective for the lost ranks.

    It restarts no ranks that refused the first start (exit codes 2 and 77), because they would refuse again. A later refusal
    may pass, e.g. when shared storage is back. Nor does it restart a run that ended with one of DIAGNOSES, because the run
    would train into the same steps. status: path of the run's status.json.
    """

    def __init__(self, spec: WorkerSpec, status: Path):
        super().__init__(spec, DefaultLogsSpecs())
        self._shutdown_timeout = GRACE_S
        self._status, self._status_before = status, read_object(status)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result = super()._monitor_workers(worker_group)
        first = os.environ.get("FORGE_ROUND") == "0"
        refused = first and any(failure.exitcode in REFUSALS for failure in result.failures.values())
        if refused or (result.failures and self._is_diagnosed()):
            self._remaining_restarts = 0
        return result

    def _is_diagnosed(self) -> bool:
        status = read_object(self._status)
        diagnosed = status.get("state") == "failed" and status.get("cause") in DIAGNOSES
        return diagnosed and status != self._status_before

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        rendezvous: Any = self._rdzv_handler
        lost = rendezvous.num_nodes_waiting() and rendezvous.has_lost_member()
        if lost:
            self._shutdown(signal.SIGKILL)
        elif rendezvous.is_whole():
            self._shutdown(signal.SIGTERM, timeout=GRACE_S)
        else:
            self._shutdown(signal.SIGTERM)  # the ranks may wait for a dead rank of an agent that has left


def _leave(number: int, _frame: Any) -> None:
    """End the agent as PyTorch does while ranks run."""
    raise SignalException("asked to leave", signal.Signals(number))


def exit_code_at_end(argv: Sequence[str]) -> int:
    """Return the agent's exit code after all ranks exited with 0: 75 if the run was stopped before its last step, else 0.

    Stopped ranks, e.g. after `resilience.time_limit_s`, also exit with 0, because PyTorch's agent restarts ranks with any
    other exit code. The state in status.json tells the two cases apart.
    """
    state = read_object(_directory(argv).status).get("state")
    return STOPPED if state == "stopped" else FINISHED


def _directory(argv: Sequence[str]) -> RunDirectory:
    run = load_config(list(argv)).run
    return RunDirectory(Path(run.output_dir) / run.name)


def _meet(address: str, timeout: timedelta = timedelta(minutes=5)) -> SignedStore:
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise UserError(f"--meeting {address}: must be HOST:PORT, as `elastic.py meeting` prints it")
    try:
        store = dist.TCPStore(host, int(port), is_master=False, timeout=timeout)
    except dist.DistError as error:
        raise UserError(
            f"--meeting {address}: no rendezvous server answers at this address; start `elastic.py meeting` first ({error})",
            FAILED,
        ) from None
    return SignedStore(store, read_secret(host, int(port)))


def _is_over(store: dist.Store) -> bool:
    """Wait up to ten seconds for any agent to report the end of the run. Return whether an agent did."""
    try:
        store.set_timeout(timedelta(seconds=10))
        store.get(OVER)
    except dist.DistError:
        return False
    return True


def _share_clock(offset_s: float) -> None:
    """Make PyTorch's rendezvous on this node use the rendezvous server's clock: this node's clock plus `offset_s`.

    The rendezvous compares time stamps of different nodes, and their clocks may differ by hours.
    """

    def now(zone: tzinfo | None = None) -> datetime:
        return datetime.fromtimestamp(time.time() + offset_s, zone)

    if abs(offset_s) > 1:
        side = "behind" if offset_s > 0 else "ahead of"
        print(
            f"forge: the clock of this node is {abs(offset_s):.0f} s {side} the clock of the rendezvous server",
            file=sys.stderr,
        )
    vars(dynamic_rendezvous)["datetime"] = SimpleNamespace(now=now)
