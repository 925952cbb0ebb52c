r"""Token files of other programs: a bare array of ids (`RawTokens`), and Megatron-LM's indexed datasets (`MegatronTokens`).

Such files have no checksum and do not record their largest id, so ids are checked at every read. In a Megatron dataset
`NAME.bin` holds the ids, and `NAME.idx` their dtype and the document starts. The index is little-endian
(megatron/core/datasets/indexed_dataset.py, `_IndexReader`):

    9 bytes         "MMIDIDX\0\0"
    uint64          version, 1
    uint8           code of the ids' dtype
    uint64          S, number of sequences
    uint64          D + 1, number of document indices
    int32 [S]       tokens in each sequence
    int64 [S]       offset of each sequence in the .bin, in bytes
    int64 [D + 1]   first sequence of each document; the last one is S
    int8  [S]       modes, in multimodal datasets only; not read
"""

from __future__ import annotations

import hashlib
import struct
from bisect import bisect_left
from functools import cached_property
from pathlib import Path

import numpy as np

from forge.data.array import Array, RemoteArray, map_array
from forge.data.cache import BlockCache
from forge.runtime.errors import UserError, redact, unreadable
from forge.runtime.files import is_url
from forge.runtime.remote import RemoteFile

DTYPES: dict[str, np.dtype] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
SAMPLES = 64
SAMPLE_BYTES = 1 << 16
MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
_FIELDS = struct.Struct("<QBQQ")
_HEADER_BYTES = len(MAGIC) + _FIELDS.size
# Codes 6 and 7 are float64 and float32.
_MEGATRON_DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_BLOCK = 1 << 20  # entries of the index per check, to bound memory


class _CachedFile:
    """A local file, or a remote file read through a cache. size: in bytes. Methods return parts of the file's content."""

    def __init__(self, path: str, cache: BlockCache | None):
        self.path = path
        self.is_remote = is_url(path)
        self._remote = RemoteFile(path) if self.is_remote else None
        self._cache = (cache or BlockCache()) if self._remote else None
        try:
            self.size = self._remote.size if self._remote else Path(path).stat().st_size
        except OSError as error:
            raise unreadable(path, error) from None

    def array(self, dtype: np.dtype, offset: int = 0, count: int | None = None) -> Array:
        if self._remote is not None and self._cache is not None:
            return RemoteArray(self._remote, self._cache, dtype, offset, count)
        return map_array(self.path, dtype, offset, count)

    def bytes(self, begin: int, end: int) -> bytes:
        return self.array(np.dtype("u1"), 0, self.size)[begin:end].tobytes()


class MappedIds:
    """The token ids in a file without a header, memory-mapped or remote.

    Every read checks that ids are below the vocabulary.
    """

    def __init__(self, file: _CachedFile, dtype: np.dtype, vocab_size: int):
        self.path, self.dtype, self._vocab_size = file.path, dtype, vocab_size
        self.is_remote = file.is_remote
        if not file.size:
            raise UserError(f"{file.path}: is empty")
        if file.size % dtype.itemsize:
            raise UserError(
                f"{file.path}: has {file.size} bytes, which is not a multiple of {dtype.itemsize}, the size of "
                f"{dtype.name}; it is truncated, or its dtype differs"
            )
        self._ids = file.array(dtype)
        self.tokens = len(self._ids)

    def read(self, start: int, count: int) -> np.ndarray:
        """Return ids start to start + count - 1: `[count]` in the file's dtype, as a view of the file.

        Raises UserError, naming the first id outside the model's vocabulary.
        """
        assert start >= 0 and start + count <= self.tokens
        ids = self._ids[start : start + count]
        if int(ids.max()) >= self._vocab_size or int(ids.min()) < 0:
            place = int(np.argmax((ids >= self._vocab_size) | (ids < 0)))
            raise UserError(
                f"{self.path}: token id {int(ids[place])} at byte {(start + place) * self.dtype.itemsize} is not "
                f"below model.vocab_size {self._vocab_size}; raise model.vocab_size to the tokenizer's number of ids, or, if "
                f"the ids are not {self.dtype.name}, correct the source's dtype"
            )
        return ids


