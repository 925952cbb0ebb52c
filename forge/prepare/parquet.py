"""Documents in Parquet files, read with pyarrow, which is an extra: `pip install 'forge[parquet]'`."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

from forge.errors import UserError

_ROWS = 1024  # of a row group, held in memory at once


def require_pyarrow(path: str) -> None:
    """UserError, with what to install, where Parquet cannot be read."""
    if find_spec("pyarrow") is None:
        raise UserError(
            f"--input {path}: reading Parquet needs pyarrow; install the extra: pip install 'forge[parquet]' "
            "(in a clone: pip install -e '.[parquet]')"
        )


def read_rows(path: str, begin: int, end: int, column: str) -> Iterator[tuple[int, Any]]:
    """(row number in the file, value of `column`) of the row groups that begin within bytes begin ... end - 1.

    A value that is not UTF-8 comes as the UnicodeDecodeError. ValueError where the file is damaged or has no such
    column, OSError where it cannot be read.
    """
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(path) as file:
        names = file.schema_arrow.names
        if column not in names:
            raise ValueError(f"no column {column!r}, only {', '.join(names)}")
        first_row = 0
        for group in range(file.num_row_groups):
            about = file.metadata.row_group(group)
            if begin <= _offset(about) < end:
                row = first_row
                for batch in file.iter_batches(_ROWS, row_groups=[group], columns=[column]):
                    for value in batch.column(0):
                        yield row, _plain(value)
                        row += 1
            first_row += about.num_rows


def _offset(group: Any) -> int:
    """Where in the file a row group begins: with the dictionary of its first column, if that has one."""
    first = group.column(0)
    return first.dictionary_page_offset if first.has_dictionary_page else first.data_page_offset


def _plain(value: Any) -> Any:
    try:
        return value.as_py()
    except UnicodeDecodeError as error:
        return error
