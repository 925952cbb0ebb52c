"""`Source`: a token stream with document boundaries, from files or synthetic."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from forge.data.cache import BlockCache
from forge.data.format import TokenDataset
from forge.data.permutation import Permutation, key_of
from forge.data.raw import DTYPES, MegatronTokens, RawTokens
from forge.data.synthetic import SyntheticSource
from forge.runtime.errors import UserError
from forge.runtime.files import is_url

SYNTHETIC = "synthetic"


class Source(Protocol):
    """`tokens` tokens with random access. fingerprint: identifies their content. name: for messages."""

    name: str

    @property
    def tokens(self) -> int: ...

    @property
    def fingerprint(self) -> str: ...

    def read(self, start: int, count: int) -> np.ndarray:
        """Return tokens start ... start + count - 1 `[count]`, any integer dtype; read-only."""

    def document_ids(self, start: int, count: int) -> np.ndarray:
        """Return the document of each of `count` tokens, int32 `[count]`.

        The first token's document is 0, the next one is 1, ...
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
    """Open the stream at `path` and check it against the model's `vocab_size`; UserError if it cannot be read.

    "synthetic": the stream of `seed`. A folder: a forge dataset. `NAME.idx`, or `NAME` next to a `NAME.idx`: a Megatron
    dataset. `NAME.bin`: bare ids of `dtype`, with documents that end with `eos_id`; the other kinds record their dtype and
    documents, and ignore both keys. A URL is read through `cache` (None: the default one); a remote Megatron dataset is named
    by its `.idx`.
    """
    # A URL may carry a signature after its path.
    file = Path(path.partition("?")[0] if is_url(path) else path)
    if path == SYNTHETIC:
        return SyntheticSource(seed, vocab_size)
    if file.suffix == ".bin" and not file.is_dir():
        path = path if is_url(path) else str(file)
        if dtype is None:  # never guessed: a file of uint16 is also a valid file of uint32
            index = file.with_suffix(".idx")
            megatron = (
                f"; beside it is {index.name}: for a Megatron dataset name that file"
                if index.is_file()
                else ""
            )
            entries = " or ".join(f'{{path = "{path}", dtype = "{name}"}}' for name in DTYPES)
            raise UserError(f"{path}: a .bin does not record the dtype of its ids; write {entries}{megatron}")
        return RawTokens(path, dtype, vocab_size, eos_id, cache)
    if file.suffix == ".idx" or (not file.is_dir() and Path(f"{path}.idx").is_file()):
        return MegatronTokens(path, vocab_size, cache)
    return TokenDataset(path, vocab_size, cache)


def count_windows(source: Source, seq_len: int) -> int:
    """Return the number of samples of `seq_len` inputs and labels; UserError if there is none."""
    windows = (source.tokens - 1) // seq_len
    if windows < 1:
        raise UserError(
            f"{source.name}: has {source.tokens} tokens, but one sequence needs train.seq_len + 1 = "
            f"{seq_len + 1}; prepare more text or lower train.seq_len"
        )
    return windows


def held_out_windows(windows: int, sequences: int) -> Sequence[int]:
    """Return the windows that an evaluation of `sequences` sequences reads, ascending.

    windows: number of windows in the source.

    One fixed permutation selects them, because neighbouring windows would cover only a few documents. The result depends on
    `windows` and `sequences` alone, so all runs, seeds, steps and layouts read the same windows. A smaller evaluation reads
    a subset of a larger one's windows.
    """
    if sequences >= windows:
        return range(windows)
    permutation = Permutation(windows, key_of("held-out windows"))
    return sorted(permutation(i) for i in range(sequences))