class RawTokens(MappedIds):
    """A `Source`: the ids of one file without a header.

    dtype: "uint16" or "uint32" (little-endian), given by the user because the file does not record it. eos_id: token
    ending a document; None: the file is one document. Raises UserError if the file cannot be read, is empty or has an
    incomplete id, and if `eos_id` is not below `vocab_size`. `read` raises UserError for an id >= `vocab_size`.
    """

    def __init__(
        self,
        path: str | Path,
        dtype: str,
        vocab_size: int,
        eos_id: int | None = None,
        cache: BlockCache | None = None,
    ):
        self._file = _CachedFile(str(path), cache)
        super().__init__(self._file, DTYPES[dtype], vocab_size)
        if eos_id is not None and eos_id >= vocab_size:
            raise UserError(
                f"{path}: eos_id {eos_id} is not below model.vocab_size {vocab_size}, so no document would ever end; correct "
                "eos_id, or leave it out if the file is one document"
            )
        self.name = redact(str(path))
        self._eos_id = eos_id

    @cached_property
    def fingerprint(self) -> str:
        """Return a text with dtype, `eos_id`, and a hash of size and sampled content (see `sampled_digest`)."""
        return f"raw-{self.dtype.name}-{self._eos_id}-{sampled_digest(self._file)}"

    def document_ids(self, start: int, count: int) -> np.ndarray:
        """Return the document numbers of tokens start ... start + count - 1: int32 `[count]`.

        The document of token `start` has number 0, the next document has number 1, and so on.
        """
        if self._eos_id is None:
            return np.zeros(count, np.int32)
        ends = self.read(start, count) == self._eos_id
        return np.cumsum(np.concatenate([[False], ends[:-1]]), dtype=np.int32)


