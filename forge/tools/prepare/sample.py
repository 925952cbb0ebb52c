"""A sample of a corpus: a budget of bytes shared over all files. From large files it takes ranges spread over the file."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from forge.tools.prepare.content import File, text_bytes

TO_THE_END = sys.maxsize
# Bytes of a range: a thousandth of the budget, within these limits.
_SHORTEST, _LONGEST = 4096, 1 << 20
# A compressed file must be read from its start. Its ranges are spread over its first bytes only: this many times its share
# of the budget, or at least these bytes.
_REACH, _LEAST_REACH = 16, 16 << 20


class Piece(NamedTuple):
    """A part of a file's decompressed content: within bytes begin ... end - 1, the first `take` of every `step` bytes.

    step 0: all these bytes.

    A JSON line belongs to the range in which it begins, a Parquet row to the range with its share of the file. Each range
    of a text file is a document.
    """

    file: File
    begin: int = 0
    end: int = TO_THE_END
    take: int = 0
    step: int = 0

    @property
    def size(self) -> int:
        """The number of bytes to read; for a whole compressed file, its bytes on disk."""
        if self.step:
            return sum(end - begin for begin, end in self.ranges())
        return self.file.size if self.end == TO_THE_END else self.end - self.begin

    @property
    def is_whole(self) -> bool:
        return not self.begin and not self.step and self.end in (self.file.size, TO_THE_END)

    def ranges(self) -> Iterator[tuple[int, int]]:
        """Yield (begin, end), ascending."""
        if not self.step:
            yield self.begin, self.end
            return
        for begin in range(self.begin, self.end, self.step):
            yield begin, min(begin + self.take, self.end)

    def parts(self, size: int) -> Iterator[Piece]:
        """Yield pieces of at most `size` bytes, but at least one range each. Together they have the same documents."""
        span = self.step * max(1, size // self.take) if self.step else size
        for begin in range(self.begin, self.end, span):
            yield self._replace(begin=begin, end=min(begin + span, self.end))


def whole(file: File) -> Piece:
    """Return the whole file as one piece."""
    return Piece(file, end=TO_THE_END if file.compression else file.size)


def sample(files: Sequence[File], max_bytes: int, text_key: str) -> tuple[list[Piece], int, int]:
    """Take about `max_bytes` of the text of the files, in their order. Every byte has the same chance.

    Returns the pieces, their size and the size of all files, both in bytes of text; see `text_bytes`.

    A file that is not larger than one range is taken whole or not at all, in the order of a hash of the keys. Larger files
    share the rest of the budget in proportion to their size, in ranges at equal distances. The sample depends only on keys,
    sizes and content.
    """
    sizes = [text_bytes(file, text_key) for file in files]
    found = sum(sizes)
    if found <= max_bytes:
        return [whole(file) for file in files], found, found
    take = max_bytes // max(1, round(max_bytes / min(max(max_bytes >> 10, _SHORTEST), _LONGEST)))
    order = sorted(
        range(len(files)), key=lambda number: hashlib.sha256(os.fsencode(files[number].key)).digest()
    )
    small = [number for number in order if sizes[number] <= take]
    large = [number for number in order if sizes[number] > take]
    room = max_bytes * sum(sizes[number] for number in small) // found
    kept, taken = {}, 0
    for number in small:
        if sizes[number] <= room:
            kept[number] = whole(files[number])
            room -= sizes[number]
            taken += sizes[number]
    rest, each, owed = max_bytes - taken, take * sum(sizes[number] for number in large), 0
    for number in large:
        owed += sizes[number] * rest
        count, owed = divmod(owed, each)
        if count:
            kept[number] = _spread(files[number], sizes[number], count, take)
            taken += min(count * take, sizes[number])
    return [kept[number] for number in sorted(kept)], taken, found


def _spread(file: File, size: int, count: int, take: int) -> Piece:
    """Return `count` evenly spread ranges of `take` bytes each, in a text of `size` bytes."""
    if file.compression:
        size = min(size, max(_REACH * count * take, _LEAST_REACH))
    elif file.kind == "parquet":  # its ranges are shares of the file
        size, take = file.size, max(1, take * file.size // size)
    step = size // count
    if step <= take:
        return whole(file)
    begin = (step - take) // 2
    return Piece(file, begin, begin + (count - 1) * step + take, take, step)
