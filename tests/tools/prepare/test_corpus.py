import json
import os

import pytest

from forge.runtime.errors import UserError
from forge.tools.prepare import content as content_module
from forge.tools.prepare import documents as documents_module
from forge.tools.prepare.content import File
from forge.tools.prepare.corpus import find_corpus
from forge.tools.prepare.documents import Bad, read_documents
from forge.tools.prepare.sample import Piece, whole


def write(folder, **files):
    for name, content in files.items():
        path = folder / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


def keys(corpus):
    return [piece.file.key for piece in corpus.pieces]


def test_files_come_sorted_by_path_below_each_input_in_turn(tmp_path):
    write(
        tmp_path / "one", b_dot_txt="1", a__z_dot_py="2", a_dot_md="3", x_dot_bin="4", _dot_git__c_dot_txt="5"
    )
    write(tmp_path / "two", a_dot_txt="6")
    (tmp_path / "odd.name").write_text("7")
    inputs = [tmp_path / "two", tmp_path / "one", tmp_path / "odd.name"]
    assert keys(find_corpus(inputs)) == ["a.txt", "a.md", "a/z.py", "b.txt", "odd.name"]
    assert keys(find_corpus([tmp_path / "one"], [".py"])) == ["a/z.py"]


def test_copies_links_and_empty_files_are_left_out(tmp_path):
    write(tmp_path, a_dot_txt="same", b_dot_txt="same", c_dot_txt="else", d_dot_txt="", sub__e_dot_txt="deep")
    os.symlink(tmp_path / "c.txt", tmp_path / "link.txt")
    os.symlink(tmp_path, tmp_path / "sub" / "loop")
    os.symlink(tmp_path / "nowhere", tmp_path / "dead.txt")
    corpus = find_corpus([tmp_path, tmp_path / "sub"])
    assert keys(corpus) == ["a.txt", "c.txt", "sub/e.txt"] and corpus.duplicates == 1
    assert [bad.where for bad in corpus.unreadable] == ["dead.txt"]


def test_files_of_the_result_below_an_input_are_skipped(tmp_path):
    write(tmp_path / "in", a_dot_txt="text", out__metadata_dot_jsonl='{"text": "x"}\n', out__b_dot_txt="more")
    (tmp_path / "link").symlink_to(tmp_path / "in" / "out")
    for output in (tmp_path / "in" / "out", tmp_path / "link"):
        corpus = find_corpus([tmp_path / "in"], without=[output / "metadata.jsonl"])
        assert keys(corpus) == ["a.txt", "out/b.txt"] and not corpus.passed_over


@pytest.mark.parametrize(
    ("name", "many"),
    [
        *(("a.parquet", True), ("a.jsonl", True), ("a.json", True), ("a.json.gz", True)),
        *(("a.txt.zst", False), ("a.txt", False), ("a.md", False), ("a.py", False)),
    ],
)
@pytest.mark.parametrize("fault", ["disk", "link", "empty"])
def test_an_unreadable_file_that_may_hold_many_documents_counts_as_many(
    tmp_path, monkeypatch, name, many, fault
):
    if name.endswith((".parquet", ".zst")):
        pytest.importorskip("pyarrow")
    write(tmp_path, b_dot_txt="readable")
    if fault == "link":
        os.symlink(tmp_path / "nowhere", tmp_path / name)
    else:
        (tmp_path / name).write_bytes(b"" if fault == "empty" else b"text")

    def failing(path):
        if path.endswith(name):
            raise OSError(5, "Input/output error")
        return open(path, "rb")

    for module in (content_module, documents_module) if fault == "disk" else ():
        monkeypatch.setattr(module, "open_binary", failing)
    corpus = find_corpus([tmp_path])
    bad = [*corpus.unreadable]
    for piece in corpus.pieces:
        bad += [found for found in read_documents(piece, "text") if isinstance(found, Bad)]
    if fault == "empty" and not name.endswith((".gz", ".zst", ".parquet")):
        assert not bad
    else:
        assert [(one.where, one.many) for one in bad] == [(name, many)]


@pytest.mark.parametrize(
    ("names", "options", "message"),
    [
        (["absent"], {}, "absent: no such"),
        (["."], {}, "no file with text"),
        (["."], {}, r"1 file skipped: 1 \.bin \(to read such files, use --extensions"),
    ],
)
def test_no_input_is_refused_in_one_sentence(tmp_path, names, options, message):
    write(tmp_path, x_dot_bin="4")
    (tmp_path / "a.txt").write_text("")
    with pytest.raises(UserError, match=message):
        find_corpus([tmp_path / name for name in names], **options)


def test_each_jsonl_line_is_read_once_wherever_the_file_is_cut(tmp_path):
    lines = [json.dumps({"text": "é" * i}) for i in range(1, 12)]
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join([*lines[:5], "", *lines[5:]]))  # a blank line, and no line end at the end
    size = path.stat().st_size
    for step in (1, 7, 20, size):
        pieces = whole(File(str(path), "a", size, "lines")).parts(step)
        documents = [document for piece in pieces for document in read_documents(piece, "text")]
        assert documents == ["é" * i for i in range(1, 12)]


BAD_LINES = {
    b"{": "not JSON",
    b'["text"]': "no text",
    b'{"body": "x"}': "no text",
    b'{"text": 3}': "no text",
    b"7": "no text",
    b'{"text": "\\ud800"}': "not UTF-8",
    b'{"text": "\xff"}': "not UTF-8",
    b"[" * 100_000: "not JSON",
}


@pytest.mark.parametrize("line", BAD_LINES, ids=range(len(BAD_LINES)))
def test_d3_a_malformed_line_is_reported_with_its_place_and_the_next_one_read(tmp_path, line):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "a"}\n' + line + b'\n{"text": " "}\n{"text": "b"}\n')
    first, bad, last = read_documents(Piece(File(str(path), "a.jsonl", 0, "lines")), "text")
    assert (first, last) == ("a", "b")
    assert bad.where == "a.jsonl, line at byte 14" and BAD_LINES[line] in bad.reason


def test_d3_a_text_file_is_one_document_or_bad(tmp_path):
    write(tmp_path, a_dot_txt=b"\xef\xbb\xbfx\r\ny\n", b_dot_txt=b"ab\xffc", c_dot_txt=b" \n")

    def read(name):
        kind = "lines" if name.endswith("jsonl") else "text"
        return list(read_documents(Piece(File(str(tmp_path / name), name, 1, kind)), "text"))

    assert read("a.txt") == ["x\r\ny\n"] and read("c.txt") == []
    assert read("b.txt") == [Bad("b.txt", "not UTF-8 at byte 2")]
    assert read("gone.txt") == [Bad("gone.txt", "No such file or directory")]
    assert read("gone.jsonl") == [Bad("gone.jsonl", "No such file or directory", many=True)]
