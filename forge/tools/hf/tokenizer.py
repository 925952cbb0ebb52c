"""Export tokenizers for AutoTokenizer, and import the tokenizer of a Hugging Face folder.

A tokenizer.json describes a tokenizer as data: its normalisation, splitting and merging of text, and the tokens added
around a text.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeAlias

from forge.data.tokenizer import (
    BYTES_FILE,
    JSON_FILE,
    MODEL_FILE,
    SETTINGS_FILES,
    HuggingFaceTokenizer,
    SentencePieceTokenizer,
)
from forge.runtime.errors import UserError
from forge.runtime.files import read_json

Json: TypeAlias = dict[str, Any]
Ends: TypeAlias = tuple[str | None, str | None]

_SPACE = "\u2581"
_BEGIN, _END = "<s>", "</s>"
_SETTINGS: Json = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "clean_up_tokenization_spaces": False,
    "model_input_names": ["input_ids", "attention_mask"],
}
_EXACT_MATCH = {"single_word": False, "lstrip": False, "rstrip": False}
# Copied for users; forge does not read these files.
_ALSO_COPIED = ("added_tokens.json", "chat_template.jinja")


def export_files(folder: Path) -> dict[str, bytes]:
    """Return the content of files for AutoTokenizer, by name. AutoTokenizer then gives the ids of the tokenizer in `folder`.

    There is one exception: if a text spells out a special token, AutoTokenizer encodes it as this token. If forge's
    documents begin with a special token, AutoTokenizer begins each text with this token. An existing tokenizer.json is
    changed only if it would begin texts with another token, or with none.

    Raises UserError for a SentencePiece model that tokenizer.json cannot express. Return an empty dict for a folder without
    a tokenizer.
    """
    if (folder / BYTES_FILE).is_file():
        return _files(*_bytes()) | {BYTES_FILE: (folder / BYTES_FILE).read_bytes()}
    if (folder / JSON_FILE).is_file():
        files = {SETTINGS_FILES[0]: _text(_SETTINGS)} | _described(folder)
        return files | {JSON_FILE: _with_begin(files, str(folder / JSON_FILE))}
    if (folder / MODEL_FILE).is_file():
        model = (folder / MODEL_FILE).read_bytes()
        return _files(*_sentencepiece(model, str(folder / MODEL_FILE))) | {MODEL_FILE: model}
    return {}


def import_files(folder: Path) -> dict[str, bytes]:
    """Return the content of the tokenizer files in a Hugging Face folder, by name, for `load_tokenizer`.

    A tokenizer.json and a SentencePiece model count as one tokenizer in two formats if they have equal numbers of tokens,
    and if the model has the settings' begin and end tokens. The SentencePiece model then takes precedence, because reading
    it needs no extra package. Return an empty dict if the folder has neither. Raises UserError for a file whose content
    does not match its name.
    """
    if (folder / BYTES_FILE).is_file():
        return {BYTES_FILE: (folder / BYTES_FILE).read_bytes()}
    model, described = folder / MODEL_FILE, folder / JSON_FILE
    if model.is_file():
        content = model.read_bytes()
        if not described.is_file():
            SentencePieceTokenizer(content, str(model))  # raises UserError for an invalid model
            return {MODEL_FILE: content}
        try:
            tokenizer = SentencePieceTokenizer(content, str(model))
        except UserError:
            return _described(folder)  # in Llama 3, a file of another format has this name
        if tokenizer.vocab_size == _vocab_size(described) and _has_ends_of(tokenizer, folder):
            return {MODEL_FILE: content}
    return _described(folder) if described.is_file() else {}


def refuse_foreign(files: dict[str, bytes], folder: Path, vocab_size: int) -> None:
    """Raise UserError if the tokenizer `files` of `folder` cannot be read, or has ids beyond the model's `vocab_size`.

    Added tokens may exceed it: Gemma 3 of text alone has a token for images.
    """
    if MODEL_FILE in files:
        name, size = MODEL_FILE, SentencePieceTokenizer(files[MODEL_FILE], MODEL_FILE).vocab_size
    elif JSON_FILE in files:
        name, size = JSON_FILE, _vocab_size(folder / JSON_FILE, added=False)
    else:
        return
    if size > vocab_size:
        raise UserError(
            f"tokenizer {folder / name}: has {size} tokens, but config.json has vocab_size = {vocab_size}; put the "
            "model's own tokenizer there, or remove this one"
        )


def _has_ends_of(tokenizer: SentencePieceTokenizer, folder: Path) -> bool:
    """Return whether the begin and end tokens of `tokenizer` are those that the settings files in `folder` name.

    Raises UserError for a settings file that is not a JSON object.
    """
    settings: dict[str, Any] = {}
    for path in (folder / name for name in reversed(SETTINGS_FILES)):
        try:
            settings = {**settings, **(read_json(path.read_bytes()) if path.is_file() else {})}
        except (ValueError, TypeError) as error:
            raise UserError(f"tokenizer {path}: is not a JSON object: {error}") from None

    def agrees(key: str, own: int | None) -> bool:
        token = settings.get(key)
        token = token.get("content") if isinstance(token, dict) else token
        return token is None or tokenizer.id_of(token) == own

    adds, begin = settings.get("add_bos_token"), tokenizer.bos_id
    begins = adds is None or bool(adds) == (begin is not None)
    return begins and (begin is None or agrees("bos_token", begin)) and agrees("eos_token", tokenizer.eos_id)


def _described(folder: Path) -> dict[str, bytes]:
    paths = [folder / name for name in (JSON_FILE, *SETTINGS_FILES, *_ALSO_COPIED)]
    return {path.name: path.read_bytes() for path in paths if path.is_file()}


def _with_begin(files: dict[str, bytes], name: str) -> bytes:
    """Return tokenizer.json. If transformers would begin texts with another token than forge, edit the post-processor.

    forge follows add_bos_token in the settings file; transformers follows the post-processor in tokenizer.json.
    """
    begin = HuggingFaceTokenizer(files, name).bos_id
    if HuggingFaceTokenizer({JSON_FILE: files[JSON_FILE]}, name).bos_id == begin:
        return files[JSON_FILE]
    described = read_json(files[JSON_FILE])
    steps = described.get("post_processor") or {"type": "Sequence", "processors": []}
    steps = steps["processors"] if steps["type"] == "Sequence" else [steps]
    steps = [step for step in steps if step["type"] == "ByteLevel"]  # drop processors that add tokens
    if begin is not None:
        vocab = described["model"]["vocab"]  # Unigram: a list of tokens with their scores
        names = {number: token for token, number in vocab.items()} if isinstance(vocab, dict) else {}
        names |= {number: token for number, (token, _) in enumerate(vocab)} if isinstance(vocab, list) else {}
        names |= {token["id"]: token["content"] for token in described["added_tokens"]}
        steps.append(_begin_with(names[begin], begin))
    described["post_processor"] = {"type": "Sequence", "processors": steps} if steps else None
    return _text(described)


def _vocab_size(described: Path, *, added: bool = True) -> int:
    """Return the number of ids in the tokenizer.json `described`. added: count the tokens added to the vocabulary."""
    try:
        tokenizer = read_json(described.read_text("utf-8"))
        vocab = tokenizer["model"]["vocab"]
        ids = vocab.values() if isinstance(vocab, dict) else range(len(vocab))
        later = [token["id"] for token in tokenizer["added_tokens"]]
        return 1 + max([*ids, *(later if added else [])], default=-1)
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"tokenizer {described}: is not a tokenizer.json: {error}") from None


def _bytes() -> tuple[dict[str, Any], Ends]:
    """Return the tokenizer.json of the byte tokenizer (256 bytes, two special tokens), and its begin and end tokens."""
    ends = {_BEGIN: 256, _END: 257}
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)} | ends
    return _tokenizer_json(vocab, [], special=ends, whole={}, begin=_BEGIN), (_BEGIN, _END)


def _sentencepiece(content: bytes, name: str) -> tuple[dict[str, Any], Ends]:
    """Return the tokenizer.json of a SentencePiece BPE model, and its begin and end tokens.

    SentencePiece repeatedly merges the two neighbours whose joint piece has the highest score, leftmost first. The list of
    merges therefore has all splits of each piece into two pieces, in descending order of the piece's score. Raises
    UserError for a model that tokenizer.json cannot express.
    """
    from sentencepiece import sentencepiece_model_pb2 as protocol

    SentencePieceTokenizer(content, name)  # raises UserError for an invalid model
    model = protocol.ModelProto.FromString(content)  # type: ignore[attr-defined]
    text, trainer, kinds = model.normalizer_spec, model.trainer_spec, model.SentencePiece
    # Ids of user-defined symbols. A symbol with an unescaped space never matches, so it is left out.
    whole = {
        number
        for number, piece in enumerate(model.pieces)
        if piece.type == kinds.USER_DEFINED and " " not in piece.piece
    }
    for what, is_so in (
        ("is not BPE", trainer.model_type != trainer.BPE),
        ("has no byte fallback", not trainer.byte_fallback),
        ("normalises text", bool(text.precompiled_charsmap)),
        ("removes spaces", text.remove_extra_whitespaces),
        ("does not escape spaces", not text.escape_whitespaces),
        ("has spaces at the ends of pieces", trainer.treat_whitespace_as_suffix),
        # tokenizer.json would also add a space after every symbol.
        ("has user-defined symbols and adds a space before a text", bool(whole) and text.add_dummy_prefix),
    ):
        if is_so:
            raise UserError(
                f"tokenizer {name}: cannot be expressed by a tokenizer.json, because the model {what}"
            )
    # tokenizer.json matches symbols before it escapes spaces.
    vocab = {
        p.piece.replace(_SPACE, " ") if number in whole else p.piece: number
        for number, p in enumerate(model.pieces)
    }
    scores = {piece.piece: piece.score for piece in model.pieces if piece.type == kinds.NORMAL}
    merges = [
        f"{piece[:cut]} {piece[cut:]}"
        for piece in sorted(scores, key=lambda piece: -scores[piece])
        for cut in range(1, len(piece))
        if piece[:cut] in scores and piece[cut:] in scores
    ]
    ends = trainer.bos_id, trainer.eos_id
    begin, end = (model.pieces[number].piece if number >= 0 else None for number in ends)
    described = _tokenizer_json(
        vocab,
        merges,
        special={p.piece: vocab[p.piece] for p in model.pieces if p.type in (kinds.CONTROL, kinds.UNKNOWN)},
        whole={token: number for token, number in vocab.items() if number in whole},
        begin=begin,
        escaped=True,
        prefixed=text.add_dummy_prefix,
    )
    return described, (begin, end)


def _tokenizer_json(
    vocab: dict[str, int],
    merges: list[str],
    *,
    special: dict[str, int],
    whole: dict[str, int],
    begin: str | None,
    escaped: bool = False,
    prefixed: bool = False,
) -> dict[str, Any]:
    """Return a tokenizer.json with BPE over the whole text, and byte tokens for characters outside `vocab`.

    special: tokens without text. whole: strings always encoded as one token. begin: token added before a text; None: none.
    escaped: replace spaces with U+2581. prefixed: add a space before a text.
    """
    prepend: list[Json] = [{"type": "Prepend", "prepend": _SPACE}] if prefixed else []
    replace = [
        {"type": "Replace", "pattern": {"String": old}, "content": new}
        for old, new in ((" ", _SPACE), (_SPACE, " "))
    ]
    escape, unescape = (replace[:1], replace[1:]) if escaped else ([], [])
    strip: list[Json] = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefixed else []
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": number, "content": token, "special": token in special, "normalized": False} | _EXACT_MATCH
            for token, number in sorted((special | whole).items(), key=lambda item: item[1])
        ],
        "normalizer": {"type": "Sequence", "normalizers": prepend + escape},
        "pre_tokenizer": None,
        "post_processor": _begin_with(begin, special[begin]) if begin else None,
        "decoder": {
            "type": "Sequence",
            "decoders": [*unescape, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip],
        },
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": True,
            "vocab": vocab,
            "merges": merges,
        },
    }


def _begin_with(token: str, number: int) -> Json:
    """Return a post-processor to add `token`, of id `number`, before a text and before each text of a pair."""
    begin = {"SpecialToken": {"id": token, "type_id": 0}}
    first, second = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
    return {
        "type": "TemplateProcessing",
        "single": [begin, first],
        "pair": [begin, first, begin, second],
        "special_tokens": {token: {"id": token, "ids": [number], "tokens": [token]}},
    }


def _files(described: Json, ends: Ends) -> dict[str, bytes]:
    named = {key: token for key, token in zip(("bos_token", "eos_token"), ends, strict=True) if token}
    return {JSON_FILE: _text(described), SETTINGS_FILES[0]: _text(_SETTINGS | named)}


def _text(values: Json) -> bytes:
    return (json.dumps(values, ensure_ascii=False, indent=1) + "\n").encode()
