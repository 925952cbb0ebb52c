"""Open a dataset folder: memory-mapped tokens and document starts (docs/data_format.md)."""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections.abc import Iterator
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from forge.errors import UserError

INDEX = "dataset.json"
FORMAT = "forge-tokens"
VERSION = 1
START_DTYPE = np.dtype("<u8")


class Record(BaseModel):
    """Part of a dataset's description: immutable, and unknown fields are an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class FileRecord(Record):
    """One file of a dataset: its name, size in bytes and checksum."""

    name: str = Field(pattern=r"^[A-Za-z0-9_-][A-Za-z0-9_.-]*$")
    bytes: int = Field(ge=0)
    sha256: str


class ShardRecord(Record):
    """`tokens` tokens of the stream, and the starts of the `documents` documents that begin among them."""

    tokens: int = Field(ge=1)
    documents: int = Field(ge=0)
    token_file: FileRecord
    document_file: FileRecord


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
    """Return uint16 where every id fits, otherwise uint32; little-endian."""
    return np.dtype("<u2") if vocab_size <= 1 << 16 else np.dtype("<u4")


class TokenDataset:
    """A `Source`: a token stream on disk. Opening reads `dataset.json` and compares file sizes; `verify` reads all bytes.

    With `vocab_size` (the model's), ids at or beyond it are refused: at opening by the recorded greatest id, and in
    `read`, where only a damaged file contains one. All problems are `UserError`s that name the file.
    """

    def __init__(self, path: str | Path, vocab_size: int | None = None):
        self.path = Path(path)
        self.name = str(path)
        self.index = _read_index(self.path)
        self.vocab_size = vocab_size
        self._check()
        self._firsts = list(accumulate((shard.tokens for shard in self.index.shards), initial=0))
        self._maps: dict[str, np.ndarray] = {}

    @property
    def tokens(self) -> int:
        return self.index.tokens

    @property
    def documents(self) -> int:
        return self.index.documents

    @cached_property
    def fingerprint(self) -> str:
        """A hash of `dataset.json` without its origin, so of the content; the same after a copy or a move."""
        content = self.index.model_dump(exclude={"origin"})
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def read(self, start: int, count: int) -> np.ndarray:
        """Return tokens start ... start + count - 1 `[count]` in the stored dtype; may be a view of the file."""
        assert start >= 0 and start + count <= self.tokens
        pieces = []
        for shard, begin, end in self._spans(start, count):
            piece = self._map(shard.token_file, self.index.token_dtype)[begin:end]
            if self.vocab_size is not None and int(piece.max()) >= self.vocab_size:
                place = int(np.argmax(piece >= self.vocab_size))
                raise UserError(
                    f"{self.path / shard.token_file.name}: token id {int(piece[place])} at byte "
                    f"{(begin + place) * piece.itemsize} is beyond model.vocab_size {self.vocab_size}; "
                    "the file is damaged"
                )
            pieces.append(piece)
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def document_ids(self, start: int, count: int) -> np.ndarray:
        """Return int32 `[count]`: 0 for the document of the first of these tokens, 1 for the next document, ..."""
        assert start >= 0 and start + count <= self.tokens
        steps = np.zeros(count, np.int32)
        done = 0
        for shard, begin, end in self._spans(start, count):
            if shard.documents:
                starts = self._map(shard.document_file, START_DTYPE)
                low, high = np.searchsorted(starts, np.array([begin, end], START_DTYPE))
                steps[starts[low:high].astype(np.int64) - begin + done] = 1
            done += end - begin
        steps[0] = 0
        return np.cumsum(steps, dtype=np.int32)

    def verify(self) -> None:
        """Read everything and compare checksums; UserError names the first file that differs."""
        for shard in self.index.shards:
            for record in (shard.token_file, shard.document_file):
                with open(self.path / record.name, "rb") as file:
                    found = hashlib.file_digest(file, "sha256").hexdigest()
                if found != record.sha256:
                    raise UserError(
                        f"{self.path / record.name}: damaged, its SHA-256 is {found[:12]}... and {INDEX} "
                        f"has {record.sha256[:12]}...; make the dataset again"
                    )

    def _spans(self, start: int, count: int) -> Iterator[tuple[ShardRecord, int, int]]:
        """Yield (shard, first, end), offsets within the shard, for a range of the stream."""
        number, end = bisect_right(self._firsts, start) - 1, start + count
        while start < end:
            first, stop = self._firsts[number], min(end, self._firsts[number + 1])
            yield self.index.shards[number], start - first, stop - first
            start, number = stop, number + 1

    def _map(self, record: FileRecord, dtype: np.dtype) -> np.ndarray:
        if record.name not in self._maps:
            try:
                mapped = np.memmap(self.path / record.name, dtype, mode="r")
            except OSError as error:
                raise UserError(f"{self.path / record.name}: cannot be read: {error.strerror}") from None
            self._maps[record.name] = mapped.view(np.ndarray)
        return self._maps[record.name]

    def _check(self) -> None:
        index, where = self.index, self.path / INDEX
        if index.dtype != token_dtype(index.vocab_size).name:
            raise UserError(f"{where}: dtype {index.dtype} does not go with vocab_size {index.vocab_size}")
        for shard in index.shards:
            self._check_size(shard.token_file, shard.tokens, index.token_dtype)
            self._check_size(shard.document_file, shard.documents, START_DTYPE)
        totals = sum(s.tokens for s in index.shards), sum(s.documents for s in index.shards)
        if totals != (index.tokens, index.documents):
            raise UserError(
                f"{where}: its totals (tokens, documents) {(index.tokens, index.documents)} are not its "
                f"shards' {totals}"
            )
        if index.documents < 1:
            raise UserError(f"{self.path}: holds no document; prepare it again from input that has text")
        if self.vocab_size is not None and index.max_token_id >= self.vocab_size:
            raise UserError(
                f"{self.path}: holds token id {index.max_token_id}, and model.vocab_size is {self.vocab_size}; "
                f"set model.vocab_size to the tokenizer's {index.vocab_size} or more"
            )

    def _check_size(self, record: FileRecord, elements: int, dtype: np.dtype) -> None:
        path = self.path / record.name
        try:
            found = path.stat().st_size
        except OSError as error:
            raise UserError(f"{path}: cannot be read: {error.strerror}") from None
        expected = elements * dtype.itemsize
        if found != expected or record.bytes != expected:
            raise UserError(
                f"{path}: has {found} bytes where {INDEX} has {record.bytes} ({elements} x "
                f"{dtype.itemsize}); it is truncated or replaced: make the dataset again"
            )


def _read_index(folder: Path) -> DatasetIndex:
    path = folder / INDEX
    try:
        text = path.read_text("utf-8")
    except (FileNotFoundError, NotADirectoryError):
        what = "holds no dataset.json" if folder.is_dir() else "is not a folder"
        remedy = "scripts/prepare_data.py makes one ('synthetic' needs no file)"
        if within := [str(inner.parent) for inner in sorted(folder.glob(f"*/{INDEX}"))]:
            remedy = f"name one of those in it: {', '.join(within[:5])}"
        raise UserError(f"{folder}: {what}, so it is no finished dataset; {remedy}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from None
    try:
        return DatasetIndex.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"]) or "the file"
        raise UserError(f"{path}: damaged or of another version: {key}: {first['msg']}") from None
