"""Text <-> token ids: SentencePiece models, Hugging Face's tokenizer.json, and a byte tokenizer without a file."""

from __future__ import annotations

import hashlib
import json
import os
import re
import unicodedata
from collections.abc import Iterable
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

from forge.runtime.errors import UserError
from forge.runtime.files import read_json, replace_atomically

BYTES = "bytes"
MODEL_FILE = "tokenizer.model"
BYTES_FILE = "tokenizer.bytes"
JSON_FILE = "tokenizer.json"
# Files next to a tokenizer.json. They name the tokens that begin and end a text.
SETTINGS_FILES = ("tokenizer_config.json", "special_tokens_map.json")
# Without settings, a document ends with the first of these tokens listed as special in tokenizer.json.
USUAL_ENDS = ("</s>", "<|endoftext|>", "<|end_of_text|>", "<eos>", "[EOS]")
_ESCAPED_SPACE = "\u2581"
_BEFORE_SPACE = re.compile(r"[^\W_](?=[ \n])")
# Split patterns of byte-level tokenizers: GPT-2, Llama 3, Qwen and GPT-4o.
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_REST = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_PATTERNS = (
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_REST}",
    rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_REST}",
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_ENDINGS}?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_ENDINGS}?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_REST}",
)


class Tokenizer(Protocol):
    """A tokenizer with `vocab_size` ids.

    bos_id, eos_id: ids of the begin and end token; None if there is none. unk_id: the id for text outside the
    vocabulary; None if the vocabulary covers every text. fingerprint: identifies the tokenizer's content.
    """

    vocab_size: int
    bos_id: int | None
    eos_id: int | None
    unk_id: int | None
    fingerprint: str

    @property
    def can_cut(self) -> bool:
        """Return whether `cut` usually finds a position in ordinary text."""

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`, without special tokens. Raises UnicodeEncodeError for lone surrogates."""

    def cut(self, text: str, start: int) -> int:
        """Return the first position i >= max(start, 1) that cuts `text` into two parts that can be encoded separately.

        A cut there is also valid for every text that contains `text`: encode(x + y) == encode(x) + encode(y) if x ends with
        text[:i] and y begins with text[i:]. Return len(text) if no position is known.
        """

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of `ids`, without special tokens and ids beyond the vocabulary. Invalid UTF-8 becomes U+FFFD."""

    def save(self, folder: Path) -> None:
        """Write the files needed by `load_tokenizer(folder)`."""


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Load "bytes", a SentencePiece .model file, a tokenizer.json, or a folder with a tokenizer's files (see `save`).

    In a folder, tokenizer.json takes precedence over a SentencePiece model, because tokenizer.json also has tokens
    added later. Raises UserError, naming the file and its problem.
    """
    if str(path) == BYTES:
        return ByteTokenizer()
    file = Path(path)
    try:
        if file.is_dir():
            if (file / BYTES_FILE).is_file():
                return ByteTokenizer()
            found = [file / name for name in (JSON_FILE, MODEL_FILE) if (file / name).is_file()]
            if not found:
                raise UserError(
                    f"tokenizer {file}: the folder has no {JSON_FILE} and no {MODEL_FILE}; make a tokenizer with "
                    "scripts/train_tokenizer.py, or use 'bytes', which needs no file"
                )
            file = found[0]
        content = file.read_bytes()
        if file.suffix != ".json":
            return SentencePieceTokenizer(content, str(file))
        settings = [file.parent / name for name in SETTINGS_FILES]
        beside = {path.name: path.read_bytes() for path in settings if path.is_file()}
        return HuggingFaceTokenizer({JSON_FILE: content} | beside, str(file))
    except OSError as error:
        raise UserError(
            f"tokenizer {file}: cannot be read: {error.strerror}; make a tokenizer with scripts/train_tokenizer.py, "
            "or use 'bytes', which needs no file"
        ) from None


def begin_text(ids: list[int], tokenizer: Tokenizer) -> list[int]:
    """Return the ids of a text at the start of a document: [bos] + ids, or `ids` if the tokenizer has no bos.

    Without bos, an empty text becomes [eos], the token that ends the previous document. Raises UserError for an empty text
    if the tokenizer has neither bos nor eos.
    """
    if tokenizer.bos_id is not None:
        return [tokenizer.bos_id, *ids]
    if not ids and tokenizer.eos_id is None:
        raise UserError(
            "the tokenizer has no token that begins or ends a document, so a text cannot be empty"
        )
    return ids or [tokenizer.eos_id]  # type: ignore[list-item]


class ByteTokenizer:
    """A tokenizer without a file: ids 0 to 255 are UTF-8 bytes, 256 begins and 257 ends a document."""

    vocab_size = 258
    bos_id: int | None = 256
    eos_id: int | None = 257
    unk_id: int | None = None
    fingerprint = hashlib.sha256(b"forge byte tokenizer 1").hexdigest()
    can_cut = True

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def cut(self, text: str, start: int) -> int:
        return min(max(start, 1), len(text))

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(i for i in ids if 0 <= i < 256).decode("utf-8", errors="replace")

    def save(self, folder: Path) -> None:
        _write(folder / BYTES_FILE, b"UTF-8 bytes; 256 begins a document, 257 ends it\n")


class SentencePieceTokenizer:
    """A SentencePiece model, given as the bytes of its file. name: for messages."""

    def __init__(self, model: bytes, name: str):
        import sentencepiece  # only on use: neither `synthetic` nor `bytes` needs it

        self._model = model
        try:
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
            self.vocab_size: int = self._processor.vocab_size()
        except RuntimeError:
            self.vocab_size = 0
        if not self.vocab_size:
            raise UserError(f"tokenizer {name}: is not a SentencePiece model")
        self.fingerprint = hashlib.sha256(model).hexdigest()
        ends = self._processor.bos_id(), self._processor.eos_id()
        self.bos_id, self.eos_id = (None if end < 0 else end for end in ends)
        has_bytes = self._processor.is_byte(self._processor.piece_to_id("<0x00>"))
        self.unk_id = None if has_bytes else self._processor.unk_id()
        escaped = [self._processor.piece_to_id(f"<0x{byte:02X}>") for byte in _ESCAPED_SPACE.encode()]
        self._escaped_space = escaped if all(self._processor.is_byte(i) for i in escaped) else None

    def id_of(self, piece: str) -> int:
        """Return the id of `piece`; the id of the unknown piece if there is none."""
        return self._processor.piece_to_id(piece)

    def encode(self, text: str) -> list[int]:
        text.encode("utf-8")  # raises for lone surrogates, which SentencePiece would replace
        if self._escaped_space is None or _ESCAPED_SPACE not in text:
            return self._processor.encode(text)
        # SentencePiece writes spaces as U+2581. So U+2581 in the text is encoded as bytes; otherwise it would decode to
        # a space.
        ids: list[int] = []
        for number, part in enumerate(text.split(_ESCAPED_SPACE)):
            ids += self._escaped_space if number else []
            ids += self._processor.encode(part)
        return ids

    @property
    def can_cut(self) -> bool:
        return self._joined is not None

    def cut(self, text: str, start: int) -> int:
        if self._joined is not None:
            for place in range(max(start, 1), len(text)):
                pair = text[place - 1 : place + 1]
                if _ESCAPED_SPACE not in pair and pair.replace(" ", _ESCAPED_SPACE) not in self._joined:
                    return place
        return len(text)

    @cached_property
    def _joined(self) -> set[str] | None:
        """Return all pairs of adjacent characters in the vocabulary; None if the model does more than merge characters.

        Two characters that are adjacent in no vocabulary entry are never merged. A text can be cut between them, because
        merges on one side of the cut do not affect the other side.
        """
        from sentencepiece import sentencepiece_model_pb2 as protocol

        model = protocol.ModelProto.FromString(self._model)  # type: ignore[attr-defined]
        text, trainer = model.normalizer_spec, model.trainer_spec
        merges = trainer.model_type == trainer.BPE and trainer.byte_fallback and text.escape_whitespaces
        if not merges or text.precompiled_charsmap or text.remove_extra_whitespaces or text.add_dummy_prefix:
            return None
        pieces = (piece.piece for piece in model.pieces)
        return {
            pair for piece in pieces for pair in map("".join, pairwise(piece.replace(" ", _ESCAPED_SPACE)))
        }

    def decode(self, ids: Iterable[int]) -> str:
        return self._processor.decode([i for i in ids if 0 <= i < self.vocab_size])

    def save(self, folder: Path) -> None:
        _write(folder / MODEL_FILE, self._model)


class HuggingFaceTokenizer:
    """A tokenizer.json and the SETTINGS_FILES next to it, given as file name -> content.

    A document ends with the settings' eos_token. A document begins with the token that the tokenizer itself adds before
    every text, or with bos_token if the settings have add_bos_token = true. Text that spells a special token is encoded
    as text. Byte-level tokenizers decode every text exactly; normalising tokenizers do not.
    """

    def __init__(self, files: dict[str, bytes], name: str):
        # Threads would not help: forge encodes one text at a time, in several processes.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        try:
            import tokenizers  # only on use: an optional dependency
        except ImportError:
            raise UserError(
                f"tokenizer {name}: needs the package tokenizers: pip install 'forge[tokenizers]'; a SentencePiece model "
                "(name the .model file itself) and 'bytes' need no package"
            ) from None
        self._files, self._name = files, name
        try:
            self._tokenizer = tokenizers.Tokenizer.from_buffer(files[JSON_FILE])
        except Exception as error:
            raise UserError(f"tokenizer {name}: is not a tokenizer.json: {error}") from None
        # A file may contain the truncation setting of its last use, and truncation would cut documents short.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True
        self.vocab_size = max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.bos_id, self.eos_id = self._ends()
        described = read_json(files[JSON_FILE])
        model = described["model"]
        unknown = model.get("unk_token")
        self.unk_id = self._tokenizer.token_to_id(unknown) if unknown else model.get("unk_id")
        self.can_cut = _splits_at_spaces(described)
        ends = json.dumps([self.bos_id, self.eos_id]).encode()
        self.fingerprint = hashlib.sha256(files[JSON_FILE] + b"\0" + ends).hexdigest()

    def encode(self, text: str) -> list[int]:
        text.encode("utf-8")  # raises for lone surrogates
        # The "fast" call does not compute token offsets, which saves a fifth of the time.
        return self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids

    def cut(self, text: str, start: int) -> int:
        if self.can_cut:
            for found in _BEFORE_SPACE.finditer(text, max(start - 1, 0)):
                # Unicode 3.2's categories are the same in Python and in the tokenizer; newer versions may differ.
                if unicodedata.ucd_3_2_0.category(found[0])[0] in "LN":
                    return found.end()
        return len(text)

    def decode(self, ids: Iterable[int]) -> str:
        return self._tokenizer.decode([i for i in ids if 0 <= i < self.vocab_size], skip_special_tokens=True)

    def save(self, folder: Path) -> None:
        for name, content in self._files.items():
            _write(folder / name, content)

    def _ends(self) -> tuple[int | None, int | None]:
        settings: dict[str, Any] = {}
        for file in reversed(SETTINGS_FILES):
            try:
                settings = {**settings, **read_json(self._files.get(file, b"{}"))}
            except (ValueError, TypeError) as error:
                raise UserError(
                    f"tokenizer {self._name}: {file} beside it is not a JSON object: {error}"
                ) from None
        plain = self._tokenizer.encode("a", add_special_tokens=False).ids
        whole = self._tokenizer.encode("a", add_special_tokens=True).ids
        before = next(
            (whole[:n] for n in range(len(whole)) if plain and whole[n : n + len(plain)] == plain), []
        )
        after = whole[len(before) + len(plain) :]
        bos, eos = self._id_of(settings, "bos_token"), self._id_of(settings, "eos_token")
        if settings.get("add_bos_token") is None:
            if len(before) > 1:
                raise UserError(
                    f"tokenizer {self._name}: adds {len(before)} tokens before every text; forge supports at most one"
                )
            bos = before[0] if before else None
        elif not settings["add_bos_token"]:
            bos = None
        if eos is None and len(after) == 1:
            eos = after[0]
        if eos is None:
            special = {
                t.content: i for i, t in self._tokenizer.get_added_tokens_decoder().items() if t.special
            }
            eos = next((special[end] for end in USUAL_ENDS if end in special), None)
        return bos, eos

    def _id_of(self, settings: dict[str, Any], key: str) -> int | None:
        """Return the id of the token stored in the settings under `key`; None if absent.

        The token is a text, or an object with the text under `content`.
        """
        token = settings.get(key)
        token = token.get("content") if isinstance(token, dict) else token
        if token is None:
            return None
        found = self._tokenizer.token_to_id(token) if isinstance(token, str) else None
        if found is None:
            raise UserError(
                f"tokenizer {self._name}: its settings have {key} = {token!r}, which is not in its vocabulary"
            )
        return found


def _splits_at_spaces(described: dict[str, Any]) -> bool:
    """Return whether a tokenizer.json always splits a text between a letter or digit and a following space or line end.

    If so, the tokenizer encodes the two sides independently. Return False for a file with an unknown pre-tokenizer step.
    All known split patterns split there: none has a lookbehind, none has a lookahead after a letter or digit, and none
    matches a letter or digit together with the space after it.
    """
    normalizer = described.get("normalizer") or {
        "type": "NFC"
    }  # a space does not compose with other characters
    steps = described.get("pre_tokenizer") or {}
    steps = steps.get("pretokenizers", []) if steps.get("type") == "Sequence" else [steps]
    splits = False
    for step in steps:
        kind = step.get("type")
        if kind == "ByteLevel":
            if step.get("add_prefix_space"):
                return False
            splits |= step.get("use_regex", True)
        elif kind == "Split":
            if step["pattern"].get("Regex") not in _PATTERNS or step["behavior"] not in (
                "Isolated",
                "Removed",
            ):
                return False
            splits = True
        elif kind in ("Whitespace", "WhitespaceSplit", "BertPreTokenizer"):
            splits = True
        elif kind not in ("Digits", "Punctuation"):
            return False
    for token in described.get("added_tokens", []):  # added tokens are matched before all these steps
        if token.get("rstrip") or _BEFORE_SPACE.search(token["content"]):
            return False
    return splits and normalizer.get("type") == "NFC"


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_atomically(path, content)
