"""A large text file is tokenized in parts, by several workers, into the ids of the whole."""

import gzip
import random
import tracemalloc
from pathlib import Path

import pytest

from forge.data.format import TokenDataset
from forge.data.tokenizer import ByteTokenizer, load_tokenizer
from forge.runtime.errors import UserError
from forge.tools.prepare import long_text
from forge.tools.prepare.content import File
from forge.tools.prepare.documents import Bad
from forge.tools.prepare.long_text import check_text, digest_of, read_part, slices, text_parts
from forge.tools.prepare.prepare import Request, prepare
from forge.tools.prepare.train_tokenizer import train_tokenizer

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer([HERE], folder, 800)
    return folder


def text_file(folder, text):
    path = folder / "long.txt"
    path.write_bytes(text.encode())
    return File(str(path), "long.txt", path.stat().st_size)


@pytest.mark.long
@pytest.mark.parametrize("size", [1, 3, 50, 3000, 10**6])
@pytest.mark.parametrize("window", [16, 1 << 14])
def test_parts_have_each_character_once_and_the_ids_of_the_whole(tmp_path, model, monkeypatch, size, window):
    monkeypatch.setattr(long_text, "_WINDOW", window)
    monkeypatch.setattr(long_text, "_AT_ONCE", 40)
    text = "".join(
        random.Random(size).choices(["def ", "é", "日本", "🎉", "\n", "x" * 90, " = ", "1"], k=400)
    )
    file = text_file(tmp_path, text)
    for tokenizer in (load_tokenizer(model), ByteTokenizer()):
        found = [part for piece in text_parts(file, size, "train") for part in read_part(piece, tokenizer)]
        assert "".join(found) == text and len(found) > 20
        assert [i for part in found for i in tokenizer.encode(part)] == tokenizer.encode(text)
        assert [*slices(text, tokenizer)] != [text]
        assert [i for part in slices(text, tokenizer) for i in tokenizer.encode(part)] == tokenizer.encode(
            text
        )


@pytest.mark.parametrize("left", [0, 1, 700, 2999])
def test_a_text_that_shrinks_or_changes_while_it_is_read_is_refused(tmp_path, model, monkeypatch, left):
    monkeypatch.setattr(long_text, "_AT_ONCE", 100)
    file = text_file(tmp_path, "a word " * 500)
    parts = list(text_parts(file, 1000, "train"))
    with open(file.path, "r+b") as content:
        content.truncate(left)
        if left == 2999:
            content.write(b"\xff" * 501)  # as long as before, but not UTF-8
    for tokenizer in (load_tokenizer(model), ByteTokenizer()):
        with pytest.raises(
            UserError, match=r"^long\.txt: has changed while it was read; run the same"
        ) as found:
            for part in parts:
                list(read_part(part, tokenizer))
        assert found.value.exit_code == 1


@pytest.mark.processes
def test_a_dataset_does_not_depend_on_the_parts_and_no_worker_sees_the_whole(tmp_path, model, monkeypatch):
    """Two large files with a byte order mark, one of them held out."""
    source = "".join(path.read_text() for path in HERE.glob("*.py"))
    inputs = tmp_path / "in"
    inputs.mkdir()
    number, source = 0, source * (1 + (3 << 19) // len(source))
    for split_wanted in (True, False):  # a text of each split
        while (int.from_bytes(digest_of(f"{number}{source}".encode()), "little") < 1 << 63) != split_wanted:
            number += 1
        (inputs / f"{number}.txt").write_bytes(b"\xef\xbb\xbf" + f"{number}{source}".encode())
    (inputs / "small.txt").write_text("small")
    made = {}
    for how in ("parts", "whole"):
        if how == "whole":
            monkeypatch.setattr("forge.data.tokenizer.SentencePieceTokenizer.can_cut", False)
        folder = tmp_path / how
        workers = 2 if how == "parts" else 1
        prepare(Request((str(inputs),), str(model), folder, holdout=0.5, workers=workers))
        made[how] = [TokenDataset(folder / split).index for split in ("train", "validation")]
    for cut, whole in zip(made["parts"], made["whole"], strict=True):
        assert cut.shards == whole.shards and cut.text_bytes == whole.text_bytes > 1 << 20


def test_no_long_string_is_tokenized_at_once(tmp_path, monkeypatch):
    lengths = []
    encode = ByteTokenizer.encode
    monkeypatch.setattr(
        ByteTokenizer, "encode", lambda self, text: lengths.append(len(text)) or encode(self, text)
    )
    text = "some words\n" * 200_000
    (tmp_path / "a.txt").write_text(text)
    (tmp_path / "b.jsonl").write_text('{"text": "' + "x " * 1_000_000 + '"}')
    prepare(Request((str(tmp_path),), "bytes", tmp_path / "out"))
    assert sum(lengths) == len(text) + 2_000_000 and max(lengths) <= 1 << 18


@pytest.mark.long
def test_memory_does_not_grow_with_a_chunk(tmp_path):
    """4 MB of text are 8 MB of tokens of two bytes, in one compressed file and so in one chunk."""
    with gzip.open(tmp_path / "a.jsonl.gz", "wt") as file:
        file.writelines(f'{{"text": "{number:06d} {"a b " * 100}"}}\n' for number in range(10_000))
    tracemalloc.start()
    try:
        prepare(Request((str(tmp_path / "a.jsonl.gz"),), "bytes", tmp_path / "out"))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert TokenDataset(tmp_path / "out").tokens > 4_000_000 and peak < 6_000_000


@pytest.mark.parametrize(
    ("content", "place"), [(b"a\xff", 1), (b"a" * (1 << 20) + b"\xff", 1 << 20), (b"ab\xe6\x97", 2)]
)
def test_a_large_non_utf8_text_is_one_bad_document(tmp_path, content, place):
    (tmp_path / "long.txt").write_bytes(content)
    assert check_text(File(str(tmp_path / "long.txt"), "long.txt", 1)) == Bad(
        "long.txt", f"not UTF-8 at byte {place}"
    )


def test_a_bad_large_text_is_counted_among_the_others(tmp_path, capsys):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_bytes(b"\xff" * (2 << 20))
    (tmp_path / "in" / "b.txt").write_text("good")
    prepare(Request((str(tmp_path / "in"),), "bytes", tmp_path / "out", max_bad_fraction=0.5))
    assert "1 of 2 documents are bad and left out:\n  a.txt: not UTF-8 at byte 0" in capsys.readouterr().err


@pytest.mark.long
def test_a_large_text_unreadable_before_takes_its_place_among_the_others(tmp_path, monkeypatch):
    (tmp_path / "in").mkdir()
    for name in "abc":
        (tmp_path / "in" / f"{name}.txt").write_text(f"{name} text\n" * 300_000)

    def run(output):
        prepare(Request((str(tmp_path / "in"),), "bytes", tmp_path / output))
        return TokenDataset(tmp_path / output).fingerprint

    def unreadable(file):
        return Bad(file.key, "bad disk") if file.key == "a.txt" else check_text(file)

    with monkeypatch.context() as patched:
        patched.setattr("forge.tools.prepare.chunks.check_text", unreadable)
        with pytest.raises(UserError, match="bad disk"):
            run("out")
    assert run("out") == run("fresh")
