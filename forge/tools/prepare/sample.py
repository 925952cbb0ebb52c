"""Sample a corpus: divide a budget of bytes among all files. From a large file, take ranges spread over its length."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from forge.tools.prepare.content import File, text_bytes

TO_THE_END = sys.maxsize
# Smallest and largest number of bytes in a range. Within these limits, a range has 1/1024 of the budget `max_bytes`.
_SHORTEST, _LONGEST = 4096, 1 << 20
# A compressed file can be read only from its start. Its ranges are spread over its first bytes: _REACH times its share of the
# budget, at least _LEAST_REACH bytes.
_REACH, _LEAST_REACH = 16, 16 << 20


class Piece(NamedTuple):
    """Ranges of a file's decompressed content: the first `take` of every `step` bytes, from byte `begin` to `end` - 1.

    With step 0, there is one range, from `begin` to `end` - 1.

    A JSON line belongs to the range with its first byte. Rows of Parquet are assigned to ranges in proportion to the bytes
    of the file. Each range of a text file is a document.
    """

    file: File
    begin: int = 0
    end: int = TO_THE_END
    take: int = 0
    step: int = 0

    @property
    def size(self) -> int:
        """The number of decompressed bytes in the ranges; for a whole compressed file, its bytes on disk."""
        if self.step:
            return sum(end - begin for begin, end in self.ranges())
        return self.file.size if self.end == TO_THE_END else self.end - self.begin

    @property
    def is_whole(self) -> bool:
        return not self.begin and not self.step and self.end in (self.file.size, TO_THE_END)

    def ranges(self) -> Iterator[tuple[int, int]]:
        """Yield (begin, end) of each range, in ascending order."""
        if not self.step:
            yield self.begin, self.end
            return
        for begin in range(self.begin, self.end, self.step):
            yield begin, min(begin + self.take, self.end)

    def parts(self, size: int) -> Iterator[Piece]:
        """Divide the piece into pieces of up to `size` bytes, with at least one range each.

        Together, these pieces have all documents of this piece.
        """
        span = self.step * max(1, size // self.take) if self.step else size
        for begin in range(self.begin, self.end, span):
            yield self._replace(begin=begin, end=min(begin + span, self.end))


def whole(file: File) -> Piece:
    """Return the piece with all bytes of the file."""
    return Piece(file, end=TO_THE_END if file.compression else file.size)


def sample(files: Sequence[File], max_bytes: int, text_key: str) -> tuple[list[Piece], int, int]:
    """Sample about `max_bytes` of text from the files, every byte with equal probability.

    Return the pieces in the order of `files`, the size of the pieces, and the size of all files. Sizes are estimated bytes
    of text.

    Small files, no larger than one range, have a share of `max_bytes` in proportion to their total size. Each is taken whole
    if it fits in the rest of this share, in the order of a hash of their keys. Larger files divide the rest of `max_bytes`
    in proportion to their sizes, as evenly spaced ranges. The sample depends only on keys, sizes and content.
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
    """Return the piece with `count` evenly spread ranges of `take` bytes each. size: bytes of text in the file."""
    if file.compression:
        size = min(size, max(_REACH * count * take, _LEAST_REACH))
    elif file.kind == "parquet":  # ranges are in bytes on disk, not in bytes of text
        size, take = file.size, max(1, take * file.size // size)
    step = size // count
    if step <= take:
        return whole(file)
    begin = (step - take) // 2
    return Piece(file, begin, begin + (count - 1) * step + take, take, step)
