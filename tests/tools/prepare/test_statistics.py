import json
from types import SimpleNamespace

from forge.data.tokenizer import load_tokenizer
from forge.tools.prepare.prepare import Request, prepare
from forge.tools.prepare.quality import Quality
from forge.tools.prepare.statistics import document_lengths, page
from scripts.describe_data import main
from tests.support.streams import write_documents


def test_the_page_matches_the_dataset(tmp_path) -> None:
    texts = ["short <b>", "a" * 100, "b" * 100, "b" * 100]
    lines = [json.dumps({"text": text, "source": f"s{len(text)}"}) for text in texts]
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    quality = Quality(duplicates="exact", metadata=("source",))
    request = Request(
        (str(tmp_path / "in.jsonl"),),
        "bytes",
        tmp_path / "out",
        packing="best_fit",
        seq_len=127,
        quality=quality,
    )
    prepare(request)
    tokenizer = load_tokenizer("bytes")
    text = page(tmp_path / "out", tokenizer)
    assert "<th>documents</th><td>3</td>" in text
    assert "left out: exact duplicates</th><td>1 documents" in text
    assert "0.972 bytes per token" in text  # 209 of 215
    assert "<th>s100</th><td>2</td>" in text and "packing best_fit, 127" in text
    assert "short &lt;b&gt;" in text and "a" * 100 in text and "8 to" in text and "64 to" in text
    assert "<h2>Documents</h2>" not in page(tmp_path / "out", None)


def test_the_script_writes_it_and_refuses_a_folder_without_a_dataset(tmp_path, capsys) -> None:
    (tmp_path / "in.txt").write_text("text")
    prepare(Request((str(tmp_path / "in.txt"),), "bytes", tmp_path / "out"))
    assert main([str(tmp_path / "out"), "--output", str(tmp_path / "page.html")]) == 0
    assert "<h1>" in (tmp_path / "page.html").read_text()
    assert main([str(tmp_path / "none")]) == 2 and "not a complete dataset" in capsys.readouterr().err


def test_another_tokenizer_than_the_dataset_s_is_refused(tmp_path, capsys, monkeypatch) -> None:
    (tmp_path / "in.txt").write_text("text")
    prepare(Request((str(tmp_path / "in.txt"),), "bytes", tmp_path / "out"))
    other = SimpleNamespace(fingerprint="of another")
    monkeypatch.setattr("scripts.describe_data.load_tokenizer", lambda _path: other)
    page = tmp_path / "page.html"
    assert main([str(tmp_path / "out"), "--tokenizer", "other", "--output", str(page)]) == 2
    assert "was prepared with another tokenizer" in capsys.readouterr().err and not page.exists()


def test_lengths_of_documents_across_shards(tmp_path) -> None:

    dataset = write_documents(tmp_path / "set", [30, 500, 7], shard_bytes=200)
    assert len(dataset.index.shards) > 4 and document_lengths(dataset).tolist() == [30, 500, 7]
