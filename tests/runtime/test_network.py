"""The rendezvous address of a Slurm step, and Gloo's network interface."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from forge.runtime import network
from forge.runtime.errors import UserError
from forge.runtime.network import choose_gloo_interface, name_start, slurm_meeting_point


@pytest.mark.parametrize(
    "nodes, first",
    [
        ("localhost", "localhost"),
        ("gpu[003-006,9],login1", "gpu003"),
        ("gpu-a[7]", "gpu-a7"),
        ("node12,node13", "node12"),
        ("rack[1-2]node[01-16]", "rack1node01"),
        ("10.0.0.[4-5]", "10.0.0.4"),
    ],
)
def test_the_first_host_of_a_node_list(nodes: str, first: str) -> None:
    assert slurm_meeting_point({"SLURM_STEP_NODELIST": nodes})[0] == first


def test_a_step_without_nodes_is_refused() -> None:
    with pytest.raises(UserError, match="SLURM_STEP_NODELIST"):
        slurm_meeting_point({})


def test_neighbouring_steps_and_jobs_have_distinct_ports_below_the_ephemeral_range() -> None:
    def port(job: int, step: int) -> int:
        environment = {"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step), "SLURM_STEP_NODELIST": "n1"}
        return slurm_meeting_point(environment)[1]

    ports = [port(job, step) for job in range(987_654, 987_654 + 700) for step in range(17)]
    assert len(set(ports)) == len(ports)
    assert min(ports) >= 20000 and max(ports) < 32768
    # The port of a job's only step repeats after as many jobs as there are ports.
    assert len({port(job, 0) for job in range(12768)}) == 12768


def test_user_settings_win() -> None:
    environment = {"MASTER_ADDR": "head-ib", "MASTER_PORT": "29500", "SLURM_STEP_NODELIST": "n[1-2]"}
    assert slurm_meeting_point(environment) == ("head-ib", 29500)


class Machines:
    """Patch one node's view of the network: addresses of names, its own address per route, and its interfaces."""

    def __init__(self, monkeypatch, own_name: str, routes: dict[str, str]):
        interfaces = {"127.0.0.1": "lo", "10.0.0.1": "eth0", "10.0.0.2": "eth0", "10.1.0.1": "ib0"}
        monkeypatch.setattr(network, "_address", lambda host: own_name)
        monkeypatch.setattr(network, "_own_address", lambda peer: routes[peer])
        monkeypatch.setattr(network, "_interface", interfaces.get)


def test_a_node_whose_name_is_its_own_address_takes_the_route_to_the_first_host(monkeypatch) -> None:
    Machines(monkeypatch, "127.0.1.1", {"n1": "10.0.0.2"})
    store, environment = dist.HashStore(), {}
    choose_gloo_interface(store, 1, 2, "n1", environment)
    assert environment == {"GLOO_SOCKET_IFNAME": "eth0"}
    assert store.get("address-of-the-last-rank") == b"10.0.0.2"


def test_the_first_host_itself_takes_the_route_to_the_last_rank(monkeypatch) -> None:
    """Its own name, the rendezvous address, resolves to a loopback address on this node."""
    Machines(monkeypatch, "127.0.1.1", {"n1": "127.0.0.1", "10.1.0.9": "10.1.0.1"})
    store, environment = dist.HashStore(), {}
    store.set("address-of-the-last-rank", "10.1.0.9")
    choose_gloo_interface(store, 0, 2, "n1", environment)
    assert environment == {"GLOO_SOCKET_IFNAME": "ib0"}


@pytest.mark.parametrize(
    ("own_name", "environment"), [("10.0.0.1", {}), ("127.0.1.1", {"GLOO_SOCKET_IFNAME": "ib7"})]
)
def test_a_reachable_name_or_a_set_interface_is_kept(
    monkeypatch, own_name: str, environment: dict[str, str]
) -> None:
    Machines(monkeypatch, own_name, {"n1": "10.0.0.1"})
    before = dict(environment)
    choose_gloo_interface(dist.HashStore(), 0, 2, "n1", environment)
    assert environment == before


