"""Parquet through prepare_data. Without pyarrow, only the refusal is tested."""

import numpy as np
import pytest

from forge.data.format import TokenDataset
from forge.runtime.errors import UserError
from forge.tools.prepare import content
from forge.tools.prepare.content import File
from forge.tools.prepare.corpus import find_corpus
from forge.tools.prepare.documents import Bad, read_documents
from forge.tools.prepare.prepare import Request, prepare
from forge.tools.prepare.sample import Piece


def test_without_pyarrow_the_extra_is_named(tmp_path, monkeypatch):
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    monkeypatch.setattr(content, "find_spec", lambda name: None)
    with pytest.raises(
        UserError, match=r"a\.parquet: reading Parquet needs pyarrow.*pip install 'forge\[parquet\]'"
    ):
        find_corpus([tmp_path])


@pytest.fixture
def write(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet")

    def write(values, name="a.parquet", column="text", rows=3):
        path = tmp_path / name
        table = pyarrow.table({"id": list(range(len(values))), column: values})
        pyarrow.parquet.write_table(table, path, row_group_size=rows)
        return path

    return write


def documents(path, begin=0, end=None, key="text"):
    size = path.stat().st_size
    return list(read_documents(Piece(File(str(path), path.name, size, "parquet"), begin, end or size), key))


def test_each_row_is_read_once_wherever_the_file_is_cut(write):
    texts = [f"document {i}" for i in range(10)]
    path = write(texts)
    size = path.stat().st_size
    for cut in range(1, size, 7):
        assert documents(path, 0, cut) + documents(path, cut) == texts


def test_rows_without_text_are_bad_and_blank_ones_left_out(write):
    path = write(["one", None, "  ", "two"])
    assert documents(path) == ["one", Bad("a.parquet, row 1", "no text under the key 'text'"), "two"]


def test_a_file_without_the_column_or_damaged_is_bad(write, tmp_path):
    (bad,) = documents(write(["one"], column="content"))
    assert "no column 'text', only id, content" in bad.reason and bad.many
    assert documents(write(["one"], column="content"), key="content") == ["one"]
    (tmp_path / "b.parquet").write_bytes(b"PAR1 and nothing else")
    (bad,) = documents(tmp_path / "b.parquet")
    assert bad.reason.startswith("not read as Parquet") and bad.many


def test_the_same_dataset_as_from_jsonl(write, tmp_path):
    import json

    texts = [f"document {i} " * (i + 1) for i in range(50)]
    lines = tmp_path / "a.jsonl"
    lines.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    made = []
    for path in (write(texts, rows=7), lines):
        output = tmp_path / f"out{path.suffix}"
        prepare(Request(inputs=(str(path),), tokenizer="bytes", output=output))
        dataset = TokenDataset(output)
        made.append((dataset.documents, dataset.read(0, dataset.tokens)))
    assert made[0][0] == made[1][0] == 50 and np.array_equal(made[0][1], made[1][1])
