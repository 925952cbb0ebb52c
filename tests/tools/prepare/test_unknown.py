"""Reports of text outside a tokenizer's vocabulary, and of documents it cannot separate."""

import io
import json

import pytest

from forge.data.format import TokenDataset
from forge.data.tokenizer import load_tokenizer
from forge.tools.prepare.prepare import Request, prepare

VOCABULARY = ["[UNK]", "[EOS]", "a", "b", "c"]


def described(kind, special="[EOS]"):
    models = pytest.importorskip("tokenizers").models
    numbered = {token: number for number, token in enumerate(VOCABULARY)}
    model = {
        "WordPiece": lambda: models.WordPiece(numbered, unk_token="[UNK]"),
        "WordLevel": lambda: models.WordLevel(numbered, unk_token="[UNK]"),
        "Unigram": lambda: models.Unigram([(token, -1.0) for token in VOCABULARY], unk_id=0),
        "BPE": lambda: models.BPE(numbered, [], unk_token="[UNK]"),
    }[kind]()
    import tokenizers

    made = tokenizers.Tokenizer(model)
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens(["[UNK]", special])
    return made


def run(tmp_path, tokenizer, text="a b z c y"):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jsonl").write_text(f"{json.dumps({'text': text})}\n" * 10)
    prepare(Request((str(tmp_path / "in"),), str(tokenizer), tmp_path / "out"))
    return TokenDataset(tmp_path / "out").index


@pytest.mark.parametrize("kind", ["WordPiece", "WordLevel", "Unigram", "BPE"])
def test_unknown_tokens_are_counted_and_reported(tmp_path, capsys, kind):
    made = described(kind)
    path = tmp_path / "tokenizer.json"
    made.save(str(path))
    index = run(tmp_path, path)
    assert load_tokenizer(path).unk_id == 0 and index.origin["unknown_tokens"] == 20
    output = capsys.readouterr().err
    assert (
        "warning: 20 of 60 tokens (33.33%) are the unknown token" in output
        and "no token that begins" not in output
    )


def test_a_sentencepiece_model_without_bytes_has_unknown_tokens(tmp_path, capsys):
    from sentencepiece import SentencePieceTrainer

    for byte_fallback in (False, True):
        model = io.BytesIO()
        SentencePieceTrainer.train(
            sentence_iterator=iter(["a b c"] * 9),
            model_writer=model,
            vocab_size=8 + 256 * byte_fallback,
            model_type="bpe",
            byte_fallback=byte_fallback,
            minloglevel=2,
        )
        folder = tmp_path / str(byte_fallback)
        folder.mkdir()
        (folder / "tokenizer.model").write_bytes(model.getvalue())
        index = run(folder, folder / "tokenizer.model")
        assert index.origin["unknown_tokens"] == (0 if byte_fallback else 20)
        assert ("are the unknown token" in capsys.readouterr().err) == (not byte_fallback)


def test_documents_without_an_end_are_reported_once(tmp_path, capsys):
    made = described("WordLevel", special="[PAD]")
    path = tmp_path / "tokenizer.json"
    made.save(str(path))
    index = run(tmp_path, path, "a b")
    assert index.documents == 10 and index.tokens == 20
    output = capsys.readouterr().err
    assert (
        output.count("no token that begins or ends a document") == 1 and "are the unknown token" not in output
    )
