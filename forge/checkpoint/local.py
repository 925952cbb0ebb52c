"""`LocalTier`: the newest states of a run in the memory or on the disks of its nodes, in addition to shared storage.

A local state is one checkpoint in the usual format, with its files distributed over the nodes. On each node, the folder
`step-N` has the manifest, DCP's index, all small files and the tensor files of the node's ranks. It also has copies of the
tensor files of other nodes (see `Nodes.peers`). A restart needs every file on at least one surviving node.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections import defaultdict
from collections.abc import Collection, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from forge.checkpoint import folders
from forge.checkpoint.commit import Contents, Storage, commit, require_room, save_tensors
from forge.checkpoint.manifest import MANIFEST, Damaged, compose, entry, read_manifest
from forge.checkpoint.nodes import Nodes, Transfer, exchange
from forge.checkpoint.store import Checkpoints, SaveOutcome
from forge.runtime.distributed import gather_from_ranks, on_every_rank, on_first_rank
from forge.runtime.fault import fault_point

# An older state must remain while a new one is being written.
KEPT = 2
_INDEX = ".metadata"


class LocalTier:
    """The local states: checkpoints that a run keeps on its nodes. Every node has a part of each state in `folder`.

    peers: number of other nodes with a copy of each file. Methods are collective over all ranks unless their docstring
    says otherwise.
    """

    def __init__(self, folder: Path, peers: int):
        self.folder, self._peers = folder, peers
        self.problems: list[str] = []
        """Damaged or incomplete states found by `newest`, one sentence each."""
        self._group: dist.ProcessGroup = dist.new_group(backend="gloo")
        self.nodes = Nodes.of(folder, self._group)
        self._writer = Checkpoints(
            folder, keep_last=KEPT, group=self._group, write=partial(write_parts, self.nodes, peers)
        )
        self.save, self.poll, self.wait = self._writer.save, self._writer.poll, self._writer.wait
        # For the state returned by `newest`: file name -> nodes with the file.
        self._holders: dict[str, list[int]] = {}
        self._files: dict[str, dict[str, Any]] = {}

    def path(self, step: int) -> Path:
        """Return this node's folder for the state of `step`. Not collective."""
        return self.folder / folders.step_name(step)

    def newest(self, after: int) -> int | None:
        """Return the newest step after `after` with a complete and undamaged local state; None if there is none.

        Collective. Verifies the checksums of all files. Afterwards every node has all small files; `fetch` copies
        tensor files.
        """
        self.problems = []
        held = gather_from_ranks("listing local states", lambda: self._held(after), self._group)
        for step in sorted({step for of_rank in held for step in of_rank}, reverse=True):
            digests = {rank: of_rank[step] for rank, of_rank in enumerate(held) if step in of_rank}
            if len(set(digests.values())) > 1:
                self.problems.append(
                    f"the nodes hold parts of different saves of step {step}, so this local state is not used"
                )
            elif self._is_whole(step, digests.keys()):
                return step
        return None

    def fetch(self, step: int, names: set[str]) -> None:
        """Copy the files `names`, needed by this rank, from other nodes. Files that this node has are not copied.

        Collective over all ranks. Raises RanksFailed on every rank if a rank cannot send, write or verify a file.
        """
        nodes, folder = self.nodes, self.path(step)
        lacking = {name for name in names if nodes.own not in self._holders[name]}
        wanted = gather_from_ranks("asking for files", lambda: sorted(lacking), self._group)
        # (file, node) -> the node's first rank that needs the file.
        of_nodes: dict[tuple[str, int], int] = {}
        for rank, of_rank in enumerate(wanted):
            for name in of_rank:
                of_nodes.setdefault((name, nodes.node_of(rank)), rank)
        transfers: list[Transfer] = []
        sent: dict[str, int] = defaultdict(int)
        for (name, _), target in sorted(of_nodes.items()):
            source = nodes.ranks[self._holders[name][sent[name] % len(self._holders[name])]]
            sent[name] += 1
            transfers.append(Transfer(name, self._files[name]["size"], source[target % len(source)], target))

        size = sum(one.size for one in transfers if nodes.node_of(one.target) == nodes.own)
        on_every_rank("making room for local states", lambda: require_room(folder, size), self._group)

        received = exchange(folder, transfers, nodes.rank, self._group)

        def verify() -> None:
            for name in received:
                if entry(folder / name) != self._files[name]:
                    raise Damaged(f"{name} differs from its saved content")

        on_every_rank("verifying files from other nodes", verify, self._group)

    def forget_after(self, step: int) -> list[SaveOutcome]:
        """Remove the states of all steps after `step` (-1: all states). Collective.

        Return the outcomes of saves that ended since the last call, like `Checkpoints.wait`.
        """
        outcomes = self.wait()

        def remove() -> None:
            for later in folders.steps(self.folder, complete=False) if self.nodes.leads else ():
                if later > step:
                    shutil.rmtree(self.path(later))

        on_every_rank("removing local states", remove, self._group)
        return outcomes

    def end(self) -> list[SaveOutcome]:
        """Remove all states and their folder, at the end of the run. Collective. Return outcomes like `forget_after`."""
        outcomes = self.forget_after(-1)
        if self.nodes.leads:
            folders.sweep(self.folder)
            for folder in (self.folder, self.folder.parent):
                with suppress(OSError):
                    folder.rmdir()
        return outcomes

    def _held(self, after: int) -> dict[int, str]:
        """Return a dict from step to manifest digest, for this node's states of steps > `after`.

        Empty except on the node's first rank. Removes damaged manifests.
        """
        found = {}
        for step in folders.steps(self.folder) if self.nodes.leads else ():
            if step > after:
                try:
                    found[step] = str(read_manifest(self.path(step))["digest"])
                except (Damaged, OSError):
                    _discard(self.path(step) / MANIFEST)  # another node's manifest will replace it
        return found

    def _is_whole(self, step: int, holders: Collection[int]) -> bool:
        """Return whether each file of the state of `step` exists undamaged on at least one node.

        Collective. Copies the small files to every node. holders: ranks whose node has the state's manifest.
        """
        folder, nodes = self.path(step), self.nodes

        def intact() -> list[str]:
            if nodes.rank not in holders:
                return []
            files = read_manifest(folder)["files"].items()
            small = [(name, file) for name, file in files if not name.endswith(".distcp")]
            return [MANIFEST, *(name for name, file in small if _problem(folder / name, file) is None)]

        found = gather_from_ranks("checking the small files of a local state", intact, self._group)
        source = {name: rank for rank, names in reversed(list(enumerate(found))) for name in names}

        def read() -> dict[str, bytes]:
            return {name: (folder / name).read_bytes() for name, rank in source.items() if rank == nodes.rank}

        of_ranks = gather_from_ranks("reading a local state", read, self._group)
        contents = {name: content for of_rank in of_ranks for name, content in of_rank.items()}
        on_every_rank("completing a local state", lambda: self._complete(step, contents), self._group)
        files = on_every_rank("reading a manifest", lambda: read_manifest(folder)["files"], self._group)
        tensors = [name for name in files if name.endswith(".distcp")]
        if absent := [name for name in files if name not in tensors and name not in contents]:
            self.problems.append(f"the local state of step {step} has a damaged {absent[0]}")
            return False
        checked = gather_from_ranks(
            "hashing a local state", lambda: self._check(step, files, tensors), self._group
        )
        nodes_of: dict[str, list[int]] = {name: [] for name in tensors}
        for rank, (good, damaged) in enumerate(checked):
            for name in good:
                nodes_of[name].append(nodes.node_of(rank))
            where = f"the local state of step {step} on node {nodes.node_of(rank)}"
            self.problems += [f"{where}: {problem}" for problem in damaged]
        if lost := [name for name, where in nodes_of.items() if not where]:
            self.problems.append(
                f"the local state of step {step} is incomplete: {len(lost)} of {len(tensors)} files are on no node"
            )
            return False
        self._holders, self._files = nodes_of, files
        return True

    def _complete(self, step: int, contents: Mapping[str, bytes]) -> None:
        """Write the small files that are missing or damaged on this node. contents: name -> content.

        Only the node's first rank writes.
        """
        folder = self.path(step)
        if self.nodes.leads:
            for name, content in contents.items():
                path = folder / name
                if _problem(path, _entry(content)) is not None:
                    _discard(path)
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_bytes(content)

    def _check(
        self, step: int, files: Mapping[str, dict[str, Any]], tensors: list[str]
    ) -> tuple[list[str], list[str]]:
        """Hash this rank's share of its node's tensor files.

        Return the undamaged files, and one problem per damaged file. Damaged files are removed, so copies can replace them.
        """
        good: list[str] = []
        damaged: list[str] = []
        folder = self.path(step)
        for name in self.nodes.share([name for name in tensors if os.path.lexists(folder / name)]):
            if (problem := _problem(folder / name, files[name])) is None:
                good.append(name)
            else:
                damaged.append(f"{name} {problem}")
                _discard(folder / name)
        return good, damaged


