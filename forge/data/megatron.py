"""Megatron-LM's indexed datasets: `NAME.bin` holds the ids, `NAME.idx` their dtype and the document starts.

The index, little-endian (megatron/core/datasets/indexed_dataset.py, `_IndexReader`):

    9 bytes         "MMIDIDX\\0\\0"
    uint64          version, 1
    uint8           code of the ids' dtype
    uint64          S, number of sequences
    uint64          D + 1, number of document indices
    int32 [S]       tokens in each sequence
    int64 [S]       where in the .bin each sequence begins, in bytes
    int64 [D + 1]   the sequence with which each document begins; the last one is S
    int8  [S]       modes, in multimodal datasets only; not read
"""

from __future__ import annotations

import struct
from bisect import bisect_left
from functools import cached_property
from pathlib import Path

import numpy as np

from forge.data.raw import MappedIds, sampled_digest
from forge.errors import UserError

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
_FIELDS = struct.Struct("<QBQQ")
_HEADER_BYTES = len(MAGIC) + _FIELDS.size
# 6 and 7 are float64 and float32, which no token ids are.
_DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_BLOCK = 1 << 20  # entries of the index that are checked at once, to bound memory


class MegatronTokens(MappedIds):
    """A `Source`: the ids of a Megatron dataset as one stream. `path` is the common prefix, or the `.idx`.

    Opening checks the whole index for consistency with itself and the size of the `.bin`. Raises UserError where they
    disagree, and in `read` for an id at or beyond `vocab_size`. The index is mapped, not held in memory.
    """

    def __init__(self, path: str | Path, vocab_size: int):
        self.name = str(path)
        prefix = str(path).removesuffix(".idx")
        self._index = Path(f"{prefix}.idx")
        dtype, sequences, documents = _read_header(self._index)
        places = _HEADER_BYTES, _HEADER_BYTES + 4 * sequences, _HEADER_BYTES + 12 * sequences
        self._check_size(places[2] + 8 * documents, sequences)
        self._lengths = np.memmap(self._index, "<i4", "r", places[0], (sequences,))
        self._pointers = np.memmap(self._index, "<i8", "r", places[1], (sequences,))
        self._firsts = np.memmap(self._index, "<i8", "r", places[2], (documents,))
        super().__init__(Path(f"{prefix}.bin"), dtype, vocab_size)
        self._check_sequences()
        self._check_documents()

    @property
    def documents(self) -> int:
        return len(self._firsts) - 1

    @cached_property
    def fingerprint(self) -> str:
        """Of the size and sampled content of both files: see `raw.sampled_digest`."""
        return f"megatron-{sampled_digest(self.path)}-{sampled_digest(self._index)}"

    def document_ids(self, start: int, count: int) -> np.ndarray:
        """Return int32 `[count]`: 0 for the document of the first of these tokens, 1 for the next document, ..."""
        documents = range(self.documents)
        low = bisect_left(documents, start, key=self._start_of)
        high = bisect_left(documents, start + count, key=self._start_of)
        steps = np.zeros(count, np.int32)
        steps[self._pointers[self._firsts[low:high]] // self.dtype.itemsize - start] = 1
        steps[0] = 0
        return np.cumsum(steps, dtype=np.int32)

    def _start_of(self, document: int) -> int:
        """The document's first token. Empty documents at the end begin where the tokens end."""
        sequence = int(self._firsts[document])
        if sequence == len(self._pointers):
            return self.tokens
        return int(self._pointers[sequence]) // self.dtype.itemsize

    def _check_size(self, least: int, sequences: int) -> None:
        found = self._index.stat().st_size
        if found not in (least, least + sequences):  # with modes
            raise UserError(
                f"{self._index}: has {found} bytes where its header makes it {least}; it is truncated or damaged"
            )

    def _check_sequences(self) -> None:
        """Sequences must follow each other without a gap, as Megatron writes them, and fill the .bin."""
        total = 0
        for begin in range(0, len(self._lengths), _BLOCK):
            lengths = self._lengths[begin : begin + _BLOCK].astype(np.int64)
            ends = total + np.cumsum(lengths) * self.dtype.itemsize
            starts = np.concatenate([[total], ends[:-1]])
            wrong = (lengths < 0) | (self._pointers[begin : begin + _BLOCK] != starts)
            if wrong.any():
                raise UserError(
                    f"{self._index}: sequence {begin + int(np.argmax(wrong))} does not begin where the one before it "
                    "ends; the index is damaged"
                )
            total = int(ends[-1])
        found = self.tokens * self.dtype.itemsize
        if total != found:
            raise UserError(
                f"{self.path}: has {found} bytes where {self._index.name} says {total}; it is truncated, or "
                "the two do not belong together"
            )

    def _check_documents(self) -> None:
        before = 0
        for begin in range(0, len(self._firsts), _BLOCK):
            firsts = self._firsts[begin : begin + _BLOCK]
            if (np.diff(firsts, prepend=before) < 0).any():
                raise UserError(f"{self._index}: its document indices do not ascend; it is damaged")
            before = int(firsts[-1])
        if not len(self._firsts) or self._firsts[0] != 0 or before != len(self._lengths):
            raise UserError(
                f"{self._index}: its document indices do not go from 0 to its {len(self._lengths)} sequences; "
                "it is damaged"
            )


def _read_header(path: Path) -> tuple[np.dtype, int, int]:
    """The ids' dtype, the number of sequences and of document indices."""
    try:
        with open(path, "rb") as file:
            header = file.read(_HEADER_BYTES)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    if not header.startswith(MAGIC) or len(header) < _HEADER_BYTES:
        raise UserError(f"{path}: does not begin like a Megatron index (MMIDIDX), or is cut short")
    version, code, sequences, documents = _FIELDS.unpack(header[len(MAGIC) :])
    if version != VERSION:
        raise UserError(f"{path}: is a Megatron index of version {version}; forge reads version {VERSION}")
    if code not in _DTYPES:
        raise UserError(
            f"{path}: has dtype code {code}, which is no integer type; token ids have {sorted(_DTYPES)}"
        )
    if not sequences:
        raise UserError(f"{path}: holds no sequence")
    return np.dtype(_DTYPES[code]), sequences, documents