def test_the_interface_of_this_nodes_own_address() -> None:
    assert network._own_address("127.0.0.2") == "127.0.0.1"
    assert network._interface("127.0.0.1") == "lo"
    assert network._interface("192.0.2.1") is None
    assert network._address("no-such-host.invalid") == "127.0.0.1"


# Two nodes, each with its own network, name and /etc/hosts. Each resolves its own name to 127.0.1.1.
MACHINES = """
set -e
ip link set lo up
unshare --net --uts --mount sleep 600 &
other="nsenter --target $! --net --uts --mount"
until [ "$(readlink /proc/$!/ns/mnt)" != "$(readlink /proc/$$/ns/mnt)" ]; do :; done
ip link add va type veth peer name vb netns $!
ip addr add 10.77.0.1/24 dev va; ip link set va up
$other ip link set lo up; $other ip addr add 10.77.0.2/24 dev vb; $other ip link set vb up
printf '127.0.0.1 localhost\\n127.0.1.1 n1\\n10.77.0.2 n2\\n' > hosts1
printf '127.0.0.1 localhost\\n127.0.1.1 n2\\n10.77.0.1 n1\\n' > hosts2
mount --bind hosts1 /etc/hosts; $other mount --bind "$PWD/hosts2" /etc/hosts
hostname n1; $other hostname n2
export SLURM_STEP_NUM_TASKS=2 SLURM_LOCALID=0 SLURM_STEP_TASKS_PER_NODE='1(x2)' SLURM_STEP_NODELIST='n[1-2]'
SLURM_PROCID=1 $other "$@" & SLURM_PROCID=0 "$@"; wait $!
"""
CONNECT = """
import os
from forge.runtime.distributed import gather_from_ranks
from forge.runtime.world import join, read_world
join(read_world())
found = gather_from_ranks("naming", lambda: os.environ["GLOO_SOCKET_IFNAME"])
os.write(1, (" ".join(found) + "\\n").encode())  # in one piece: both ranks write to one pipe
os._exit(0)
"""
NAMESPACES = [
    "unshare",
    "--user",
    "--map-root-user",
    "--net",
    "--uts",
    "--mount",
    "--pid",
    "--fork",
    "--kill-child",
]


def test_machines_with_loopback_names_connect(tmp_path) -> None:
    if (
        not shutil.which("unshare")
        or subprocess.run([*NAMESPACES, "ip", "link"], capture_output=True).returncode
    ):
        pytest.skip("needs user and network namespaces")
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [*NAMESPACES, "--mount-proc", "bash", "-c", MACHINES, "bash", sys.executable, "-c", CONNECT],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.stdout == "va vb\nva vb\n", done.stderr


def test_ranks_of_a_start_share_a_name_despite_leftovers_in_the_store() -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def start(rank: int, size: int) -> str:
        # Like a torchrun worker: an own connection to a store that outlives the worker.
        store = dist.TCPStore("127.0.0.1", server.port, is_master=False)
        return name_start(store, rank, size, timedelta(seconds=60))

    names = []
    for size in (4, 3, 3, 4):
        with ThreadPoolExecutor(size) as threads:
            # The last ranks come first, and find only leftovers of the previous start.
            found = [threads.submit(start, rank, size) for rank in reversed(range(size))]
        (name,) = {one.result() for one in found}
        names.append(name)
    assert len(set(names)) == 4


def test_a_start_with_a_missing_rank_ends_with_one_sentence() -> None:
    store = dist.HashStore()
    store.set("nonce-of-rank-1", "of an earlier start")
    with pytest.raises(UserError, match="not all of 2 ranks started"):
        name_start(store, 0, 2, timedelta(seconds=0.2))
