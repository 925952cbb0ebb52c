"""Read the documents of a piece of a corpus: text files, JSON lines, rows of Parquet."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from forge.tools.prepare.content import UNREADABLE, open_binary, open_content, skip
from forge.tools.prepare.sample import TO_THE_END, Piece

_ROWS_AT_ONCE = 1024  # Parquet rows held in memory


class Bad(NamedTuple):
    """An unreadable document. where: its file, and its line or row in the file.

    many: True if an unknown number of documents is unreadable, e.g. all in a folder or in the rest of a file.
    """

    where: str
    reason: str
    many: bool = False


class Document(str):
    """The text of a JSON line or a Parquet row. metadata: values of the line's or row's other keys, by key."""

    metadata: Mapping[str, Any]

    def __new__(cls, text: str, metadata: Mapping[str, Any]) -> Document:
        document = super().__new__(cls, text)
        document.metadata = metadata
        return document


def read_documents(piece: Piece, text_key: str, keys: Sequence[str] = ()) -> Iterator[str | Bad]:
    """Yield the documents of a piece in order, and a Bad for each unreadable document. Blank documents are left out.

    A document is the content of a text file, or the value of `text_key` in a JSON line or a Parquet row. keys: other keys
    of the line or row to keep as metadata; if given, the results are `Document`s.
    """
    read = {"text": _read_text, "lines": _read_lines, "parquet": _read_parquet}[piece.file.kind]
    for document in read(piece, text_key, keys):
        if isinstance(document, Bad) or document.strip():
            yield document


def reason_of(error: Exception) -> str:
    """Return one line that tells the user why a read failed."""
    return getattr(error, "strerror", None) or next(iter(str(error).splitlines()), type(error).__name__)


def _read_text(piece: Piece, _text_key: str, _keys: Sequence[str]) -> Iterator[str | Bad]:
    place = 0
    try:
        with open_content(piece.file) as content:
            for begin, end in piece.ranges():
                skip(content, begin - place, piece.file)
                # -1 reads to the current end of the file, because the file may have grown.
                text = content.read(-1 if piece.is_whole else end - begin)
                place = begin + len(text)
                if not piece.is_whole:
                    text, begin = whole_characters(text, begin)
                try:
                    yield text.decode("utf-8" if begin else "utf-8-sig")
                except UnicodeDecodeError as error:
                    yield Bad(piece.file.key, f"not UTF-8 at byte {begin + error.start}")
    except UNREADABLE as error:
        yield Bad(piece.file.key, reason_of(error))


def whole_characters(text: bytes, begin: int) -> tuple[bytes, int]:
    """Drop partial UTF-8 characters at both ends of `text`, which was cut from a file at byte `begin`.

    Return the remaining text and the position of its first byte in the file.
    """
    first = 0
    while begin and first < min(3, len(text)) and text[first] & 0xC0 == 0x80:
        first += 1
    end = len(text)
    for back in range(1, min(4, end - first) + 1):
        if text[end - back] & 0xC0 != 0x80:
            length = 1 + sum(text[end - back] >= least for least in (0xC0, 0xE0, 0xF0))
            return text[first : end - back if length > back else end], begin + first
    return text[first:end], begin + first


def _read_lines(piece: Piece, text_key: str, keys: Sequence[str]) -> Iterator[str | Bad]:
    place = 0  # first byte of a line
    try:
        with open_content(piece.file) as content:
            for begin, end in piece.ranges():
                if begin > place:
                    # Read from the byte before `begin` to a line end. If a line begins exactly at `begin`, this reads 1 byte.
                    skip(content, begin - 1 - place, piece.file)
                    place = begin - 1 + len(content.readline())
                while place < end and (line := content.readline()):
                    if line.strip():
                        yield _parsed(line, f"{piece.file.key}, line at byte {place}", text_key, keys)
                    place += len(line)
    except UNREADABLE as error:
        yield Bad(piece.file.key, reason_of(error), many=True)


def _parsed(line: bytes, where: str, text_key: str, keys: Sequence[str]) -> str | Bad:
    try:
        record = json.loads(line)
        text = record[text_key]
        text.encode("utf-8")  # "\ud800" is valid JSON, but not text
    except UnicodeError:
        return Bad(where, "not UTF-8")
    except (ValueError, RecursionError):
        return Bad(where, "not JSON")
    except (KeyError, TypeError, AttributeError, IndexError):
        return Bad(where, f"no text under the key {text_key!r}")
    return Document(text, {key: record[key] for key in keys if key in record}) if keys else text


def _read_parquet(piece: Piece, text_key: str, keys: Sequence[str]) -> Iterator[str | Bad]:
    import pyarrow.parquet

    try:
        with open_binary(piece.file.path) as content, pyarrow.parquet.ParquetFile(content) as file:
            names = file.schema_arrow.names
            if text_key not in names:
                raise ValueError(f"no column {text_key!r}, only {', '.join(names)}")
            wanted = _rows(piece, file.metadata.num_rows)
            first, end = next(wanted, (TO_THE_END, TO_THE_END))
            row = 0  # first row of the batch
            for group in range(file.num_row_groups):
                rows = file.metadata.row_group(group).num_rows
                if first >= row + rows:
                    row += rows
                    continue
                columns = [text_key, *(key for key in keys if key in names and key != text_key)]
                for batch in file.iter_batches(_ROWS_AT_ONCE, row_groups=[group], columns=columns):
                    values = batch.column(text_key)
                    while first < row + len(values):
                        begin, stop = first - row, min(end - row, len(values))
                        for number, value in enumerate(values[begin:stop], first):
                            found = _row_text(value, f"{piece.file.key}, row {number}", text_key)
                            if keys and not isinstance(found, Bad):
                                others = {key: batch.column(key)[number - row].as_py() for key in columns[1:]}
                                found = Document(found, others)
                            yield found
                        first = row + stop
                        if first >= end:
                            first, end = next(wanted, (TO_THE_END, TO_THE_END))
                    row += len(values)
    except (ValueError, OSError) as error:  # base classes of pyarrow's errors
        yield Bad(piece.file.key, f"not read as Parquet: {reason_of(error)}", many=True)


def _rows(piece: Piece, rows: int) -> Iterator[tuple[int, int]]:
    """Yield a range of rows (begin, end) for each of the piece's ranges of bytes, in proportion. Skip empty ranges.

    rows: number of rows in the file. Over all pieces of a file, each row is in exactly one range.
    """
    for begin, end in piece.ranges():
        first, stop = (rows * place // piece.file.size for place in (begin, end))
        if first < stop:
            yield first, stop


def _row_text(value: Any, where: str, text_key: str) -> str | Bad:
    try:
        text = value.as_py()
    except UnicodeDecodeError:
        return Bad(where, "not UTF-8")
    return text if isinstance(text, str) else Bad(where, f"no text under the key {text_key!r}")
