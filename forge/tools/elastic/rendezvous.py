"""PyTorch's rendezvous with two extensions: detect lost members, and wait for the run's lock if a lost member holds it.

A member is an agent that takes part in the current round.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.rendezvous.api import RendezvousInfo, RendezvousTimeoutError
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousTimeout,
)

from forge.runtime.errors import UserError

RUN_ID = "forge"
HEARTBEAT_S = 1
# PyTorch reads the state at most once a second, so an agent sees a heartbeat up to SLACK_S late. Unlike a lost member, a
# member that leaves by itself has sent a heartbeat shortly before.
SLACK_S = 1.0
POLL_S, PATIENT_S = 0.5, 10.0


class Rendezvous(DynamicRendezvousHandler):
    """The rendezvous of one agent with the others.

    A round begins when the agents meet, includes the training that follows, and ends when they meet again.

    PyTorch removes a member without heartbeats, but does not interrupt the other members. Their ranks would wait for the
    lost ranks in a collective until the watchdog ends them. This class ends the round when a member is lost. The remaining
    agents then meet again, as after the arrival of a new node.
    """

    _lost_after_s: int
    _patience_s: int
    _holder: Callable[[], str | None]
    _seen: dict[Any, tuple[Any, float]]

    @classmethod
    def at(
        cls,
        store: dist.Store,
        nodes: tuple[int, int],
        lost_after_s: int,
        gather_s: int,
        patience_s: int,
        holder: Callable[[], str | None],
    ) -> Rendezvous:
        """Return a handler for the rendezvous in `store`.

        nodes: smallest and largest number of nodes. lost_after_s, gather_s, patience_s: as in `Node`. holder: returns the
        holder of the run directory's lock, or None if the lock is free.
        """
        timeout = RendezvousTimeout(join=timedelta(seconds=patience_s), last_call=timedelta(seconds=gather_s))
        handler = cls.from_backend(
            RUN_ID,
            store,
            C10dRendezvousBackend(store, RUN_ID),
            *nodes,
            timeout=timeout,
            keep_alive_interval=HEARTBEAT_S,
            keep_alive_max_attempt=lost_after_s // HEARTBEAT_S,
        )
        handler._lost_after_s, handler._patience_s, handler._holder = lost_after_s, patience_s, holder
        handler._seen = {}
        return handler

    def next_rendezvous(self) -> RendezvousInfo:
        """Meet the other agents, then wait until no rank of an earlier round holds the lock of the run directory.

        All agents at the rendezvous have ended their ranks. Only a rank of a lost node can therefore hold the lock: this
        rank is still running, or the file system has not noticed its death. In the first round, do not wait: the lock would
        belong to another run, and rank 0 refuses to start. Raises RendezvousTimeoutError after `patience_s`.
        """
        deadline = time.monotonic() + self._patience_s
        while True:
            self._seen = {}
            info = super().next_rendezvous()
            number = self._state_holder.state.round
            if number == 0 or self._is_free(deadline):
                # For the ranks of this round: PyTorch counts no change of nodes as a restart.
                os.environ["FORGE_ROUND"] = str(number)
                return info

    def num_nodes_waiting(self) -> int:
        """Return the number of nodes waiting to join, plus 1 if a member is lost.

        PyTorch ends the round if the result is above 0.
        """
        return super().num_nodes_waiting() + self.has_lost_member()

    def has_lost_member(self) -> bool:
        """Return whether the rendezvous has removed a member of this round (possibly this node) for lack of heartbeats.

        A member that left by itself does not count as lost. Its ranks have ended, so the ranks of this node fail, too, and
        report the reason.
        """
        state, now = self._state_holder.state, time.monotonic()
        for node in state.participants:
            heartbeat = state.last_heartbeats.get(node)
            if node not in self._seen or self._seen[node][0] != heartbeat:
                self._seen[node] = heartbeat, now
        return any(
            node not in state.participants and now - since >= self._lost_after_s - SLACK_S
            for node, (_, since) in self._seen.items()
        )

    def is_whole(self) -> bool:
        """Return whether no member has left this round."""
        return all(node in self._state_holder.state.participants for node in self._seen)

    def _is_free(self, deadline: float) -> bool:
        """Wait until the lock of the run directory is free, and return True.

        Return False if a node arrives or is lost during the wait, because the agents must then meet again. Raises
        RendezvousTimeoutError at `deadline`.
        """
        speak_at = time.monotonic() + PATIENT_S
        while holder := self._holder():
            now = time.monotonic()
            if now >= deadline:
                raise RendezvousTimeoutError(
                    f"the run directory is still in use by {holder}, a rank of a lost node; end that process"
                )
            if now >= speak_at:
                text = f"waiting until {holder}, a rank of a lost node, ends: it still holds the lock of the run directory"
                print(f"forge: {text}", file=sys.stderr, flush=True)
                speak_at = now + 60
            if self.num_nodes_waiting():
                return False
            time.sleep(POLL_S)
        return True

    def _keep_alive(self) -> None:
        # A thread of PyTorch calls this method. The main thread gets the same error at its next read of the state.
        with suppress(UserError):
            super()._keep_alive()
