"""Find text, JSONL and Parquet files, in an order that is the same on every machine, and read the documents in them."""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from forge.errors import UserError

EXTENSIONS = (".txt", ".md", ".py", ".rst", ".jsonl", ".parquet")
_ROWS_AT_ONCE = 1024  # of a Parquet row group, held in memory


class Piece(NamedTuple):
    """Bytes begin ... end - 1 of a file. `key` is its path below the input; only multi-document files are ever cut.

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
    def is_parquet(self) -> bool:
        return self.path.endswith(".parquet")

    @property
    def has_many_documents(self) -> bool:
        """Whether it is JSONL or Parquet; a text file is one document."""
        return self.path.endswith(".jsonl") or self.is_parquet


class Bad(NamedTuple):
    """An unreadable document; `many`: an unreadable folder, or the rest of a multi-document file."""

    where: str
    reason: str
    many: bool = False


@dataclass(frozen=True)
class Corpus:
    """Files in the order of the inputs and, below each, of their paths; the last of a byte budget may be cut."""

    files: list[Piece]
    unreadable: list[Bad] = field(default_factory=list)
    duplicates: int = 0

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)


def find_corpus(
    inputs: Sequence[str | Path], extensions: Sequence[str] = EXTENSIONS, max_bytes: int | None = None
) -> Corpus:
    """Find all files below `inputs`, without copies, up to `max_bytes`.

    Directories are walked (hidden ones, __pycache__ and links to directories are skipped) for files with one of the
    `extensions`; a file named as an input is included whatever its name. Of text files with equal content, and of
    several paths to one file, only the first is kept. A budget is filled in the order of a hash of the keys, so the files
    kept are a fair sample that is the same on every machine and grows with the budget.

    Raises UserError where an input is missing, nothing is found, or Parquet is found and pyarrow is not installed.
    """
    corpus = _drop_copies(_list_files(inputs, extensions))
    parquet = next((file.path for file in corpus.files if file.is_parquet), None)
    if parquet is not None and find_spec("pyarrow") is None:
        raise UserError(
            f"--input {parquet}: reading Parquet needs pyarrow; install the extra: pip install 'forge[parquet]' "
            "(in a clone: pip install -e '.[parquet]')"
        )
    if max_bytes is not None:
        corpus = replace(corpus, files=_sample(corpus.files, max_bytes))
    if not corpus.files:
        budget = "" if max_bytes is None else f" within --max-bytes {max_bytes}"
        tried = f"; {len(corpus.unreadable)} are unreadable" if corpus.unreadable else ""
        raise UserError(
            f"--input {' '.join(map(str, inputs))}: no file with text{budget} ({', '.join(extensions)}){tried}"
        )
    return corpus


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
            except OSError as error:  # a dangling link
                unreadable.append(Bad(key, error.strerror or str(error)))
                continue
            if stat.S_ISREG(status.st_mode) and status.st_size:
                files.append(Piece(path, key, 0, status.st_size))
    return Corpus(files, unreadable)


def _walk(root: Path, extensions: tuple[str, ...], unreadable: list[Bad]) -> list[tuple[str, str]]:
    """Paths below `root` with their keys, sorted by key."""

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
    """Drop text files with the content of an earlier one. Only files of equal size are read."""
    sizes = Counter(file.size for file in corpus.files if not file.has_many_documents)
    files, seen = [], set()
    for file in corpus.files:
        if not file.has_many_documents and sizes[file.size] > 1:
            try:
                with open(file.path, "rb") as content:
                    digest = hashlib.file_digest(content, "sha256").digest()
            except OSError:
                digest = file.path.encode()  # reported when its document is read
            if digest in seen:
                continue
            seen.add(digest)
        files.append(file)
    return replace(corpus, files=files, duplicates=len(corpus.files) - len(files))


def _sample(files: list[Piece], max_bytes: int) -> list[Piece]:
    """Take files in the order of their keys' hashes while they fit; JSONL and Parquet are cut to what fits."""

    def hashed(number: int) -> bytes:
        return hashlib.sha256(os.fsencode(files[number].key)).digest()

    kept = {}
    for number in sorted(range(len(files)), key=hashed):
        file = files[number]
        size = min(file.size, max_bytes) if file.has_many_documents else file.size
        if 0 < size <= max_bytes:
            kept[number] = file._replace(end=size)
            max_bytes -= size
    return [kept[number] for number in sorted(kept)]


def read_documents(piece: Piece, text_key: str) -> Iterator[str | Bad]:
    """Yield the documents of a piece in order: a text file's content, `text_key` of a JSON line or a Parquet row.

    Blank documents are left out.
    """
    read = _read_parquet if piece.is_parquet else _read_jsonl if piece.has_many_documents else _read_text
    for document in read(piece, text_key):
        if isinstance(document, Bad) or document.strip():
            yield document


def _read_text(piece: Piece, _text_key: str) -> Iterator[str | Bad]:
    try:
        yield Path(piece.path).read_bytes().decode("utf-8-sig")
    except OSError as error:
        yield Bad(piece.key, error.strerror or str(error))
    except UnicodeDecodeError as error:
        yield Bad(piece.key, f"not UTF-8 at byte {error.start}")


def _read_jsonl(piece: Piece, text_key: str) -> Iterator[str | Bad]:
    try:
        with open(piece.path, "rb") as file:
            # Seek to one byte before `begin`: a line that begins exactly there is not the rest of another.
            file.seek(max(0, piece.begin - 1))
            if piece.begin:
                file.readline()
            while (offset := file.tell()) < piece.end and (line := file.readline()):
                if line.strip():
                    yield _parsed(line, f"{piece.key}, line at byte {offset}", text_key)
    except OSError as error:
        yield Bad(piece.key, error.strerror or str(error), many=True)


def _parsed(line: bytes, where: str, text_key: str) -> str | Bad:
    try:
        text = json.loads(line)[text_key]
        text.encode("utf-8")  # "\ud800" is valid JSON, but not text
    except UnicodeError:
        return Bad(where, "not UTF-8")
    except (ValueError, RecursionError):
        return Bad(where, "not JSON")
    except (KeyError, TypeError, AttributeError, IndexError):
        return Bad(where, f"no text under the key {text_key!r}")
    return text


def _read_parquet(piece: Piece, text_key: str) -> Iterator[str | Bad]:
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(piece.path) as file:
            names = file.schema_arrow.names
            if text_key not in names:
                raise ValueError(f"no column {text_key!r}, only {', '.join(names)}")
            first_row = 0
            for group in range(file.num_row_groups):
                about = file.metadata.row_group(group)
                first = about.column(0)  # the group begins with this column's dictionary, if it has one
                offset = first.dictionary_page_offset if first.has_dictionary_page else first.data_page_offset
                if piece.begin <= offset < piece.end:
                    batches = file.iter_batches(_ROWS_AT_ONCE, row_groups=[group], columns=[text_key])
                    values = (value for batch in batches for value in batch.column(0))
                    for row, value in enumerate(values, first_row):
                        yield _row_text(value, f"{piece.key}, row {row}", text_key)
                first_row += about.num_rows
    except (ValueError, OSError) as error:  # the classes of pyarrow's own errors
        yield Bad(piece.key, f"not read as Parquet: {str(error).splitlines()[0]}", many=True)


def _row_text(value: Any, where: str, text_key: str) -> str | Bad:
    try:
        text = value.as_py()
    except UnicodeDecodeError:
        return Bad(where, "not UTF-8")
    return text if isinstance(text, str) else Bad(where, f"no text under the key {text_key!r}")
