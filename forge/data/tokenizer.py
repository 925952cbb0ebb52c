"""Text <-> token ids: SentencePiece models, and a byte tokenizer that needs no file."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from forge.data.writer import write_atomically
from forge.errors import UserError

BYTES = "bytes"
MODEL_FILE = "tokenizer.model"
BYTES_FILE = "tokenizer.bytes"
_ESCAPED_SPACE = "\u2581"


class Tokenizer(Protocol):
    """`vocab_size` ids; `bos_id` and `eos_id` are None where the tokenizer has none; `fingerprint` names its
    content."""

    vocab_size: int
    bos_id: int | None
    eos_id: int | None
    fingerprint: str

    def encode(self, text: str) -> list[int]:
        """Ids of the text alone, without specials; never an unknown id. UnicodeEncodeError for lone
        surrogates."""

    def decode(self, ids: Iterable[int]) -> str:
        """The text; specials and ids beyond the vocabulary are left out, broken UTF-8 becomes U+FFFD."""

    def save(self, folder: Path) -> None:
        """Writes what `load_tokenizer(folder)` needs to give this tokenizer."""


def load_tokenizer(path: str | Path) -> Tokenizer:
    """`path`: "bytes", a SentencePiece .model file, or a folder with one (see `save`)."""
    if str(path) == BYTES:
        return ByteTokenizer()
    file = Path(path)
    if file.is_dir():
        if (file / BYTES_FILE).is_file():
            return ByteTokenizer()
        file = file / MODEL_FILE
    try:
        return SentencePieceTokenizer(file.read_bytes(), str(file))
    except OSError as error:
        raise UserError(
            f"tokenizer {file}: cannot be read: {error.strerror}; scripts/train_tokenizer.py makes one, and "
            "'bytes' needs no file"
        ) from None


def enclose(ids: list[int], tokenizer: Tokenizer) -> list[int]:
    """A document as it is stored: [bos] ids [eos], each where the tokenizer has it."""
    before = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    after = [] if tokenizer.eos_id is None else [tokenizer.eos_id]
    return before + ids + after


class ByteTokenizer:
    """Ids 0 to 255 are the bytes of UTF-8, 256 begins and 257 ends a document."""

    vocab_size = 258
    bos_id: int | None = 256
    eos_id: int | None = 257
    fingerprint = hashlib.sha256(b"forge byte tokenizer 1").hexdigest()

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(i for i in ids if 0 <= i < 256).decode("utf-8", errors="replace")

    def save(self, folder: Path) -> None:
        _write(folder / BYTES_FILE, b"UTF-8 bytes; 256 begins a document, 257 ends it\n")


class SentencePieceTokenizer:
    """A SentencePiece model, given as the bytes of its file (`name` is for messages)."""

    def __init__(self, model: bytes, name: str):
        import sentencepiece  # only where it is used: neither `synthetic` nor `bytes` needs it

        self._model = model
        try:
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
            self.vocab_size: int = self._processor.vocab_size()
        except RuntimeError:
            raise UserError(f"tokenizer {name}: is not a SentencePiece model") from None
        if not self.vocab_size:
            raise UserError(f"tokenizer {name}: is not a SentencePiece model")
        self.fingerprint = hashlib.sha256(model).hexdigest()
        self.bos_id = _id_or_none(self._processor.bos_id())
        self.eos_id = _id_or_none(self._processor.eos_id())
        escaped = [self._processor.piece_to_id(f"<0x{byte:02X}>") for byte in _ESCAPED_SPACE.encode()]
        self._escaped_space = escaped if all(self._processor.is_byte(i) for i in escaped) else None

    def encode(self, text: str) -> list[int]:
        text.encode("utf-8")  # raises where SentencePiece would put other text in place of lone surrogates
        if self._escaped_space is None or _ESCAPED_SPACE not in text:
            return self._processor.encode(text)
        # SentencePiece writes spaces as U+2581, so one that is in the text goes as bytes or would come back
        # as a space.
        ids: list[int] = []
        for number, part in enumerate(text.split(_ESCAPED_SPACE)):
            ids += self._escaped_space if number else []
            ids += self._processor.encode(part)
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        return self._processor.decode([i for i in ids if 0 <= i < self.vocab_size])

    def save(self, folder: Path) -> None:
        _write(folder / MODEL_FILE, self._model)


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, content)


def _id_or_none(i: int) -> int | None:
    return None if i < 0 else i
