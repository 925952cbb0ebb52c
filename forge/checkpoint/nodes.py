"""Groups of ranks that share a node-local folder, and the exchange of files between nodes."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from forge.runtime.distributed import gather_from_ranks, on_every_rank

_CHUNK = 1 << 28


@dataclass(frozen=True)
class Nodes:
    """Nodes and their ranks.

    ranks: the ranks of each node, ascending; nodes are in the order of their first ranks. rank: this process's rank.
    """

    ranks: tuple[tuple[int, ...], ...]
    rank: int

    @classmethod
    def of(cls, folder: Path, group: dist.ProcessGroup) -> Nodes:
        """Group the ranks by node. Ranks on one node have the same host name and the same absolute path of `folder`.

        Collective over `group`, which must contain all ranks.
        """
        place = (socket.gethostname(), os.path.realpath(folder))
        places = gather_from_ranks("comparing local folders", lambda: place, group)
        ranks: dict[tuple[str, str], list[int]] = {}
        for rank, one in enumerate(places):
            ranks.setdefault(one, []).append(rank)
        return cls(tuple(tuple(of_node) for of_node in ranks.values()), dist.get_rank(group))

    @property
    def own(self) -> int:
        """Return the index of this rank's node."""
        return self.node_of(self.rank)

    @property
    def leads(self) -> bool:
        """Return whether this rank is its node's first rank, which manages the node's folder."""
        return self.rank == self.ranks[self.own][0]

    def node_of(self, rank: int) -> int:
        return next(number for number, ranks in enumerate(self.ranks) if rank in ranks)

    def share(self, names: Sequence[str]) -> list[str]:
        """Divide `names` among the ranks of this node and return this rank's share. Not collective."""
        ranks = self.ranks[self.own]
        return list(names[ranks.index(self.rank) :: len(ranks)])

    def peers(self, node: int, copies: int) -> list[int]:
        """Return the nodes with copies of the files of `node`: the next `copies` nodes, or all others if there are fewer."""
        count = len(self.ranks)
        return [(node + step) % count for step in range(1, min(copies, count - 1) + 1)]


@dataclass(frozen=True)
class Transfer:
    """A file of `size` bytes to send from rank `source` to rank `target` on another node."""

    name: str
    size: int
    source: int
    target: int


def exchange(folder: Path, transfers: Sequence[Transfer], rank: int, group: dist.ProcessGroup) -> list[str]:
    """Send and receive files of `folder`. Return the names of received files.

    Collective: all ranks pass the same transfers in the same order. Raises RanksFailed on every rank if a rank cannot open
    or allocate a file. Files are mapped into memory, so only the network transfer copies data.
    """
    if not transfers:
        return []
    own = [(tag, one) for tag, one in enumerate(transfers) if rank in (one.source, one.target) and one.size]
    # Map all files on all ranks before the first transfer. A rank that fails later would leave its peers waiting.
    contents = on_every_rank(
        "mapping files for the exchange between nodes",
        lambda: [_map(folder / one.name, one.size, writes=rank == one.target) for _, one in own],
        group,
    )

    def send_and_receive() -> None:
        works = []
        for (tag, one), content in zip(own, contents, strict=True):
            for chunk in content.split(_CHUNK):
                if rank == one.source:
                    works.append(dist.isend(chunk, one.target, group=group, tag=tag))
                else:
                    works.append(dist.irecv(chunk, one.source, group=group, tag=tag))
        for work in works:
            if work is not None:
                work.wait()

    on_every_rank("exchanging files between nodes", send_and_receive, group)
    return [one.name for _, one in own if rank == one.target]


def _map(path: Path, size: int, writes: bool) -> Tensor:
    """Map the file at `path` as a uint8 tensor `[size]`.

    writes: create and allocate the file, and write changes of the tensor to it. False: read an existing file.
    """
    if writes and hasattr(os, "posix_fallocate"):  # not on macOS
        with path.open("wb") as file:
            # A write to a mapped page without a disk block, e.g. beyond a quota, would kill the process with SIGBUS.
            os.posix_fallocate(file.fileno(), 0, size)
    return torch.from_file(str(path), shared=writes, size=size, dtype=torch.uint8)
