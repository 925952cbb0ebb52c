from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from forge.data.tokenizer import ByteTokenizer, enclose, load_tokenizer
from forge.data.train_tokenizer import train_tokenizer
from forge.errors import UserError

PYTHON = Path(__file__).parent


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer([PYTHON], folder, 600)
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder):
    return load_tokenizer(folder)


TEXTS = st.text(st.characters(exclude_categories=["Cs"])) | st.text("ab \t\r\n\u2581\x00<>0A_é\ufeff")


@given(text=TEXTS)
@example("def f(x):\n    if x:\n\t\treturn  1\r\n\n\n    \n")
@example(" \u2581 \u2581\u2581")
@example("<s></s><unk><0x0A> \u2047 \U0001f600 e\u0301 \ufb01 \u3000 \u200b")
def test_every_text_comes_back_exactly(tokenizer, text):
    for each in (tokenizer, ByteTokenizer()):
        ids = each.encode(text)
        assert each.decode(ids) == text
        assert all(0 <= i < each.vocab_size and i not in (each.bos_id, each.eos_id) for i in ids)


def test_python_source_comes_back_and_takes_fewer_ids_than_bytes(tokenizer):
    for path in PYTHON.glob("*.py"):
        text = path.read_text()
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text and len(ids) <= 0.6 * len(text)


@given(ids=st.lists(st.integers(-5, 10**6)))
def test_decoding_takes_any_ids(tokenizer, ids):
    for each in (tokenizer, ByteTokenizer()):
        assert isinstance(each.decode(ids), str)


def test_specials_are_left_out_of_decoded_text(tokenizer):
    for each in (tokenizer, ByteTokenizer()):
        assert each.decode(enclose(each.encode("a b"), each)) == "a b"
        assert enclose([], each) == [each.bos_id, each.eos_id]


def test_lone_surrogates_are_refused_not_changed(tokenizer):
    for each in (tokenizer, ByteTokenizer()):
        with pytest.raises(UnicodeEncodeError):
            each.encode("a\ud800b")


@pytest.mark.parametrize("kind", ["bytes", "sentencepiece"])
def test_a_saved_tokenizer_is_the_same_again(tmp_path, tokenizer, kind):
    original = ByteTokenizer() if kind == "bytes" else tokenizer
    original.save(tmp_path / "a" / "b")
    again = load_tokenizer(tmp_path / "a" / "b")
    assert (again.fingerprint, again.vocab_size) == (original.fingerprint, original.vocab_size)
    assert again.encode("x = 1\n") == original.encode("x = 1\n")


def test_training_again_gives_the_same_file(folder, tmp_path):
    train_tokenizer([PYTHON], tmp_path, 600)
    assert (tmp_path / "tokenizer.model").read_bytes() == (folder / "tokenizer.model").read_bytes()


def test_has_the_size_that_was_asked_for_and_pieces_of_spaces_and_line_ends(tokenizer):
    assert tokenizer.vocab_size == 600 and (tokenizer.bos_id, tokenizer.eos_id) == (1, 2)
    assert len(tokenizer.encode("    ")) == 1
    assert len(tokenizer.encode("):\n")) < 3


@pytest.mark.parametrize("vocab_size", [-1, 280, 10**6])
def test_an_impossible_vocabulary_is_one_sentence(tmp_path, vocab_size):
    with pytest.raises(UserError, match=rf"--vocab-size {vocab_size}: \S+"):
        train_tokenizer([PYTHON], tmp_path, vocab_size)


@pytest.mark.parametrize("content", [None, b"", b"not a model"])
def test_a_missing_or_broken_model_is_refused_by_name(tmp_path, content):
    path = tmp_path / "x.model"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=r"tokenizer .*x\.model"):
        load_tokenizer(path)