def _problem(path: Path, expected: dict[str, Any]) -> str | None:
    """Return a sentence about the problem with a file of a local state; None if the file is as expected.

    An unreadable file counts as damaged, because a peer has a copy.
    """
    try:
        return None if entry(path) == expected else "has a wrong checksum"
    except OSError as error:
        return f"cannot be read: {error.strerror}"


def _discard(path: Path) -> None:
    with suppress(OSError):
        path.unlink()


def write_parts(
    nodes: Nodes,
    peers: int,
    root: Path,
    step: int,
    contents: Contents | Exception,
    keep_last: int,
    keep_every: int,
    group: dist.ProcessGroup,
) -> bool:
    """Write each node's part of one local state. Collective over `group`. Results and errors are those of `commit`."""

    def claim(final: Path) -> bool:
        # A state left by an earlier start. It was incomplete, otherwise the run would have resumed from it.
        shutil.rmtree(final, ignore_errors=True)
        return True

    def check_room(sizes: list[int]) -> None:
        stored = [
            nodes.own,
            *(node for node in range(len(nodes.ranks)) if nodes.own in nodes.peers(node, peers)),
        ]
        needed = sum(sizes[rank] for node in stored for rank in nodes.ranks[node])
        on_every_rank("looking for room", lambda: require_room(root, needed) if nodes.leads else None, group)

    def fill(part: Path, final: Path, contents: Contents) -> None:
        save_tensors(part, contents, group)
        parts = gather_from_ranks(
            "reading back what was written", lambda: _own_files(part, nodes.rank), group
        )
        exchange(part, _copies(nodes, peers, parts), nodes.rank, group)
        small = on_first_rank("listing files", lambda: _small_files(part, contents, parts), group)
        on_every_rank("completing the local state", lambda: complete(part, final, small), group)

    def complete(part: Path, final: Path, small: dict[str, bytes]) -> None:
        fault_point("local.before_manifest", step)
        if nodes.leads:
            for name, content in small.items():
                (part / name).parent.mkdir(parents=True, exist_ok=True)
                (part / name).write_bytes(content)
            part.rename(final)

    storage = Storage("local state", nodes.leads, claim, check_room, fill)
    return commit(root, step, contents, storage, keep_last, keep_every, group)


