"""Token files of other programs: a bare array of ids (`RawTokens`), and the base class for such files.

Such a file has no checksum and does not record its greatest id, so ids are checked whenever they are read.
"""

from __future__ import annotations

import hashlib
from functools import cached_property
from pathlib import Path

import numpy as np

from forge.errors import UserError

DTYPES: dict[str, np.dtype] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
SAMPLES = 64
SAMPLE_BYTES = 1 << 16


class MappedIds:
    """The integers of a headerless file, mapped into memory; every range that is read is checked."""

    def __init__(self, path: Path, dtype: np.dtype, vocab_size: int):
        self.path, self.dtype, self._vocab_size = path, dtype, vocab_size
        try:
            size = path.stat().st_size
            if not size:
                raise UserError(f"{path}: is empty")
            if size % dtype.itemsize:
                raise UserError(
                    f"{path}: has {size} bytes, which is no multiple of {dtype.itemsize}, the size of "
                    f"{dtype.name}; it is truncated, or its dtype is another"
                )
            self._ids = np.memmap(path, dtype, mode="r").view(np.ndarray)
        except OSError as error:
            raise UserError(f"{path}: cannot be read: {error.strerror}") from None
        self.tokens = len(self._ids)

    def read(self, start: int, count: int) -> np.ndarray:
        """Return ids start ... start + count - 1 `[count]`, in the file's dtype, as a view of it.

        Raises UserError that names the first id outside the model's vocabulary.
        """
        assert start >= 0 and start + count <= self.tokens
        ids = self._ids[start : start + count]
        if int(ids.max()) >= self._vocab_size or int(ids.min()) < 0:
            place = int(np.argmax((ids >= self._vocab_size) | (ids < 0)))
            raise UserError(
                f"{self.path}: token id {int(ids[place])} at byte {(start + place) * self.dtype.itemsize} is not "
                f"below model.vocab_size {self._vocab_size}; raise that to the tokenizer's number of ids, or, if "
                f"the ids are not {self.dtype.name}, correct the source's dtype"
            )
        return ids


class RawTokens(MappedIds):
    """A `Source`: the ids of one file without a header.

    `dtype` is "uint16" or "uint32" (little-endian), given by the user: the file does not show which it is. With
    `eos_id` a document ends after each such token; without it the file is one document. Raises UserError where the file
    cannot be read, is empty or does not hold whole ids, where `eos_id` is not below `vocab_size`, and in `read` for an
    id at or beyond `vocab_size`.
    """

    def __init__(self, path: str | Path, dtype: str, vocab_size: int, eos_id: int | None = None):
        super().__init__(Path(path), DTYPES[dtype], vocab_size)
        if eos_id is not None and eos_id >= vocab_size:
            raise UserError(
                f"{path}: eos_id {eos_id} is not below model.vocab_size {vocab_size}, so no document would ever end; correct "
                "it, or leave it out if the file is one document"
            )
        self.name = str(path)
        self._eos_id = eos_id

    @cached_property
    def fingerprint(self) -> str:
        """Of size, dtype, `eos_id` and sampled content: see `sampled_digest`."""
        return f"raw-{self.dtype.name}-{self._eos_id}-{sampled_digest(self.path)}"

    def document_ids(self, start: int, count: int) -> np.ndarray:
        """Return int32 `[count]`: 0 for the document of the first of these tokens, 1 for the next document, ..."""
        if self._eos_id is None:
            return np.zeros(count, np.int32)
        ends = self.read(start, count) == self._eos_id
        return np.cumsum(np.concatenate([[False], ends[:-1]]), dtype=np.int32)


def sampled_digest(path: Path) -> str:
    """Return the SHA-256 of the file's size and of 64 evenly spaced blocks of 64 KiB, including the first and last.

    Reads 4 MB whatever the size. A file up to 4 MB is hashed whole; in a larger one a change of a few bytes may not be
    detected, another file of the same size is.
    """
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        size = file.seek(0, 2)
        digest.update(size.to_bytes(8, "little"))
        last = max(0, size - SAMPLE_BYTES)
        for offset in sorted({last * sample // (SAMPLES - 1) for sample in range(SAMPLES)}):
            file.seek(offset)
            digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()
