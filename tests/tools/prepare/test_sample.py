"""A budget of bytes takes a part of every file, spread through it, and the rest is counted."""

import gzip
import json
import random

import pytest

from forge.runtime.errors import UserError
from forge.tools.prepare.content import File
from forge.tools.prepare.corpus import find_corpus
from forge.tools.prepare.documents import Bad, read_documents
from forge.tools.prepare.sample import Piece, sample, whole
from forge.tools.prepare.train_tokenizer import train_tokenizer


def texts(corpus, key="text"):
    """File -> its documents in the sample."""
    found = {piece.file.key: list(read_documents(piece, key)) for piece in corpus.pieces}
    assert not any(isinstance(document, Bad) for documents in found.values() for document in documents)
    return found


def lines(folder, name, text, count):
    numbered = (json.dumps({"text": f"{text} {number:06d}"}) for number in range(count))
    (folder / name).write_text("\n".join(numbered))


def places(documents):
    return [int(document.split()[1]) for document in documents]


def test_files_share_the_budget_in_proportion_to_their_size_and_are_read_throughout(tmp_path):
    for name, count in (("a", 20_000), ("b", 10_000), ("c", 10_000)):
        lines(tmp_path, f"{name}.jsonl", name, count)
    corpus = find_corpus([tmp_path], max_bytes=160_000)
    found = {key[0]: places(documents) for key, documents in texts(corpus).items()}
    assert len(found["a"]) == pytest.approx(160_000 / 42, rel=0.05)
    assert len(found["b"]) == pytest.approx(len(found["a"]) / 2, rel=0.15)
    assert len(found["c"]) == pytest.approx(len(found["a"]) / 2, rel=0.15)
    for name, numbers in found.items():
        count = 20_000 if name == "a" else 10_000
        assert numbers == sorted(set(numbers)) and numbers[0] < count / 8 and numbers[-1] > count * 7 / 8
    (note,) = corpus.notes()
    assert "a sample of 0.2 of 0.8 MB: of 3 files 3 are read in part and 0 left out" in note


def test_a_text_file_beyond_the_budget_is_cut_at_characters(tmp_path):
    text = "".join(random.Random(0).choices("aé日🎉\n", k=100_000))
    (tmp_path / "a.txt").write_text(text)
    (tmp_path / "README.md").write_text("b" * 3000)
    for budget in (20_001, 20_002, 20_003, 100_000):
        corpus = find_corpus([tmp_path], max_bytes=budget)
        parts = texts(corpus)["a.txt"]
        assert 0.8 * budget < sum(len(part.encode()) for part in parts) <= budget
        assert all(part in text for part in parts) and len(parts) > 3
        assert text.index(parts[0]) < 20_000 and text.index(parts[-1]) > 80_000
        assert "1 are read in part and 1 left out" in corpus.notes()[0]


def test_many_small_files_are_sampled_whole_by_a_path_independent_hash(tmp_path):
    for place in ("here", "there/deeper"):
        (tmp_path / place).mkdir(parents=True)
        for number in range(40):
            (tmp_path / place / f"f{number}.txt").write_text(f"{number:03d}" * 10)
    small, large = (texts(find_corpus([tmp_path / "here"], max_bytes=size)) for size in (150, 600))
    assert len(small) == 5 and len(large) == 20 and set(small) < set(large)
    assert texts(find_corpus([tmp_path / "there" / "deeper"], max_bytes=150)) == small
    assert "35 left out" in find_corpus([tmp_path / "here"], max_bytes=150).notes()[0]


def test_within_the_budget_everything_is_read(tmp_path):
    lines(tmp_path, "a.jsonl", "a", 10)
    (tmp_path / "b.txt").write_text("b" * 5000)
    corpus = find_corpus([tmp_path], max_bytes=10_000)
    assert texts(corpus) == texts(find_corpus([tmp_path])) and corpus.notes() == []


def test_compressed_files_count_with_the_size_of_their_text(tmp_path):
    lines(tmp_path, "a.jsonl", "a", 20_000)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress((tmp_path / "a.jsonl").read_bytes()))
    found = texts(find_corpus([tmp_path], max_bytes=200_000))
    numbers = places(found["b.jsonl.gz"])
    assert abs(len(numbers) - len(found["a.jsonl"])) < 300
    assert numbers == sorted(set(numbers)) and numbers[0] < 1000 and numbers[-1] > 15_000


def test_a_compressed_file_is_not_read_to_its_end_for_a_small_part(tmp_path, monkeypatch):
    monkeypatch.setattr("forge.tools.prepare.sample._LEAST_REACH", 1)
    file = File(str(tmp_path / "a.gz"), "a.gz", 1 << 20, "lines", "gzip")
    (tmp_path / "a.gz").write_bytes(gzip.compress(b'{"text": "a"}\n' * 100_000))
    ((piece,), taken, _) = sample([file], 4096, "text")
    assert taken == 4096 and piece.end <= 16 * 4096


def test_a_sample_of_parquet_is_rows_of_all_parts_of_a_row_group(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    draw = random.Random(0)
    values = [f"row {number:06d} {draw.getrandbits(1200)}" for number in range(3000)]
    for name, rows in (("one.parquet", 3000), ("many.parquet", 100)):
        parquet.write_table(pyarrow.table({"text": values}), tmp_path / name, row_group_size=rows)
    for found in texts(find_corpus([tmp_path], max_bytes=200_000)).values():
        numbers = places(found)
        assert numbers == sorted(set(numbers)) and 150 < len(numbers) < 350
        assert numbers[0] < 300 and numbers[-1] > 2700


@pytest.mark.parametrize("size", [1, 30, 200, 10_000])
def test_the_parts_of_a_piece_have_its_documents(tmp_path, size):
    lines(tmp_path, "a.jsonl", "a", 300)
    path = tmp_path / "a.jsonl"
    file = File(str(path), "a.jsonl", path.stat().st_size, "lines")
    for piece in (whole(file), Piece(file, 13, 9000, 70, 501)):
        documents = list(read_documents(piece, "text"))
        assert documents == [text for part in piece.parts(size) for text in read_documents(part, "text")]
        assert documents and sum(part.size for part in piece.parts(size)) == piece.size


def test_a_tokenizer_is_trained_on_files_larger_than_the_sample(tmp_path, capsys):
    for name in ("alpha", "beta", "gamma"):
        (tmp_path / f"{name}.txt").write_text(f"{name} {name}s\n" * 20_000)
    tokenizer = train_tokenizer([tmp_path], tmp_path / "out", 280, max_bytes=60_000)
    assert all(len(tokenizer.encode(name)) < len(name) for name in ("alpha", "beta", "gamma"))
    output = capsys.readouterr().err
    assert "of 3 files 3 are read in part" in output and "280 pieces from 0.1 MB in 3 files" in output


def test_a_sample_without_text_is_refused(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "x" * 100_000}))
    with pytest.raises(UserError, match="--max-bytes 5000: the sample holds no document; raise --max-bytes"):
        train_tokenizer([tmp_path / "a.jsonl"], tmp_path / "out", 280, max_bytes=5000)
