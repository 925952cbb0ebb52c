"""The text, JSONL and Parquet files under some paths, in an order that every machine agrees on, and the
documents in them."""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from forge.errors import UserError
from forge.prepare.parquet import read_rows, require_pyarrow

EXTENSIONS = (".txt", ".md", ".py", ".rst", ".jsonl", ".parquet")
JSONL = ".jsonl"
PARQUET = ".parquet"


class Piece(NamedTuple):
    """Bytes begin ... end - 1 of a file. `key` is its path below the input that led to it; only files
    of many documents are ever cut.

    A line of JSONL and a row group of Parquet belong to the piece in which they begin.
    """

    path: str
    key: str
    begin: int
    end: int

    @property
    def size(self) -> int:
        return self.end - self.begin

    @property
    def is_jsonl(self) -> bool:
        return self.path.endswith(JSONL)

    @property
    def is_parquet(self) -> bool:
        return self.path.endswith(PARQUET)

    @property
    def holds_many(self) -> bool:
        """Documents, that is; a text file is one."""
        return self.is_jsonl or self.is_parquet


class Bad(NamedTuple):
    """A document that could not be had, or `many`: a folder, or the rest of a file of many documents."""

    where: str
    reason: str
    many: bool = False


@dataclass(frozen=True)
class Corpus:
    """Whole files (or their beginnings, under a budget) in the order of the inputs and, below each, of their paths."""

    files: list[Piece]
    unreadable: list[Bad] = field(default_factory=list)
    duplicates: int = 0

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)


def find_corpus(
    inputs: Sequence[str | Path], extensions: Sequence[str] = EXTENSIONS, max_bytes: int | None = None
) -> Corpus:
    """All files below `inputs`, without copies, down to `max_bytes`. UserError where an input is missing or nothing is
    found.

    Directories are walked (hidden ones, __pycache__ and links to directories are passed over) for files with one of the
    `extensions`; a file named as an input is taken whatever its name. Of text files with the same content, and of
    several paths to one file, only the first stays. A budget is filled in the order of a hash of the keys, so the files
    kept are a fair sample that is the same on every machine and grows with the budget.
    """
    corpus = _drop_copies(_list_files(inputs, extensions))
    for file in corpus.files:
        if file.is_parquet:
            require_pyarrow(file.path)
            break
    if max_bytes is not None:
        corpus = replace(corpus, files=_sample(corpus.files, max_bytes))
    if not corpus.files:
        budget = "" if max_bytes is None else f" within --max-bytes {max_bytes}"
        tried = f"; {len(corpus.unreadable)} are unreadable" if corpus.unreadable else ""
        raise UserError(
            f"--input {' '.join(map(str, inputs))}: no file with text{budget} ({', '.join(extensions)})"
            f"{tried}"
        )
    return corpus


def read_documents(piece: Piece, text_key: str) -> Iterator[str | Bad]:
    """The documents of a piece in order: a text file's content, `text_key` of a JSON line or a Parquet row. Blank
    ones are left out."""
    if piece.is_parquet:
        yield from _read_parquet(piece, text_key)
        return
    try:
        with open(piece.path, "rb") as file:
            if not piece.is_jsonl:
                yield from _decoded(file.read(), piece.key)
                return
            # From one byte before: a line that begins exactly at `begin` must not be taken for the rest of
            # another.
            file.seek(max(0, piece.begin - 1))
            if piece.begin:
                file.readline()
            while (offset := file.tell()) < piece.end and (line := file.readline()):
                yield from _parsed(line, f"{piece.key}, line at byte {offset}", text_key)
    except OSError as error:
        yield Bad(piece.key, error.strerror or str(error), many=piece.is_jsonl)


