"""Open a dataset folder, local or remote: tokens and document starts (docs/reference/data-format.md)."""

from __future__ import annotations

import hashlib
import json
import threading
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from forge.data.array import Array, CheckedArray, RemoteArray, map_array
from forge.data.cache import BlockCache
from forge.runtime.errors import UserError, redact, unreadable
from forge.runtime.files import is_url
from forge.runtime.remote import BLOCK_BYTES, RemoteFile, join, read_whole

INDEX = "dataset.json"
FORMAT = "forge-tokens"
VERSION = 1
START_DTYPE = np.dtype("<u8")
DIGEST_BYTES = 8
# Number of files of a local dataset that are open at once. A corpus may have more shards than a process may open files.
OPEN_FILES = 256
TokenUses = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""(starts, ends) of token ranges, int64 `[n]` each -> number of samples until each range is next read, float64 `[n]`."""


class Record(BaseModel):
    """An object in `dataset.json`. Immutable; an unknown field is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class FileRecord(Record):
    """One file of a dataset: its name, size in bytes and checksum."""

    name: str = Field(pattern=r"^[A-Za-z0-9_-][A-Za-z0-9_.-]*$")
    bytes: int = Field(ge=0)
    sha256: str


class ShardRecord(Record):
    """A shard: `tokens` tokens of the stream, and the starts of the `documents` documents that begin in the shard.

    block_file: the file with the `block_digest` of every block of the token file, then of the document file. None in
    older datasets.
    """

    tokens: int = Field(ge=1)
    documents: int = Field(ge=0)
    token_file: FileRecord
    document_file: FileRecord
    block_file: FileRecord | None = None

    @property
    def files(self) -> list[FileRecord]:
        return [self.token_file, self.document_file, *([self.block_file] if self.block_file else [])]


class DatasetIndex(Record):
    """The content of `dataset.json`."""

    format: Literal["forge-tokens"] = FORMAT  # type: ignore[assignment]
    version: Literal[1] = VERSION  # type: ignore[assignment]
    dtype: Literal["uint16", "uint32"]
    vocab_size: int
    tokenizer: str
    max_token_id: int
    tokens: int
    documents: int
    text_bytes: int
    shards: list[ShardRecord]
    origin: dict[str, Any] = {}

    @property
    def token_dtype(self) -> np.dtype:
        return token_dtype(self.vocab_size)


def token_dtype(vocab_size: int) -> np.dtype:
    """Return the dtype of token ids: uint16 if every id fits, otherwise uint32; little-endian."""
    return np.dtype("<u2") if vocab_size <= 1 << 16 else np.dtype("<u4")


def block_digest(data: bytes | memoryview) -> bytes:
    """Return the checksum of a block: BLOCK_BYTES bytes, or fewer at the end of a file."""
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES).digest()