def _copies(nodes: Nodes, peers: int, parts: list[dict[str, dict[str, Any]]]) -> list[Transfer]:
    """Return all transfers between ranks. Each file goes from the rank that wrote it to one rank on each peer node.

    parts: for each rank, its files and their manifest entries.
    """
    found = []
    for node, ranks in enumerate(nodes.ranks):
        for peer in nodes.peers(node, peers):
            to = nodes.ranks[peer]
            for place, rank in enumerate(ranks):
                for name, file in parts[rank].items():
                    found.append(Transfer(name, file["size"], rank, to[place % len(to)]))
    return found


def _own_files(part: Path, rank: int) -> dict[str, dict[str, Any]]:
    return {path.name: entry(path) for path in part.glob(f"__{rank}_*.distcp")}


def _small_files(part: Path, contents: Contents, parts: list[dict[str, dict[str, Any]]]) -> dict[str, bytes]:
    """Return name -> content of the small files: DCP's index, `contents.files` and, last, the manifest. Call on rank 0."""
    small = {_INDEX: (part / _INDEX).read_bytes(), **contents.files}
    files = {name: file for of_rank in parts for name, file in of_rank.items()}
    files |= {name: _entry(content) for name, content in small.items()}
    return small | {MANIFEST: compose(contents.step, len(parts), contents.layout, files).encode()}


def _entry(content: bytes) -> dict[str, Any]:
    return {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
