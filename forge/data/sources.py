"""`Source`: a token stream with document boundaries, read from files or generated."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from forge.data.cache import BlockCache
from forge.data.format import TokenDataset
from forge.data.permutation import Permutation, key_of
from forge.data.raw import DTYPES, MappedIds, MegatronTokens, RawTokens
from forge.data.synthetic import SyntheticSource
from forge.runtime.errors import UserError
from forge.runtime.files import is_url

SYNTHETIC = "synthetic"


class Source(Protocol):
    """A stream of `tokens` tokens with random access. fingerprint: identifies the content. name: for messages."""

    name: str

    @property
    def tokens(self) -> int: ...

    @property
    def fingerprint(self) -> str: ...

    def read(self, start: int, count: int) -> np.ndarray:
        """Return tokens start ... start + count - 1: `[count]`, any integer dtype, read-only."""

    def document_ids(self, start: int, count: int) -> np.ndarray:
        """Return the document numbers of tokens start ... start + count - 1: int32 `[count]`.

        The document of token `start` has number 0, the next document has number 1, and so on.
        """


def open_source(
    path: str,
    seed: int,
    vocab_size: int,
    *,
    dtype: str | None = None,
    eos_id: int | None = None,
    cache: BlockCache | None = None,
) -> Source:
    """Open the stream at `path` and check it against the model's `vocab_size`. Raises UserError.

    path is one of:

    - "synthetic": the generated stream of `seed`.
    - a folder: a forge dataset.
    - `NAME.idx`, or `NAME` next to a local `NAME.idx`: a Megatron dataset.
    - `NAME.bin`: bare ids of type `dtype`, with documents ending in `eos_id`.

    Only bare ids use `dtype` and `eos_id`. URLs are read through `cache` (None: the default cache).
    """
    # A URL may carry a signature after its path.
    file = Path(path.partition("?")[0] if is_url(path) else path)
    if path == SYNTHETIC:
        return SyntheticSource(seed, vocab_size)
    if file.suffix == ".bin" and not file.is_dir():
        path = path if is_url(path) else str(file)
        if dtype is None:  # never guessed, because a uint16 file is also a valid uint32 file
            index = file.with_suffix(".idx")
            megatron = (
                f"; if it belongs to a Megatron dataset, name {index.name} beside it instead"
                if index.is_file()
                else ""
            )
            entries = " or ".join(f'{{path = "{path}", dtype = "{name}"}}' for name in DTYPES)
            raise UserError(f"{path}: a .bin does not record the dtype of its ids; write {entries}{megatron}")
        return RawTokens(path, dtype, vocab_size, eos_id, cache)
    if file.suffix == ".idx" or (not file.is_dir() and Path(f"{path}.idx").is_file()):
        return MegatronTokens(path, vocab_size, cache)
    return TokenDataset(path, vocab_size, cache)


def is_remote(source: Source) -> bool:
    """Return whether reading this source may wait for a remote store."""
    return isinstance(source, TokenDataset | MappedIds) and source.is_remote


def count_windows(source: Source, seq_len: int) -> int:
    """Return the number of samples of `seq_len` inputs and labels. Raises UserError if there is none."""
    windows = (source.tokens - 1) // seq_len
    if windows < 1:
        raise UserError(
            f"{source.name}: has {source.tokens} tokens, but one sequence needs train.seq_len + 1 = "
            f"{seq_len + 1}; prepare more text or lower train.seq_len"
        )
    return windows


def held_out_windows(windows: int, sequences: int) -> Sequence[int]:
    """Return the `sequences` windows that an evaluation reads, ascending.

    windows: number of windows in the source.

    A fixed permutation selects the windows, because neighbouring windows would cover only a few documents. The result
    depends only on `windows` and `sequences`, so all runs, seeds, steps and layouts read the same windows. A smaller
    evaluation reads a subset of a larger evaluation's windows.
    """
    if sequences >= windows:
        return range(windows)
    permutation = Permutation(windows, key_of("held-out windows"))
    return sorted(permutation(i) for i in range(sequences))
