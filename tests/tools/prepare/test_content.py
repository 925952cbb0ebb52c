"""Preparation recognises files by content and counts the files it skips."""

import gzip
import json

import pytest

from forge.runtime.errors import UserError
from forge.tools.prepare import content
from forge.tools.prepare.corpus import find_corpus
from forge.tools.prepare.documents import Bad, read_documents

ROWS = [{"text": "first é", "id": 1}, {"text": "second", "id": 2}]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
TEXTS = [row["text"] for row in ROWS]


def zstd(data):
    pyarrow = pytest.importorskip("pyarrow")
    return pyarrow.compress(data, codec="zstd", asbytes=True)


def documents(*inputs, key="text"):
    corpus = find_corpus(inputs, text_key=key)
    return [document for piece in corpus.pieces for document in read_documents(piece, key)]


@pytest.mark.parametrize("name", ["a.jsonl", "a.ndjson", "a.json", "a.txt", "part-00000"])
@pytest.mark.parametrize("packed", ["", "gzip", "zstd"])
def test_json_lines_are_read_under_any_name_and_compression(tmp_path, name, packed):
    half = len(LINES) // 2
    path = tmp_path / (name + {"": "", "gzip": ".gz", "zstd": ".zst"}[packed])
    if packed == "gzip":  # two members, as appending makes them
        path.write_bytes(gzip.compress(LINES[:half]) + gzip.compress(LINES[half:]))
    else:
        path.write_bytes(zstd(LINES[:half]) + zstd(LINES[half:]) if packed else LINES)
    assert documents(path) == TEXTS
    if name != "part-00000":
        assert documents(tmp_path) == TEXTS


def test_compression_is_known_by_content_not_by_name(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(gzip.compress(LINES))
    (tmp_path / "b.txt.gz").write_text("not compressed")
    (tmp_path / "c.txt").write_bytes(zstd("plain text é".encode()))
    assert documents(tmp_path) == [*TEXTS, "not compressed", "plain text é"]


def test_json_lines_may_begin_with_a_byte_order_mark(tmp_path):
    (tmp_path / "a.json").write_bytes(b"\xef\xbb\xbf" + LINES)
    assert documents(tmp_path) == TEXTS


def test_json_lines_under_another_key_are_read_not_taken_for_text(tmp_path):
    (tmp_path / "a.json").write_text('{"body": "x"}\n{"body": "y"}\n')
    assert documents(tmp_path, key="body") == ["x", "y"]
    assert all(document.reason == "no text under the key 'text'" for document in documents(tmp_path))


def test_a_json_document_is_read_if_named_and_skipped_in_a_folder(tmp_path):
    (tmp_path / "package.json").write_text('{\n "name": "x"\n}\n')
    (tmp_path / "line.json").write_text('{"name": "x"}\n')
    (tmp_path / "a.txt").write_text("{text}\n{text}\n")
    assert documents(tmp_path) == ["{text}\n{text}\n"]
    assert documents(tmp_path / "package.json") == ['{\n "name": "x"\n}\n']
    assert "2 files skipped: 2 .json without JSON lines" in find_corpus([tmp_path]).notes()[0]


def test_an_array_of_records_is_refused_with_the_remedy(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps(ROWS))
    with pytest.raises(UserError, match=r"a\.json: is a JSON array; convert the file to one object per line"):
        documents(tmp_path / "a.json")


def test_skipped_files_are_counted_by_extension(tmp_path):
    for name in ("a.txt", "b.HTML", "c.html", "d.tar.gz", "Makefile", ".hidden/e.pdf"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    (note,) = find_corpus([tmp_path]).notes()
    assert note.startswith("4 files skipped: 2 .html, 1 without an extension, 1 .tar.gz (")


@pytest.mark.parametrize("pack", [gzip.compress, zstd])
@pytest.mark.parametrize("name", ["a.jsonl", "a.txt"])
def test_a_damaged_compressed_file_is_bad(tmp_path, pack, name):
    import random

    packed = pack(b"".join(b'{"text": "%d"}\n' % random.Random(0).getrandbits(64) for _ in range(3000)))
    for damaged in (packed[: len(packed) // 2], packed[:99] + b"\xff" * 50 + packed[149:]):
        (tmp_path / name).write_bytes(damaged)
        (bad,) = [document for document in documents(tmp_path) if isinstance(document, Bad)]
        assert bad.many == name.endswith("jsonl") and bad.where == name and bad.reason


def test_without_pyarrow_zstd_is_refused_with_the_extra(tmp_path, monkeypatch):
    (tmp_path / "a.jsonl.zst").write_bytes(zstd(LINES))
    monkeypatch.setattr(content, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"a\.jsonl\.zst: reading zstd needs pyarrow.*forge\[parquet\]"):
        find_corpus([tmp_path])
