"""Packing plans: the documents, or parts of documents, of each sequence (made by forge/tools/prepare/pack.py).

    packing-best_fit-2048.json              a `PlanIndex`
    packing-best_fit-2048-sequences.bin     uint64 [sequences + 1]: each sequence's first piece; then the number of pieces
    packing-best_fit-2048-pieces.bin        (uint64, uint32) [pieces]: first token in the stream, number of tokens

Reading a sequence needs three small reads, so nothing is held in memory.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError

from forge.data.array import Array
from forge.data.format import FileRecord
from forge.runtime.errors import UserError
from forge.runtime.files import is_url
from forge.runtime.remote import join, read_whole

PackingKind = Literal["best_fit", "document"]
SEQUENCES = np.dtype("<u8")
PIECES = np.dtype([("start", "<u8"), ("tokens", "<u4")])


class PlanIndex(BaseModel):
    """The description of a packing plan.

    cut_documents: number of documents longer than a sequence. cut_tokens: number of their tokens after the first
    seq_len + 1 of each. lost_tokens: number of tokens in no sequence.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    version: Literal[1] = 1
    kind: PackingKind
    seq_len: int
    dataset: str
    sequences: int
    pieces: int
    tokens: int
    cut_documents: int
    cut_tokens: int
    lost_tokens: int
    padded: int
    sequence_file: FileRecord
    piece_file: FileRecord


def plans_in(folder: Path) -> dict[Path, PlanIndex | None]:
    """Return path -> index of each packing plan in the local folder `folder`, by name; None for an unreadable index."""
    plans: dict[Path, PlanIndex | None] = {}
    for path in sorted(folder.glob("packing-*.json")):
        try:
            plans[path] = PlanIndex.model_validate_json(path.read_bytes())
        except (OSError, ValidationError):
            plans[path] = None
    return plans


def plan_name(kind: str, seq_len: int) -> str:
    """Return the file name of a plan's index, without the ending `.json`."""
    return f"packing-{kind}-{seq_len}"


class PackingPlan:
    """An open packing plan: `sequences` sequences of one or more pieces. digest: identifies the sequences."""

    def __init__(self, index: PlanIndex, starts: Array, pieces: Array):
        self.index, self._starts, self._pieces = index, starts, pieces
        self.sequences, self.name = index.sequences, plan_name(index.kind, index.seq_len)
        # The digest covers only the sequences, because another version of forge may report other counts.
        content = f"{index.sequence_file.sha256}{index.piece_file.sha256}"
        self.digest = hashlib.sha256(content.encode()).hexdigest()

    def pieces(self, sequence: int) -> list[tuple[int, int]]:
        """Return (first token, number of tokens) of each piece of a sequence."""
        first, end = (int(place) for place in self._starts[sequence : sequence + 2])
        pieces = self._pieces[first:end]
        return list(zip(pieces["start"].tolist(), pieces["tokens"].tolist(), strict=True))


def open_plan(
    folder: str | Path,
    kind: str,
    seq_len: int,
    dataset: str,
    open_file: Callable[[FileRecord, np.dtype], Array],
) -> PackingPlan:
    """Open the plan of the dataset in `folder` for `kind` and `seq_len`.

    dataset: the dataset's fingerprint. open_file: opens a file of the plan. Raises UserError if the plan is missing,
    damaged, or belongs to another dataset.
    """
    path = join(folder, f"{plan_name(kind, seq_len)}.json")
    remedy = f"make a plan with scripts/prepare_data.py --packing {kind} --seq-len {seq_len}, also for a finished dataset"
    try:
        content = read_whole(path) if is_url(path) else Path(path).read_bytes()
    except FileNotFoundError:
        raise UserError(
            f'data.packing = "{kind}": {folder} has no plan for train.seq_len = {seq_len}; {remedy}'
        ) from None
    try:
        index = PlanIndex.model_validate_json(content)
    except ValidationError:
        raise UserError(f"{path}: is damaged or of another version; remove the file, then {remedy}") from None
    if index.dataset != dataset:
        raise UserError(f"{path}: was made for other content of {folder}; remove the file, then {remedy}")
    expected = (index.sequences + 1) * SEQUENCES.itemsize, index.pieces * PIECES.itemsize
    files = index.sequence_file, index.piece_file
    for file, size in zip(files, expected, strict=True):
        found = file.bytes if is_url(folder) else _size(join(folder, file.name))
        if found != size or file.bytes != size:
            raise UserError(
                f"{join(folder, file.name)}: has {found} bytes instead of {size}; remove this packing plan, then {remedy}"
            )
    return PackingPlan(index, open_file(files[0], SEQUENCES), open_file(files[1], PIECES))


def _size(path: str) -> int:
    try:
        return Path(path).stat().st_size
    except OSError:
        return -1
