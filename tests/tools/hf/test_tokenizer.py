"""AutoTokenizer gives the ids of forge's own tokenizers, and takes folders of Hugging Face the way back."""

from __future__ import annotations

import io
import json
import random
from pathlib import Path

import pytest

from forge.data.tokenizer import ByteTokenizer, SentencePieceTokenizer, Tokenizer, load_tokenizer
from forge.runtime.errors import UserError
from forge.tools.hf.tokenizer import export_files, import_files

# This file itself: a text that exists on every machine, without strings that AutoTokenizer reads as special tokens.
SOURCE = Path(__file__).read_text("utf-8").replace("/s>", "")
EXACT = {"remove_extra_whitespaces": False, "normalization_rule_name": "identity", "byte_fallback": True}
KINDS = {
    # As scripts/train_tokenizer.py makes them.
    "plain": EXACT | {"add_dummy_prefix": False, "allow_whitespace_only_pieces": True, "split_digits": True},
    # As Llama 2 has it.
    "prefixed": EXACT,
    "with_symbols": EXACT
    | {"add_dummy_prefix": False, "user_defined_symbols": ["[INST]", "for i in", "\u2581in\u2581the"]},
    "without_ends": EXACT | {"add_dummy_prefix": False, "bos_id": -1, "eos_id": -1},
}


def sentencepiece(**options) -> SentencePieceTokenizer:
    from sentencepiece import SentencePieceTrainer

    model = io.BytesIO()
    given = {"vocab_size": 450, "model_type": "bpe", "minloglevel": 2} | options
    SentencePieceTrainer.train(sentence_iterator=iter(SOURCE.splitlines()), model_writer=model, **given)
    return SentencePieceTokenizer(model.getvalue(), "test")


def tokenizer_of(kind: str) -> Tokenizer:
    return ByteTokenizer() if kind == "bytes" else sentencepiece(**KINDS[kind])


def written(files: dict[str, bytes], folder: Path) -> Path:
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


def exported(tokenizer: Tokenizer, folder: Path) -> Path:
    tokenizer.save(folder / "own")
    return written(export_files(folder / "own"), folder / "exported")


def texts() -> list[str]:
    chosen = random.Random(0)
    alphabet = "aeiou tn.,()\n\t 0123456789é日🎉\u00a0\u3000\r\x00" + SOURCE[:200]
    alphabet = alphabet.replace("\u2581", "")
    return [
        "",
        " ",
        "  two before, two after  ",
        "<0x0A> is text",
        "[INST] for i in range [INST] and in the end",
        "aaabaaba" * 9,
        *SOURCE.split("\n\n"),
        *("".join(chosen.choices(alphabet, k=60)) for _ in range(200)),
    ]


@pytest.mark.parametrize("kind", [*KINDS, "bytes"])
def test_autotokenizer_gives_the_same_ids_and_the_same_text(kind: str, tmp_path: Path) -> None:
    import transformers

    ours = tokenizer_of(kind)
    theirs = transformers.AutoTokenizer.from_pretrained(exported(ours, tmp_path))
    assert (len(theirs), theirs.bos_token_id, theirs.eos_token_id) == (
        ours.vocab_size,
        ours.bos_id,
        ours.eos_id,
    )
    begin = [] if ours.bos_id is None else [ours.bos_id]
    for text in texts():
        ids = ours.encode(text)
        assert theirs(text, add_special_tokens=False).input_ids == ids, repr(text)
        assert theirs(text).input_ids == begin + ids
        assert theirs.decode(begin + ids, skip_special_tokens=True) == ours.decode(ids), repr(text)


@pytest.mark.parametrize("kind", [*KINDS, "bytes"])
def test_an_exported_tokenizer_is_imported_unchanged(kind: str, tmp_path: Path) -> None:
    ours = tokenizer_of(kind)
    back = import_files(exported(ours, tmp_path))
    assert load_tokenizer(written(back, tmp_path / "back")).fingerprint == ours.fingerprint


def test_a_tokenizer_json_is_copied_unchanged(tmp_path: Path) -> None:
    files = export_files_of_bytes(tmp_path)
    files["tokenizer_config.json"] = (
        b'{"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "mine": 1}'
    )
    folder = written(
        files | {"chat_template.jinja": b"{{ messages }}", "README.md": b"no"}, tmp_path / "theirs"
    )
    taken = import_files(folder)
    assert taken == files | {"chat_template.jinja": b"{{ messages }}"}
    assert export_files(written(taken, tmp_path / "ours")) == taken
    assert load_tokenizer(tmp_path / "ours").encode("né") == ByteTokenizer().encode("né")