def sampled_digest(file: _CachedFile) -> str:
    """Return the SHA-256 of the file's size and of 64 evenly spaced blocks of 64 KiB, including the first and last.

    At most 4 MB are read. A file up to 4 MB is hashed whole. In a larger file, the digest may miss a change of a few
    bytes. It detects a different file of the same size.
    """
    digest = hashlib.sha256(file.size.to_bytes(8, "little"))
    last = max(0, file.size - SAMPLE_BYTES)
    for offset in sorted({last * sample // (SAMPLES - 1) for sample in range(SAMPLES)}):
        digest.update(file.bytes(offset, min(offset + SAMPLE_BYTES, file.size)))
    return digest.hexdigest()


class MegatronTokens(MappedIds):
    """A `Source`: the ids of a Megatron dataset as one stream.

    path: the common prefix, or the `.idx`. Opening raises UserError unless the whole index is consistent and matches the
    size of the `.bin`. `read` raises UserError for an id >= `vocab_size`. The index is memory-mapped, not loaded.
    """

    def __init__(self, path: str | Path, vocab_size: int, cache: BlockCache | None = None):
        self.name = redact(str(path))
        prefix = str(path).removesuffix(".idx")
        self._index = f"{prefix}.idx"
        index = self._index_file = _CachedFile(self._index, cache)
        dtype, sequences, documents = _read_header(index)
        places = _HEADER_BYTES, _HEADER_BYTES + 4 * sequences, _HEADER_BYTES + 12 * sequences
        found, least = index.size, places[2] + 8 * documents
        if found not in (least, least + sequences):  # with modes
            raise UserError(
                f"{self._index}: has {found} bytes, but its header requires {least}; the index is truncated or damaged: "
                "restore it"
            )
        self._lengths = index.array(np.dtype("<i4"), places[0], sequences)
        self._pointers = index.array(np.dtype("<i8"), places[1], sequences)
        self._firsts = index.array(np.dtype("<i8"), places[2], documents)
        self._tokens = _CachedFile(f"{prefix}.bin", cache)
        super().__init__(self._tokens, dtype, vocab_size)
        self._check_sequences()
        self._check_documents()

    @property
    def documents(self) -> int:
        return len(self._firsts) - 1

    @cached_property
    def fingerprint(self) -> str:
        """Return a hash of the size and sampled content of both files (see `sampled_digest`)."""
        return f"megatron-{sampled_digest(self._tokens)}-{sampled_digest(self._index_file)}"

    def document_ids(self, start: int, count: int) -> np.ndarray:
        """Return the document numbers of tokens start ... start + count - 1: int32 `[count]`.

        The document of token `start` has number 0, the next document has number 1, and so on.
        """
        documents = range(self.documents)
        low = bisect_left(documents, start, key=self._start_of)
        high = bisect_left(documents, start + count, key=self._start_of)
        steps = np.zeros(count, np.int32)
        steps[self._pointers[self._firsts[low:high]] // self.dtype.itemsize - start] = 1
        steps[0] = 0
        return np.cumsum(steps, dtype=np.int32)

    def _start_of(self, document: int) -> int:
        """Return the position of a document's first token in the stream.

        Trailing empty documents begin at the end of the stream.
        """
        sequence = int(self._firsts[document])
        if sequence == len(self._pointers):
            return self.tokens
        return int(self._pointers[sequence]) // self.dtype.itemsize

    def _check_sequences(self) -> None:
        """Raise UserError unless sequences follow each other without gaps, as Megatron writes them, and fill the .bin."""
        total = 0
        for begin in range(0, len(self._lengths), _BLOCK):
            lengths = self._lengths[begin : begin + _BLOCK].astype(np.int64)
            ends = total + np.cumsum(lengths) * self.dtype.itemsize
            starts = np.concatenate([[total], ends[:-1]])
            wrong = (lengths < 0) | (self._pointers[begin : begin + _BLOCK] != starts)
            if wrong.any():
                raise UserError(
                    f"{self._index}: sequence {begin + int(np.argmax(wrong))} does not begin where the one before it "
                    "ends; the index is damaged: restore it"
                )
            total = int(ends[-1])
        found = self.tokens * self.dtype.itemsize
        if total != found:
            raise UserError(
                f"{self.path}: has {found} bytes, but {Path(self._index).name} says {total}; the .bin is "
                "truncated, or belongs to another .idx"
            )

    def _check_documents(self) -> None:
        before = 0
        for begin in range(0, len(self._firsts), _BLOCK):
            firsts = self._firsts[begin : begin + _BLOCK]
            if (np.diff(firsts, prepend=before) < 0).any():
                raise UserError(
                    f"{self._index}: its document indices do not ascend; the index is damaged: restore it"
                )
            before = int(firsts[-1])
        if not len(self._firsts) or self._firsts[0] != 0 or before != len(self._lengths):
            raise UserError(
                f"{self._index}: its document indices must begin with 0 and end with {len(self._lengths)}, its number "
                "of sequences; the index is damaged: restore it"
            )


def _read_header(file: _CachedFile) -> tuple[np.dtype, int, int]:
    """Return (dtype of the ids, number of sequences, number of document indices). Raises UserError for an invalid header."""
    path, header = file.path, file.bytes(0, min(_HEADER_BYTES, file.size)) if file.size else b""
    if not header.startswith(MAGIC) or len(header) < _HEADER_BYTES:
        raise UserError(f"{path}: does not begin like a Megatron index (MMIDIDX), or is cut short")
    version, code, sequences, documents = _FIELDS.unpack(header[len(MAGIC) :])
    if version != VERSION:
        raise UserError(f"{path}: is a Megatron index of version {version}; forge reads version {VERSION}")
    if code not in _MEGATRON_DTYPES:
        raise UserError(
            f"{path}: has dtype code {code}, which is not an integer type; the codes of integer types are "
            f"{sorted(_MEGATRON_DTYPES)}"
        )
    if not sequences:
        raise UserError(f"{path}: holds no sequence")
    return np.dtype(_MEGATRON_DTYPES[code]), sequences, documents