class TokenDataset:
    """A `Source`: a forge dataset, on disk or in a remote store.

    Opening reads `dataset.json` and, on disk, compares file sizes. If the dataset has block checksums, each block is
    verified when this process first reads it (forge/data/integrity.py verifies all blocks). cache: keeps blocks of
    remote files.

    vocab_size: the model's; None: not checked. Opening refuses a dataset whose recorded largest id is `vocab_size` or
    more. `read` checks every id again, because a damaged file may contain any id. Every problem raises UserError with
    the file's name.
    """

    def __init__(self, path: str | Path, vocab_size: int | None = None, cache: BlockCache | None = None):
        self.is_remote = is_url(path)
        self.path = str(path) if self.is_remote else Path(path)
        self._prefix = join(path, INDEX).removesuffix(INDEX)
        """The start of the path or URL of each file, up to the file's name."""
        self.name = redact(str(path))
        self.next_use: TokenUses | None = None
        """Next uses of a remote dataset's tokens, for the eviction of cached blocks; None: unknown."""
        self.index = read_index(path)
        self.vocab_size = vocab_size
        self._check()
        self._cache = (cache or BlockCache()) if self.is_remote else None
        self._firsts = list(accumulate((shard.tokens for shard in self.index.shards), initial=0))
        # The arrays used last: a local array holds an open file. Checks are remembered after the file is closed.
        self._arrays: OrderedDict[str, Array] = OrderedDict()
        self._checked: dict[str, np.ndarray] = {}
        # A remote array holds no file, and opening one may wait for the store.
        self._lock: AbstractContextManager[Any] = nullcontext() if self.is_remote else threading.RLock()

    @property
    def tokens(self) -> int:
        return self.index.tokens

    @property
    def documents(self) -> int:
        return self.index.documents

    @cached_property
    def fingerprint(self) -> str:
        """Return a hash of `dataset.json` without the key `origin`. A copied or moved dataset has the same fingerprint."""
        # Derived fields missing from older datasets are also excluded.
        content = self.index.model_dump(exclude={"origin": True, "shards": {"__all__": {"block_file"}}})
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def read(self, start: int, count: int) -> np.ndarray:
        """Return tokens start ... start + count - 1: `[count]` in the stored dtype; may be a view of the file."""
        assert start >= 0 and start + count <= self.tokens
        pieces = []
        for number, begin, end in self._spans(start, count):
            shard = self.index.shards[number]
            piece = self._open(number, shard.token_file, self.index.token_dtype)[begin:end]
            if self.vocab_size is not None and int(piece.max()) >= self.vocab_size:
                place = int(np.argmax(piece >= self.vocab_size))
                raise UserError(
                    f"{self._prefix}{shard.token_file.name}: token id {int(piece[place])} at byte "
                    f"{(begin + place) * piece.itemsize} is beyond model.vocab_size {self.vocab_size}; "
                    "the file is damaged"
                )
            pieces.append(piece)
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def document_ids(self, start: int, count: int) -> np.ndarray:
        """Return the document numbers of tokens start ... start + count - 1: int32 `[count]`.

        The document of token `start` has number 0, the next document has number 1, and so on.
        """
        assert start >= 0 and start + count <= self.tokens
        steps = np.zeros(count, np.int32)
        done = 0
        for number, begin, end in self._spans(start, count):
            shard = self.index.shards[number]
            if shard.documents:
                starts = self._open(number, shard.document_file, START_DTYPE)
                low, high = (bisect_left(starts, place) for place in (begin, end))
                steps[starts[low:high].astype(np.int64) - begin + done] = 1
            done += end - begin
        steps[0] = 0
        return np.cumsum(steps, dtype=np.int32)

    def _spans(self, start: int, count: int) -> Iterator[tuple[int, int, int]]:
        """Yield (shard number, first, end) for each shard with some of the tokens start ... start + count - 1.

        first, end: the range of these tokens within the shard; `end` is exclusive.
        """
        number, end = bisect_right(self._firsts, start) - 1, start + count
        while start < end:
            first, stop = self._firsts[number], min(end, self._firsts[number + 1])
            yield number, start - first, stop - first
            start, number = stop, number + 1

    def open_file(self, record: FileRecord, dtype: np.dtype) -> Array:
        """Return the content of a packing plan's file in the dataset's folder."""
        path = self._prefix + record.name
        if self._cache is None:
            return map_array(path, dtype)
        file = RemoteFile(path, record.bytes)
        self._cache.next_uses[file.key] = lambda blocks: np.zeros(len(blocks))
        return RemoteArray(file, self._cache, dtype)

    def _open(self, number: int, record: FileRecord, dtype: np.dtype) -> Array:
        """Return the content of a file of shard `number`. Blocks with checksums are verified when read."""
        with self._lock:
            if record.name not in self._arrays:
                self._arrays[record.name] = self._open_checked(number, record, dtype)
            if not self.is_remote:
                self._arrays.move_to_end(record.name)
                if len(self._arrays) > OPEN_FILES:
                    self._arrays.popitem(last=False)  # closed when no reader uses it any more
            return self._arrays[record.name]

    def _open_checked(self, number: int, record: FileRecord, dtype: np.dtype) -> Array:
        path, cache = self._prefix + record.name, self._cache
        block_file = self.index.shards[number].block_file
        if record is block_file:
            return self._open_block_file(path, record, dtype)
        expected = None if block_file is None else self._checksums(number, record, block_file)
        if cache is None:
            return (
                map_array(path, dtype)
                if expected is None
                else CheckedArray(path, dtype, expected, block_digest, self._checks_of(record))
            )
        file = RemoteFile(path, record.bytes, record.sha256[:32], expected, block_digest)
        if record is self.index.shards[number].token_file:
            uses = cache.next_uses
            # Held-out data may be the same files as training data, which knows its next use.
            if self.next_use is not None or file.key not in uses:
                uses[file.key] = lambda blocks: self._need_of(number, blocks)
        else:
            cache.next_uses[file.key] = lambda blocks: np.zeros(len(blocks))
        return RemoteArray(file, cache, dtype)

    def _checksums(self, number: int, record: FileRecord, block_file: FileRecord) -> Callable[[int], bytes]:
        """Return a function: index of a block of the file `record` -> the block's checksum.

        number: index of the file's shard. block_file: the file with the shard's checksums. The function reads checksums on
        demand and does not hold them in memory.
        """
        shard, first = self.index.shards[number], 0
        if record is shard.document_file:
            first = -(-shard.token_file.bytes // BLOCK_BYTES)
        dtype = np.dtype(f"V{DIGEST_BYTES}")
        return lambda block: self._open(number, block_file, dtype)[first + block].tobytes()

    def _open_block_file(self, path: str, record: FileRecord, dtype: np.dtype) -> Array:
        """Return the block checksums of a shard, from the file `path`.

        A local file, or a remote file of at most one block, is verified by its SHA-256. A larger remote file is not.
        """
        if self._cache is None:
            sums, checked = map_array(path, dtype), self._checks_of(record)
            if not checked[0] and hashlib.sha256(sums.view(np.uint8).data).hexdigest() != record.sha256:
                raise UserError(
                    f"{path}: has another checksum than when the dataset was written, so the file was changed or is damaged; "
                    "restore it, or prepare the dataset again"
                )
            checked[0] = True
            return sums
        expected = (lambda _: bytes.fromhex(record.sha256)) if record.bytes <= BLOCK_BYTES else None
        file = RemoteFile(
            path, record.bytes, record.sha256[:32], expected, lambda data: hashlib.sha256(data).digest()
        )
        self._cache.next_uses[file.key] = lambda blocks: np.zeros(len(blocks))
        return RemoteArray(file, self._cache, dtype)

    def _checks_of(self, record: FileRecord) -> np.ndarray:
        """Return which blocks of a file this process has verified: bool `[blocks]`, changed in place."""
        blocks = max(1, -(-record.bytes // BLOCK_BYTES))
        return self._checked.setdefault(record.name, np.zeros(blocks, bool))

    def _need_of(self, number: int, blocks: np.ndarray) -> np.ndarray:
        """Return, for each of `blocks` in the token file of a shard, the number of samples until its next use. 0: unknown.

        number: the shard's number.
        """
        if self.next_use is None:
            return np.zeros(len(blocks))
        each = BLOCK_BYTES // self.index.token_dtype.itemsize
        first = self._firsts[number] + blocks * each
        return self.next_use(first, np.minimum(first + each, self._firsts[number + 1]))

    def _check(self) -> None:
        index, where = self.index, self._prefix + INDEX
        if index.dtype != token_dtype(index.vocab_size).name:
            raise UserError(
                f"{where}: dtype {index.dtype} does not match vocab_size {index.vocab_size}; prepare the dataset again"
            )
        for shard in index.shards:
            self._check_size(shard.token_file, shard.tokens, index.token_dtype)
            self._check_size(shard.document_file, shard.documents, START_DTYPE)
            if shard.block_file is not None:
                files = shard.token_file, shard.document_file
                blocks = sum(-(-one.bytes // BLOCK_BYTES) for one in files)
                self._check_size(shard.block_file, blocks, np.dtype(f"V{DIGEST_BYTES}"))
        totals = sum(s.tokens for s in index.shards), sum(s.documents for s in index.shards)
        if totals != (index.tokens, index.documents):
            raise UserError(
                f"{where}: says (tokens, documents) = {(index.tokens, index.documents)}, but its shards add up to "
                f"{totals}; the file is damaged: prepare the dataset again"
            )
        if index.documents < 1:
            raise UserError(f"{self.path}: holds no document; prepare it again from input that has text")
        if self.vocab_size is not None and index.max_token_id >= self.vocab_size:
            raise UserError(
                f"{self.path}: holds token id {index.max_token_id}, but model.vocab_size is {self.vocab_size}; "
                f"set model.vocab_size to the tokenizer's size, {index.vocab_size}, or more"
            )

    def _check_size(self, record: FileRecord, elements: int, dtype: np.dtype) -> None:
        path, found = self._prefix + record.name, record.bytes
        # In a remote store, each file's size would need a request. A wrong size is detected when blocks are read.
        if not self.is_remote:
            try:
                found = Path(path).stat().st_size
            except OSError as error:
                raise unreadable(path, error) from None
        expected = elements * dtype.itemsize
        if found != expected or record.bytes != expected:
            raise UserError(
                f"{path}: has {found} bytes, but {INDEX} says {record.bytes} ({elements} x "
                f"{dtype.itemsize}); the file is truncated or was replaced: prepare the dataset again"
            )


def read_index(folder: str | Path) -> DatasetIndex:
    """Return the content of a dataset's `dataset.json`. Raises UserError if it is missing or invalid."""
    path = join(folder, INDEX)
    try:
        text = (read_whole(path) if is_url(path) else Path(path).read_bytes()).decode("utf-8")
    except (FileNotFoundError, NotADirectoryError):
        what = "is not a folder" if not is_url(path) and not Path(folder).is_dir() else f"holds no {INDEX}"
        remedy = "scripts/prepare_data.py makes one ('synthetic' needs no file)"
        found = [] if is_url(path) else sorted(Path(folder).glob(f"*/{INDEX}"))
        if within := [str(inner.parent) for inner in found]:
            remedy = f"name one of the datasets in it: {', '.join(within[:5])}"
        raise UserError(f"{folder}: {what}, so it is not a complete dataset; {remedy}") from None
    except OSError as error:
        raise unreadable(path, error) from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: cannot be read: {error}") from None
    try:
        return DatasetIndex.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"]) or "the file"
        raise UserError(
            f"{path}: damaged or of another version: {key}: {first['msg']}; prepare the dataset again"
        ) from None
