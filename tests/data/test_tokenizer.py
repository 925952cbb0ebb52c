import json
import sys
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from forge.data.tokenizer import ByteTokenizer, begin_text, load_tokenizer
from forge.runtime.errors import UserError
from forge.tools.prepare.train_tokenizer import train_tokenizer

PYTHON = Path(__file__).parent


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer([PYTHON], folder, 600)
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder):
    return load_tokenizer(folder)


@pytest.fixture(scope="module")
def huggingface(tmp_path_factory):
    """Return a folder in Hugging Face's format: byte-level BPE, <s> before each text, and a leftover truncation setting."""
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=["<s>", "</s>", "<pad>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator((path.read_text() for path in PYTHON.glob("*.py")), trainer)
    made.post_processor = tokenizers.processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    made.enable_truncation(5)
    made.enable_padding(length=8)
    folder = tmp_path_factory.mktemp("huggingface")
    made.save(str(folder / "tokenizer.json"))
    end = {"__type": "AddedToken", "content": "</s>", "special": True}
    end |= dict.fromkeys(("lstrip", "rstrip", "normalized", "single_word"), False)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": end}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture(scope="module")
def every_kind(tokenizer, huggingface):
    return tokenizer, load_tokenizer(huggingface), ByteTokenizer()


TEXTS = st.text(st.characters(exclude_categories=["Cs"])) | st.text("ab \t\r\n\u2581\x00<>0A_é\ufeff")


@given(text=TEXTS)
@example("def f(x):\n    if x:\n\t\treturn  1\r\n\n\n    \n")
@example(" \u2581 \u2581\u2581")
@example("<s></s><unk><0x0A> \u2047 \U0001f600 e\u0301 \ufb01 \u3000 \u200b")
def test_every_text_is_decoded_exactly(every_kind, text):
    for each in every_kind:
        ids = each.encode(text)
        assert each.decode(ids) == text
        assert all(0 <= i < each.vocab_size and i not in (each.bos_id, each.eos_id) for i in ids)


def test_python_source_is_decoded_exactly_and_has_fewer_ids_than_bytes(tokenizer):
    for path in PYTHON.glob("*.py"):
        text = path.read_text()
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text and len(ids) <= 0.6 * len(text)


@given(ids=st.lists(st.integers(-5, 10**6)))
def test_decoding_takes_any_ids(every_kind, ids):
    for each in every_kind:
        assert isinstance(each.decode(ids), str)


def test_specials_are_left_out_of_decoded_text(every_kind):
    for each in every_kind:
        assert each.decode([each.bos_id, *each.encode("a b"), each.eos_id]) == "a b"


@pytest.mark.parametrize(
    ("bos", "eos", "empty", "text"), [(1, 2, [1], [1, 7]), (1, None, [1], [1, 7]), (None, 2, [2], [7])]
)
def test_a_text_begins_like_a_document(bos, eos, empty, text):
    tokenizer = ByteTokenizer()
    tokenizer.bos_id, tokenizer.eos_id = bos, eos
    assert begin_text([], tokenizer) == empty and begin_text([7], tokenizer) == text


def test_an_empty_text_needs_a_token_to_begin_with():
    tokenizer = ByteTokenizer()
    tokenizer.bos_id = tokenizer.eos_id = None
    assert begin_text([7], tokenizer) == [7]
    with pytest.raises(UserError, match="no token that begins or ends a document"):
        begin_text([], tokenizer)


def test_lone_surrogates_are_refused_not_changed(every_kind):
    for each in every_kind:
        with pytest.raises(UnicodeEncodeError):
            each.encode("a\ud800b")


def test_a_saved_tokenizer_is_unchanged_after_loading(tmp_path, every_kind):
    for number, original in enumerate(every_kind):
        folder = tmp_path / "a" / str(number)
        original.save(folder)
        again = load_tokenizer(folder)
        for what in ("fingerprint", "vocab_size", "bos_id", "eos_id"):
            assert getattr(again, what) == getattr(original, what)
        assert again.encode("x = 1\n") == original.encode("x = 1\n")
    assert len({each.fingerprint for each in every_kind}) == 3


def test_training_again_gives_the_same_file(folder, tmp_path):
    train_tokenizer([PYTHON], tmp_path, 600)
    assert (tmp_path / "tokenizer.model").read_bytes() == (folder / "tokenizer.model").read_bytes()


def test_has_the_requested_size_and_pieces_of_spaces_and_line_ends(tokenizer):
    assert tokenizer.vocab_size == 600 and (tokenizer.bos_id, tokenizer.eos_id) == (1, 2)
    assert len(tokenizer.encode("    ")) == 1
    assert len(tokenizer.encode("):\n")) < 3


@pytest.mark.parametrize(
    ("vocab_size", "reason"),
    [
        (-1, "needs at least 260: "),
        (280, r"needs at least \d+: 256 bytes, 3 special pieces and the common characters of the text$"),
        (10**6, r"the text of the sample gives at most \d+ pieces; lower --vocab-size, or give more text"),
    ],
)
def test_an_impossible_vocabulary_is_one_sentence(tmp_path, vocab_size, reason):
    with pytest.raises(UserError, match=rf"--vocab-size {vocab_size}: {reason}"):
        train_tokenizer([PYTHON], tmp_path, vocab_size)


def test_the_smallest_vocabulary_in_the_error_suffices(tmp_path):
    with pytest.raises(UserError) as refused:
        train_tokenizer([PYTHON], tmp_path, 280)
    least = int(str(refused.value).split("at least ")[1].split(":")[0])
    assert train_tokenizer([PYTHON], tmp_path, least).vocab_size == least


@pytest.mark.parametrize(("vocab_size", "needed"), [(4096, 32_000_000), (128_256, 128_256_000)])
def test_the_sample_follows_the_vocabulary(tmp_path, monkeypatch, vocab_size, needed):
    asked = []
    monkeypatch.setattr(
        "forge.tools.prepare.train_tokenizer.find_corpus",
        lambda *arguments: asked.append(arguments[2]) or 1 / 0,
    )
    with pytest.raises(ZeroDivisionError):
        train_tokenizer([PYTHON], tmp_path, vocab_size)
    assert asked == [needed]


def test_too_little_text_for_the_vocabulary_is_a_warning_with_the_needed_size(tmp_path, capsys):
    train_tokenizer([PYTHON], tmp_path, 700, max_bytes=40_000)
    assert "MB of text, but a vocabulary of 700 needs about 0.7 MB" in capsys.readouterr().err
    (tmp_path / "a.txt").write_text("".join(path.read_text() for path in PYTHON.glob("*.py")) * 10)
    for max_bytes in (None, 400_000):  # the whole file, and a part of it
        train_tokenizer([tmp_path / "a.txt"], tmp_path / str(max_bytes), 400, max_bytes=max_bytes)
        assert "warning" not in capsys.readouterr().err


@pytest.mark.parametrize("name", ["tokenizer.model", "tokenizer.json"])
def test_a_tokenizer_is_not_overwritten_or_hidden_by_another(tmp_path, name: str) -> None:
    (tmp_path / name).write_text("mine")
    with pytest.raises(UserError, match=f"has a {name} already; choose another folder, or remove this file"):
        train_tokenizer([PYTHON], tmp_path, 600)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_an_unwritable_folder_is_reported_before_training(monkeypatch):
    monkeypatch.setattr("forge.tools.prepare.train_tokenizer._train", None)
    with pytest.raises(UserError, match="--output /proc/self: cannot be written: "):
        train_tokenizer([PYTHON], "/proc/self", 600)


def test_a_huggingface_folder_encodes_like_transformers(huggingface):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(huggingface)
    ours = load_tokenizer(huggingface)
    assert (ours.bos_id, ours.eos_id) == (theirs.bos_token_id, theirs.eos_token_id) == (0, 1)
    for path in PYTHON.glob("*.py"):
        text = path.read_text()
        assert [ours.bos_id, *ours.encode(text)] == theirs(text, split_special_tokens=True)["input_ids"]


def test_truncation_and_padding_in_the_file_are_ignored(huggingface):
    ours = load_tokenizer(huggingface)
    assert len(ours.encode("x " * 500)) >= 500 and len(ours.encode("x")) == 1


def test_of_two_in_a_folder_the_json_counts(tmp_path, tokenizer, huggingface):
    tokenizer.save(tmp_path)
    load_tokenizer(huggingface).save(tmp_path)
    assert load_tokenizer(tmp_path).fingerprint == load_tokenizer(huggingface).fingerprint
    assert load_tokenizer(tmp_path / "tokenizer.model").fingerprint == tokenizer.fingerprint


@pytest.mark.parametrize(
    ("settings", "ends"),
    [
        ({"bos_token": "<s>", "eos_token": "</s>"}, (0, 1)),
        ({"bos_token": "<pad>", "eos_token": "<pad>"}, (0, 2)),  # the token put before a text begins it
        ({"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": False}, (None, 1)),
        ({"bos_token": "<pad>", "eos_token": None, "add_bos_token": True}, (2, 1)),
        ({}, (0, 1)),
    ],
)
def test_settings_name_the_begin_and_end_tokens_of_a_document(tmp_path, huggingface, settings, ends):
    (tmp_path / "tokenizer.json").write_bytes((huggingface / "tokenizer.json").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        ours = load_tokenizer(path)
        assert (ours.bos_id, ours.eos_id) == ends
    changed = ends != (0, 1)
    assert (ours.fingerprint != load_tokenizer(huggingface).fingerprint) == changed


@pytest.mark.parametrize(
    ("file", "content", "named"),
    [
        ("tokenizer.json", b"{}", "tokenizer.json: is not a tokenizer.json"),
        ("tokenizer.json", b"\xff", "tokenizer.json: is not a tokenizer.json"),
        ("tokenizer_config.json", b"{", "tokenizer_config.json beside it is not a JSON object"),
        ("tokenizer_config.json", b"[]", "tokenizer_config.json beside it is not a JSON object"),
        ("special_tokens_map.json", b'{"eos_token": "<none>"}', "eos_token = '<none>'"),
    ],
)
def test_a_defect_of_a_huggingface_folder_is_named(tmp_path, huggingface, file, content, named):
    (tmp_path / "tokenizer.json").write_bytes((huggingface / "tokenizer.json").read_bytes())
    (tmp_path / file).write_bytes(content)
    with pytest.raises(UserError, match=f"tokenizer .*{named}"):
        load_tokenizer(tmp_path)


def test_without_the_package_a_tokenizer_json_is_refused_with_the_remedy(huggingface, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(UserError, match=r"forge\[tokenizers\]"):
        load_tokenizer(huggingface)


def test_a_folder_without_a_tokenizer_is_refused_by_name(tmp_path):
    with pytest.raises(UserError, match=r"has no tokenizer\.json and no tokenizer\.model"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("content", [None, b"", b"not a model"])
def test_a_missing_or_broken_model_is_refused_by_name(tmp_path, content):
    path = tmp_path / "x.model"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=r"tokenizer .*x\.model"):
        load_tokenizer(path)