def _read_parquet(piece: Piece, text_key: str) -> Iterator[str | Bad]:
    try:
        for row, value in read_rows(piece.path, piece.begin, piece.end, text_key):
            if isinstance(value, UnicodeDecodeError):
                yield Bad(f"{piece.key}, row {row}", "not UTF-8")
            elif not isinstance(value, str):
                yield Bad(f"{piece.key}, row {row}", f"no text under the key {text_key!r}")
            elif value.strip():
                yield value
    except (ValueError, OSError) as error:  # pyarrow's own errors are of these kinds
        yield Bad(piece.key, f"not read as Parquet: {str(error).splitlines()[0]}", many=True)


def _decoded(data: bytes, where: str) -> Iterator[str | Bad]:
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        yield Bad(where, f"not UTF-8 at byte {error.start}")
        return
    if text.strip():
        yield text


def _parsed(line: bytes, where: str, text_key: str) -> Iterator[str | Bad]:
    if not line.strip():
        return
    try:
        value = json.loads(line)
        text = value[text_key]
        text.encode("utf-8")  # "\ud800" is JSON, and no text
    except UnicodeError:
        yield Bad(where, "not UTF-8")
    except (ValueError, RecursionError):
        yield Bad(where, "not JSON")
    except (KeyError, TypeError, AttributeError, IndexError):
        yield Bad(where, f"no text under the key {text_key!r}")
    else:
        if text.strip():
            yield text


def _list_files(inputs: Sequence[str | Path], extensions: Sequence[str]) -> Corpus:
    files: list[Piece] = []
    unreadable: list[Bad] = []
    seen: set[str] = set()
    for given in inputs:
        root = Path(given)
        if not root.exists():
            raise UserError(f"--input {given}: no such file or directory")
        if not os.access(root, os.R_OK):
            raise UserError(f"--input {given}: cannot be read (permission denied)")
        below = [(str(root), root.name)] if root.is_file() else _walk(root, tuple(extensions), unreadable)
        for path, key in below:
            real = os.path.realpath(path)
            if real in seen:
                continue
            seen.add(real)
            try:
                status = os.stat(real)
            except OSError as error:  # a link that leads nowhere
                unreadable.append(Bad(key, error.strerror or str(error)))
                continue
            if stat.S_ISREG(status.st_mode) and status.st_size:
                files.append(Piece(path, key, 0, status.st_size))
    return Corpus(files, unreadable)


def _walk(root: Path, extensions: tuple[str, ...], unreadable: list[Bad]) -> list[tuple[str, str]]:
    def failed(error: OSError) -> None:
        unreadable.append(Bad(str(error.filename), error.strerror or str(error), many=True))

    found = []
    for folder, folders, names in os.walk(root, onerror=failed):
        folders[:] = [name for name in folders if not name.startswith(".") and name != "__pycache__"]
        for name in names:
            if name.endswith(extensions):
                path = os.path.join(folder, name)
                found.append((path, Path(path).relative_to(root).as_posix()))
    return sorted(found, key=lambda path_and_key: path_and_key[1])


def _drop_copies(corpus: Corpus) -> Corpus:
    """Without text files whose content came before. Only files of equal size are read."""
    sizes = Counter(file.size for file in corpus.files if not file.holds_many)
    files, seen = [], set()
    for file in corpus.files:
        if not file.holds_many and sizes[file.size] > 1:
            try:
                with open(file.path, "rb") as content:
                    digest = hashlib.file_digest(content, "sha256").digest()
            except OSError:
                digest = file.path.encode()  # told when its document is read
            if digest in seen:
                continue
            seen.add(digest)
        files.append(file)
    return replace(corpus, files=files, duplicates=len(corpus.files) - len(files))


def _sample(files: list[Piece], max_bytes: int) -> list[Piece]:
    """Files in the order of their keys' hashes while they fit; JSONL and Parquet are cut to what fits, a text
    file passed over."""

    def hashed(number: int) -> bytes:
        return hashlib.sha256(os.fsencode(files[number].key)).digest()

    kept = {}
    for number in sorted(range(len(files)), key=hashed):
        file = files[number]
        size = min(file.size, max_bytes) if file.holds_many else file.size
        if 0 < size <= max_bytes:
            kept[number] = file._replace(end=size)
            max_bytes -= size
    return [kept[number] for number in sorted(kept)]
