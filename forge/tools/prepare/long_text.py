"""Tokenize a long text in parts, in constant memory.

A cut is allowed only where it leaves the ids unchanged: the ids of the parts, joined, are the ids of the whole text.

A text file is one document. Several workers may tokenize parts of a large file. A cut depends only on the text around it,
so two workers with neighbouring parts agree on the cut between them.
"""

from __future__ import annotations

import codecs
import hashlib
from collections.abc import Iterator
from typing import BinaryIO, NamedTuple

from forge.data.tokenizer import Tokenizer
from forge.runtime.errors import FAILED, UserError
from forge.tools.prepare.content import File, open_binary
from forge.tools.prepare.documents import Bad, reason_of, whole_characters

_AT_ONCE = 1 << 18  # characters or bytes per call of the tokenizer, the fastest size
_WINDOW = 1 << 14  # bytes read at a time to find a cut
_BLOCK = 1 << 20


class TextPart(NamedTuple):
    """Bytes `begin` to `end` - 1 of a text file. The whole file is one document of the split `split`.

    `read_part` moves both ends forward to the next position where a cut leaves the token ids unchanged.
    """

    file: File
    begin: int
    end: int
    split: str

    @property
    def size(self) -> int:
        return self.end - self.begin

    @property
    def is_first(self) -> bool:
        return self.begin == 0

    @property
    def is_last(self) -> bool:
        return self.end == self.file.size


def text_parts(file: File, size: int, split: str) -> Iterator[TextPart]:
    """Yield the parts of a file: `size` bytes each, the last part shorter. All parts belong to the split `split`."""
    for begin in range(0, file.size, size):
        yield TextPart(file, begin, min(begin + size, file.size), split)


def digest_of(text: bytes) -> bytes:
    """Return the 8-byte digest of a document, which decides its split (`split_of`)."""
    return _digest(text).digest()


def _digest(text: bytes = b"") -> hashlib.blake2b:
    return hashlib.blake2b(text, digest_size=8, person=b"holdout")


def check_text(file: File) -> bytes | Bad:
    """Read a text file and return its digest, or a Bad if the file is unreadable or not UTF-8."""
    digest, decoder, place = _digest(), codecs.getincrementaldecoder("utf-8")(), 0
    try:
        with open_binary(file.path) as content:
            while block := content.read(_BLOCK):
                digest.update(block.removeprefix(codecs.BOM_UTF8) if not place else block)
                waiting = len(decoder.getstate()[0])
                try:
                    decoder.decode(block)
                except UnicodeDecodeError as error:
                    return Bad(file.key, f"not UTF-8 at byte {place - waiting + error.start}")
                place += len(block)
    except OSError as error:
        return Bad(file.key, reason_of(error))
    if waiting := len(decoder.getstate()[0]):
        return Bad(file.key, f"not UTF-8 at byte {place - waiting}")
    return digest.digest()


def read_part(part: TextPart, tokenizer: Tokenizer) -> Iterator[str]:
    """Yield the part as texts of limited size. Their ids, in order, are the ids of the part.

    A part begins at its first allowed cut; the part before yields the text up to this cut. A part without an allowed cut
    yields nothing. Raises UserError (exit 1) if the file has changed since `check_text`.
    """
    file = part.file
    with open_binary(file.path) as content:
        try:
            begin, end = (_find_cut(content, place, file.size, tokenizer) for place in (part.begin, part.end))
            while begin < end:
                stop = min(_find_cut(content, begin + _AT_ONCE, file.size, tokenizer), end)
                content.seek(begin)
                data = content.read(stop - begin)
                if len(data) < stop - begin:
                    raise EOFError
                yield data.decode("utf-8" if begin else "utf-8-sig")
                begin = stop
        except (EOFError, UnicodeDecodeError):
            message = f"{file.key}: has changed while it was read; run the same command again"
            raise UserError(message, FAILED) from None


def _find_cut(content: BinaryIO, place: int, size: int, tokenizer: Tokenizer) -> int:
    """Return the first position, at byte `place` or later, at which a cut leaves the text's ids unchanged.

    The positions 0 and `size`, the ends of the text, always qualify. Raises EOFError if the file is shorter.
    """
    while 0 < place < size:
        begin = max(0, place - 8)  # begin early enough for a whole character before `place`
        content.seek(begin)
        data = content.read(_WINDOW)
        if len(data) < min(_WINDOW, size - begin):
            raise EOFError
        data, begin = whole_characters(data, begin)
        text = data.decode()
        before = len(data[: place - begin].decode(errors="ignore"))
        cut = tokenizer.cut(text, before)
        place = begin + len(text[:cut].encode())
        if cut < len(text):
            return place
    return min(place, size)


def slices(text: str, tokenizer: Tokenizer) -> Iterator[str]:
    """Yield the parts of a text, of about _AT_ONCE characters. Their ids, joined, are the ids of the whole text."""
    begin = 0
    while tokenizer.can_cut and begin + _AT_ONCE < len(text):
        end = tokenizer.cut(text, begin + _AT_ONCE)
        yield text[begin:end]
        begin = end
    yield text[begin:]
