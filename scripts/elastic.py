#!/usr/bin/env python
"""Train on a changing set of nodes.

First start one meeting (the rendezvous server). Then start one agent per node. All need the same secret:

    export FORGE_RENDEZVOUS_SECRET=$(openssl rand -hex 32)
    python scripts/elastic.py meeting --port 29400
    python scripts/elastic.py agent --nodes 2:3 --processes 8 --meeting HOST:29400 -- --config 7b.toml [...]

The meeting runs on any permanent machine with ports reachable only by the nodes. It needs no GPU. See
docs/guides/elastic.md.
"""

from __future__ import annotations

import argparse
import re
import signal
import socket
import sys
import threading
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # works from a clone, installed or not

from forge.runtime.errors import FAILED, FINISHED, UserError
from scripts.options import Options, exit_code_of, number, port, positive


def main(arguments: list[str] | None = None) -> int:
    """Run one of the subcommands and return the exit code."""
    parser = Options(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="meeting|agent|layouts")
    meeting = commands.add_parser(
        "meeting", help="host the rendezvous of one run's agents until the run is over"
    )
    meeting.add_argument(
        "--host",
        default=socket.gethostname(),
        help="name or address of this machine, where the rendezvous server listens and agents connect (%(default)s)",
    )
    meeting.add_argument(
        "--port",
        type=port,
        default=29400,
        help="port of the rendezvous server (%(default)s); 0: a free port, which is printed",
    )
    agent = commands.add_parser("agent", help="run the ranks of this node")
    agent.add_argument(
        "--meeting", required=True, metavar="HOST:PORT", help="address printed by `elastic.py meeting`"
    )
    agent.add_argument(
        "--restarts", type=int, default=100, help="maximum number of restarts after failures (%(default)s)"
    )
    agent.add_argument(
        "--lost-after",
        type=number(int, lambda value: value >= 3, "at least 3"),  # a node sends one heartbeat per second
        default=10,
        metavar="S",
        help="seconds without a heartbeat after which a node is lost",
    )
    agent.add_argument(
        "--gather",
        type=positive,
        default=5,
        metavar="S",
        help="seconds to wait for more nodes after MIN have arrived",
    )
    agent.add_argument(
        "--patience", type=positive, default=24 * 3600, metavar="S", help="seconds to wait for MIN nodes"
    )
    layouts = commands.add_parser(
        "layouts", help="print the layout on each number of nodes, and start nothing"
    )
    for command in (agent, layouts):
        command.add_argument(
            "--nodes", required=True, metavar="MIN:MAX", help="number of nodes, a range or one number"
        )
        command.add_argument("--processes", type=positive, default=1, help="ranks on each node")
        command.add_argument("train", nargs="*", metavar="-- ARGUMENTS", help="arguments of train.py")
    given = parser.parse_args(arguments)
    if given.command == "meeting":
        return exit_code_of(lambda: _meeting(given.port, given.host))
    codes: list[int] = []
    # Without a code the reader has closed the pipe, e.g. `layouts ... | head`.
    closed = FINISHED if given.command == "layouts" else FAILED
    return exit_code_of(lambda: codes.append(_node(given))) or next(iter(codes), closed)


def _meeting(port: int, host: str) -> None:
    from forge.tools.elastic.meeting import Meeting

    closed = threading.Event()
    for one in (signal.SIGTERM, signal.SIGINT):
        signal.signal(one, lambda *_: closed.set())
    meeting = Meeting(port, host)
    only = " (this machine only; for others give --host)" if meeting.is_local else ""
    print(f"agents meet at {host}:{meeting.port}{only}", flush=True)
    meeting.serve(closed)


def _node(given: argparse.Namespace) -> int:
    from forge.tools.elastic.agent import Node, layouts, run_agent

    match = re.fullmatch(r"(\d+)(?::(\d+))?", given.nodes)
    least, most = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= least <= most:
        raise UserError(f"--nodes {given.nodes}: must be MIN:MAX with 1 <= MIN <= MAX, or one number")
    if given.command == "layouts":
        for nodes, layout in layouts(given.train, Node(least, most, given.processes, "")).items():
            print(f"{nodes} nodes: {layout}")
        return FINISHED
    node = Node(
        least,
        most,
        given.processes,
        given.meeting,
        given.restarts,
        given.lost_after,
        given.gather,
        given.patience,
    )
    layouts(given.train, node)  # report a mistake before any rank starts
    return run_agent(node, given.train)


if __name__ == "__main__":
    sys.exit(main())
