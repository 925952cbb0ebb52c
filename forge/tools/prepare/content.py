"""Determine the kind of a file by its name and first bytes, and open its decompressed content."""

from __future__ import annotations

import codecs
import gzip
import io
import json
import zlib
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple, cast

from forge.runtime.errors import UserError
from forge.runtime.files import is_url
from forge.runtime.remote import open_remote

FileKind = Literal["text", "lines", "parquet"]
Compression = Literal["", "gzip", "zstd"]
COMPRESSED = (".gz", ".zst", ".zstd")
_LINES = (".jsonl", ".ndjson")
_MAX_FIRST_LINE = 16 << 20  # largest number of bytes per line read to recognise JSON lines
_BLOCK = 1 << 20
# Errors of reading a damaged file, compressed or not.
UNREADABLE = (OSError, EOFError, zlib.error)


class File(NamedTuple):
    """A file of `size` bytes on disk. key: path relative to the input. kind: format of the decompressed content."""

    path: str
    key: str
    size: int
    kind: FileKind = "text"
    compression: Compression = ""

    @property
    def is_json(self) -> bool:
        """Whether the name ends in .json. The content may be a single JSON value, or JSON lines."""
        return plain_name(name_of(self.path)).endswith(".json")


def open_binary(path: str) -> io.BufferedReader:
    """Open a local file or a URL for reading."""
    return open_remote(path) if is_url(path) else open(path, "rb")


def name_of(path: str) -> str:
    """Return the path, of a URL without its query."""
    return path.partition("?")[0] if is_url(path) else path


def plain_name(path: str) -> str:
    """Return the path without a compression suffix."""
    return path[: -len(Path(path).suffix)] if path.endswith(COMPRESSED) else path


def may_hold_many(path: str) -> bool:
    """Return whether a file of this name may hold more than one document. Its content need not be readable."""
    return Path(plain_name(name_of(path))).suffix in ("", *_LINES, ".json", ".parquet")


def recognise(path: str, key: str, size: int, text_key: str) -> File:
    """Return the file with its kind and compression.

    The first bytes show whether a file is compressed or Parquet; a name that ends in .parquet also means Parquet. A file is
    JSON lines if its name ends in .jsonl or .ndjson, or if its first line is an object with `text_key`. A .json file is also
    JSON lines if each of its first two lines is an object. Other files are text.

    `read_documents` reports the error of an unreadable file, which counts as JSON lines if it may hold many documents.
    Raises UserError if a package for reading the file is missing.
    """
    name = plain_name(name_of(path))
    is_parquet = name.endswith(".parquet")
    file = File(path, key, size, "parquet" if is_parquet else "lines" if name.endswith(_LINES) else "text")
    _check_packages(file)
    try:
        with open_binary(path) as content:
            magic = content.read(4)
        if is_parquet or magic == b"PAR1":
            file = file._replace(kind="parquet")
        elif magic[:2] == b"\x1f\x8b":
            file = file._replace(compression="gzip")
        # A zstd file may begin with a skippable frame.
        elif magic == b"\x28\xb5\x2f\xfd" or (magic[1:] == b"\x2a\x4d\x18" and magic[0] >> 4 == 5):
            file = file._replace(compression="zstd")
        _check_packages(file)
        may_be_lines = file.kind == "text" and (file.compression or magic.startswith((b"{", codecs.BOM_UTF8)))
        if may_be_lines and _begins_with_lines(file, text_key):
            file = file._replace(kind="lines")
    except UNREADABLE:
        if file.kind == "text" and may_hold_many(path):
            file = file._replace(kind="lines")
    return file


def _check_packages(file: File) -> None:
    needs = "Parquet" if file.kind == "parquet" else "zstd" if file.compression == "zstd" else None
    if needs and find_spec("pyarrow") is None:
        raise UserError(
            f"--input {file.path}: reading {needs} needs pyarrow; install the extra: pip install 'forge[parquet]' "
            "(in a clone: pip install -e '.[parquet]')"
        )


def _begins_with_lines(file: File, text_key: str) -> bool:
    with open_content(file) as content:
        if not content.peek(4).removeprefix(codecs.BOM_UTF8).startswith(b"{"):
            return False
        first, second = (_object(content.readline(_MAX_FIRST_LINE)) for _ in range(2))
    return first is not None and (text_key in first or (file.is_json and second is not None))


def _object(line: bytes) -> dict | None:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def open_content(file: File, first: int | None = None) -> io.BufferedReader:
    """Open the decompressed content of a text or JSON-lines file. Reading a damaged file raises one of UNREADABLE.

    first: for a compressed file, the number of bytes on disk to read; None: all.
    """
    packed: Any = open_binary(file.path) if is_url(file.path) else file.path
    if first is not None:
        with open_binary(file.path) as content:
            packed = io.BytesIO(content.read(first))
    if file.compression == "gzip":
        return io.BufferedReader(cast(io.RawIOBase, gzip.open(packed)), _BLOCK)
    if file.compression == "zstd":
        import pyarrow

        return io.BufferedReader(pyarrow.input_stream(packed, compression="zstd"), _BLOCK)
    return open_binary(file.path)


def skip(content: BinaryIO, count: int, file: File) -> None:
    """Skip `count` bytes of decompressed content: seek in a plain file, read and discard in a compressed file."""
    if not file.compression:
        content.seek(count, io.SEEK_CUR)
        return
    while count and (block := content.read(min(count, _BLOCK))):
        count -= len(block)


def text_bytes(file: File, text_key: str) -> int:
    """Estimate the bytes of text in a file. For a compressed file, use the compression ratio of its first MiB."""
    try:
        if file.kind == "parquet":
            import pyarrow.parquet

            about = pyarrow.parquet.read_metadata(open_binary(file.path))
            column = about.schema.names.index(text_key)
            groups = (about.row_group(group).column(column) for group in range(about.num_row_groups))
            return max(1, sum(group.total_uncompressed_size for group in groups))
        if file.compression:
            first = min(file.size, _BLOCK)
            return max(1, _read_bytes(open_content(file, first)) * file.size // first)
    except (*UNREADABLE, ValueError):
        pass  # read_documents reports the error
    return file.size


def _read_bytes(content: BinaryIO) -> int:
    """Read the content to its end or to the first unreadable byte. Return the number of bytes read. Close `content`."""
    found = 0
    with content, suppress(*UNREADABLE):
        while block := content.read(1 << 16):
            found += len(block)
    return found
