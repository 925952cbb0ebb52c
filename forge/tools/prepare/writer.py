"""Write a dataset folder (docs/reference/data-format.md). Its last file, `dataset.json`, completes the dataset."""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, Self

import numpy as np

from forge.data.format import (
    INDEX,
    START_DTYPE,
    DatasetIndex,
    FileRecord,
    ShardRecord,
    block_digest,
    token_dtype,
)
from forge.runtime.errors import UserError
from forge.runtime.files import replace_atomically, sync_folder
from forge.runtime.remote import BLOCK_BYTES

SHARD_BYTES = 512 << 20
_AT_ONCE = 1 << 20  # tokens copied at a time, because a part may not fit into memory


class ShardWriter:
    """Append documents to shards of at most `shard_bytes` bytes. `finish` completes the dataset.

    The name of a file begins with a dot until the file is complete. The next writer overwrites incomplete files. A document
    may continue in the next shard. Raises UserError if the folder already has a dataset.
    """

    def __init__(
        self, folder: str | Path, *, vocab_size: int, tokenizer: str, shard_bytes: int = SHARD_BYTES
    ):
        self.folder = Path(folder)
        if (self.folder / INDEX).exists():
            raise UserError(
                f"{self.folder}: already holds a dataset; choose another folder, or delete this one"
            )
        self.folder.mkdir(parents=True, exist_ok=True)
        self.vocab_size = vocab_size
        self.tokenizer = tokenizer
        self._dtype = token_dtype(vocab_size)
        self._capacity = max(1, shard_bytes // self._dtype.itemsize)
        self._shards: list[ShardRecord] = []
        self._token_file: _HashedFile | None = None
        self._starts: list[np.ndarray] = []
        self._filled = 0
        self._max_token_id = -1

    def append(self, tokens: np.ndarray, starts: np.ndarray) -> None:
        """Append documents. tokens: integers `[n]`. starts: ascending offsets of documents in `tokens`, `[documents]`."""
        if not len(tokens):
            return
        largest = int(tokens.max())
        assert int(tokens.min()) >= 0 and largest < self.vocab_size
        self._max_token_id = max(self._max_token_id, largest)
        done = 0
        while done < len(tokens):
            count = min(len(tokens) - done, self._capacity - self._filled, _AT_ONCE)
            if self._token_file is None:
                self._token_file = _HashedFile(self.folder / f"tokens-{len(self._shards):05d}.bin")
            self._token_file.write(tokens[done : done + count].astype(self._dtype))
            low, high = np.searchsorted(starts, [done, done + count])
            self._starts.append((starts[low:high] - done + self._filled).astype(START_DTYPE))
            self._filled += count
            done += count
            if self._filled == self._capacity:
                self._close_shard()

    def finish(self, text_bytes: int = 0, origin: dict[str, Any] | None = None) -> DatasetIndex:
        """Complete the last shard, write `dataset.json` and return its content.

        text_bytes: size of the text encoded by all tokens, in bytes of UTF-8. origin: how the dataset was made, as JSON.
        """
        self._close_shard()
        index = DatasetIndex(
            dtype=self._dtype.name,  # type: ignore[arg-type]
            vocab_size=self.vocab_size,
            tokenizer=self.tokenizer,
            max_token_id=self._max_token_id,
            tokens=sum(shard.tokens for shard in self._shards),
            documents=sum(shard.documents for shard in self._shards),
            text_bytes=text_bytes,
            shards=self._shards,
            origin=origin or {},
        )
        sync_folder(self.folder)
        replace_atomically(self.folder / INDEX, index.model_dump_json(indent=1).encode() + b"\n")
        return index

    def _close_shard(self) -> None:
        if self._token_file is None:
            return
        document_file = _HashedFile(self.folder / f"documents-{len(self._shards):05d}.bin")
        starts = np.concatenate(self._starts)
        document_file.write(starts)
        files = self._token_file.close(), document_file.close()
        block_file = _HashedFile(self.folder / f"blocks-{len(self._shards):05d}.bin")
        block_file.write(b"".join(self._token_file.digests + document_file.digests))
        self._shards.append(
            ShardRecord(
                tokens=self._filled,
                documents=len(starts),
                token_file=files[0],
                document_file=files[1],
                block_file=block_file.close(),
            )
        )
        self._token_file, self._starts, self._filled = None, [], 0


class AtomicFile:
    """A file with a temporary name, hashed as it is written. `close` syncs the file to disk and renames it.

    The end of a `with` block removes the file if `close` was not called.
    """

    def __init__(self, path: Path, temporary_name: str):
        self._path, self._partial = path, path.with_name(temporary_name)
        self._file: BinaryIO = open(self._partial, "wb")  # noqa: SIM115
        self._digest = hashlib.sha256()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):  # a full disk: closing writes the rest
            self._file.close()
        self._partial.unlink(missing_ok=True)

    def write(self, data: bytes) -> None:
        self._file.write(data)
        self._digest.update(data)

    def close(self) -> FileRecord:
        self._file.flush()
        os.fsync(self._file.fileno())
        size = self._file.tell()
        self._file.close()
        self._partial.replace(self._path)
        return FileRecord(name=self._path.name, bytes=size, sha256=self._digest.hexdigest())


class _HashedFile(AtomicFile):
    """A file of a shard. Each of its blocks is also hashed as it is written."""

    def __init__(self, path: Path):
        super().__init__(path, f".{path.name}")
        self._block = bytearray()  # the current block, not yet full
        self.digests: list[bytes] = []

    def write(self, values: np.ndarray | bytes) -> None:
        data = values if isinstance(values, bytes) else values.tobytes()
        super().write(data)
        begin = 0
        while begin < len(data):
            end = begin + BLOCK_BYTES - len(self._block)
            self._block += data[begin:end]
            begin = end
            if len(self._block) == BLOCK_BYTES:
                self._close_block()

    def _close_block(self) -> None:
        if self._block:
            self.digests.append(block_digest(bytes(self._block)))
            self._block.clear()

    def close(self) -> FileRecord:
        self._close_block()
        return super().close()