@pytest.mark.parametrize("adds", [True, False, None])
@pytest.mark.parametrize("steps", [(), ("bytes",), ("template",), ("bytes", "template")])
def test_a_text_begins_as_in_forge_despite_the_files_settings(
    steps: tuple[str, ...], adds: bool | None, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    import tokenizers

    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.train_from_iterator(
        [SOURCE],
        tokenizers.trainers.BpeTrainer(
            vocab_size=300,
            special_tokens=["[B]", "[E]"],
            initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    processors = tokenizers.processors
    known = {
        "bytes": processors.ByteLevel(trim_offsets=False),
        "template": processors.TemplateProcessing("[B] $A", special_tokens=[("[B]", 0)]),
    }
    if steps:
        made.post_processor = processors.Sequence([known[step] for step in steps])
    own = tmp_path / "own"
    own.mkdir()
    made.save(str(own / "tokenizer.json"))
    settings = {"bos_token": "[B]", "eos_token": "[E]"} | ({} if adds is None else {"add_bos_token": adds})
    (own / "tokenizer_config.json").write_text(json.dumps(settings))
    ours = load_tokenizer(own)
    begin = [] if ours.bos_id is None else [ours.bos_id]
    assert begin == ([0] if adds or (adds is None and "template" in steps) else [])
    theirs = transformers.AutoTokenizer.from_pretrained(written(export_files(own), tmp_path / "exported"))
    assert theirs("né 12").input_ids == begin + ours.encode("né 12")
    again = load_tokenizer(tmp_path / "exported")
    assert (again.bos_id, again.eos_id) == (ours.bos_id, ours.eos_id)


def test_a_tokenizer_json_with_tokens_added_later_counts_more_than_its_model(tmp_path: Path) -> None:
    folder = exported(sentencepiece(**KINDS["plain"]), tmp_path)
    assert list(import_files(folder)) == ["tokenizer.model"]
    described = json.loads((folder / "tokenizer.json").read_text())
    described["added_tokens"].append(described["added_tokens"][-1] | {"id": 450, "content": "<|added|>"})
    (folder / "tokenizer.json").write_text(json.dumps(described))
    assert sorted(import_files(folder)) == ["tokenizer.json", "tokenizer_config.json"]


@pytest.mark.parametrize(
    ("settings", "is_model"),
    [
        (
            {"add_bos_token": True, "eos_token": "/s"},
            True,
        ),  # tags without brackets, because this file is a text
        ({"add_bos_token": False}, False),
        ({"eos_token": "s"}, False),
    ],
)
def test_a_tokenizer_model_with_other_ends_than_the_settings_is_ignored(
    settings: dict, is_model: bool, tmp_path: Path
) -> None:
    folder = exported(sentencepiece(**KINDS["plain"]), tmp_path)
    path = folder / "tokenizer_config.json"
    if "eos_token" in settings:
        settings = settings | {"eos_token": {"content": f"<{settings['eos_token']}>"}}
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    assert (list(import_files(folder)) == ["tokenizer.model"]) == is_model


def test_a_tokenizer_model_of_another_format_is_ignored_beside_a_tokenizer_json(tmp_path: Path) -> None:
    folder = written(
        export_files_of_bytes(tmp_path) | {"tokenizer.model": b"IQ== 0\nIg== 1\n"}, tmp_path / "theirs"
    )
    assert sorted(import_files(folder)) == ["tokenizer.json", "tokenizer_config.json"]
    (folder / "tokenizer.json").unlink()
    with pytest.raises(UserError, match=r"tokenizer\.model: is not a SentencePiece model"):
        import_files(folder)


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"model_type": "unigram"}, "is not BPE"),
        ({"byte_fallback": False}, "no byte fallback"),
        ({"normalization_rule_name": "nmt_nfkc"}, "normalises text"),
        ({"remove_extra_whitespaces": True}, "removes spaces"),
        ({"user_defined_symbols": ["[INST]"]}, "user-defined symbols"),
    ],
)
def test_a_model_unsupported_by_tokenizer_json_is_refused(options: dict, what: str, tmp_path: Path) -> None:
    tokenizer = sentencepiece(**EXACT | options)
    with pytest.raises(UserError, match=what):
        exported(tokenizer, tmp_path)


def test_a_broken_tokenizer_json_is_refused(tmp_path: Path) -> None:
    folder = exported(sentencepiece(**KINDS["plain"]), tmp_path)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match=r"tokenizer\.json: is not a tokenizer\.json"):
        import_files(folder)


def test_no_tokenizer_is_no_tokenizer(tmp_path: Path) -> None:
    assert export_files(tmp_path) == {} and import_files(tmp_path) == {}


def export_files_of_bytes(folder: Path) -> dict[str, bytes]:
    files = export_files(exported(ByteTokenizer(), folder).parent / "own")
    return {name: content for name, content in files.items() if name != "tokenizer.bytes"}
