import json
from pathlib import Path

import numpy as np
import pytest

from forge.data.format import INDEX, TokenDataset
from forge.data.integrity import check_files
from forge.data.tokenizer import ByteTokenizer
from forge.runtime.errors import UserError
from forge.tools.prepare import part
from forge.tools.prepare import prepare as module
from forge.tools.prepare.documents import Bad, read_documents
from forge.tools.prepare.output import locked
from forge.tools.prepare.prepare import Request, prepare


@pytest.fixture
def text(tmp_path):
    """Two inputs' worth of text: 30 small files, and JSONL large enough to be cut into several chunks."""
    folder = tmp_path / "text"
    folder.mkdir()
    for i in range(30):
        (folder / f"f{i:02d}.txt").write_text(f"file {i} says é\n" * (i + 1))
    with open(folder / "lines.jsonl", "w") as file:
        for i in range(300):
            file.write(json.dumps({"text": f"line {i} " + "word " * 2000}) + "\n")
    return folder


def run(text, output, **options):
    prepare(Request(inputs=(str(text),), tokenizer="bytes", output=Path(output), **options))


def documents(folder):
    dataset = TokenDataset(folder)
    assert not any(check.problem for check in check_files(folder))
    tokens = dataset.read(0, dataset.tokens)
    assert len(np.unique(dataset.document_ids(0, dataset.tokens))) == dataset.documents
    pieces = np.split(tokens, np.flatnonzero(tokens == 256)[1:])
    assert all(piece[0] == 256 and piece[-1] == 257 for piece in pieces)
    return [ByteTokenizer().decode(piece.tolist()) for piece in pieces]


def test_documents_come_in_order_with_their_specials(text, tmp_path):
    run(text, tmp_path / "out")
    expected = [(text / f"f{i:02d}.txt").read_text() for i in range(30)]
    expected += [json.loads(line)["text"] for line in (text / "lines.jsonl").read_text().splitlines()]
    assert documents(tmp_path / "out") == expected
    index = TokenDataset(tmp_path / "out").index
    assert index.text_bytes == sum(len(document.encode()) for document in expected)
    assert index.max_token_id == 257 and not (tmp_path / "out" / ".parts").exists()


@pytest.mark.processes
def test_workers_do_not_change_the_result(text, tmp_path):
    run(text, tmp_path / "one", holdout=0.2)
    run(text, tmp_path / "two", holdout=0.2, workers=2)
    for split in ("train", "validation"):
        first, second = (TokenDataset(tmp_path / name / split).fingerprint for name in ("one", "two"))
        assert first == second


def test_holdout_splits_all_documents_and_keeps_copies_on_one_side(tmp_path):
    (tmp_path / "a.jsonl").write_text(
        "".join(json.dumps({"text": f"text {i % 500}"}) + "\n" for i in range(1000))
    )
    run(tmp_path / "a.jsonl", tmp_path / "out", holdout=0.2)
    train, held_out = (documents(tmp_path / "out" / split) for split in ("train", "validation"))
    assert len(train) + len(held_out) == 1000 and 120 < len(held_out) < 280
    assert not set(train) & set(held_out)


@pytest.mark.long
def test_an_interrupted_run_continues(text, tmp_path, monkeypatch, capsys):
    run(text, tmp_path / "whole")
    write, written = part.write_part, []

    def interrupted(path, arrays):
        if len(written) == 2:
            raise KeyboardInterrupt
        written.append(path)
        write(path, arrays)

    monkeypatch.setattr(part, "write_part", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(text, tmp_path / "out")
    with pytest.raises(UserError, match=r"no dataset\.json"):
        TokenDataset(tmp_path / "out")
    again = []
    monkeypatch.setattr(part, "write_part", lambda path, arrays: (again.append(path), write(path, arrays)))
    run(text, tmp_path / "out")
    assert "2 chunks are done" in capsys.readouterr().err
    assert again and not set(again) & set(written)
    assert TokenDataset(tmp_path / "out").fingerprint == TokenDataset(tmp_path / "whole").fingerprint


@pytest.mark.long
def test_a_run_interrupted_between_the_two_datasets_completes(text, tmp_path, monkeypatch):
    join = module._join
    monkeypatch.setattr(
        module,
        "_join",
        lambda folder, split, *rest: join(folder, split, *rest) if split == "train" else 1 / 0,
    )
    with pytest.raises(ZeroDivisionError):
        run(text, tmp_path / "out", holdout=0.2)
    assert TokenDataset(tmp_path / "out" / "train").documents
    monkeypatch.undo()
    run(text, tmp_path / "out", holdout=0.2)
    assert len(documents(tmp_path / "out" / "train")) + len(documents(tmp_path / "out" / "validation")) == 330


@pytest.mark.long
def test_parts_of_other_input_are_not_used(text, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(module, "_check_tally", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run(text, tmp_path / "out")
    monkeypatch.undo()
    (text / "f00.txt").write_text("other")
    run(text, tmp_path / "out")
    assert "starting over" in capsys.readouterr().err and documents(tmp_path / "out")[0] == "other"


@pytest.mark.processes
def test_a_finished_run_is_reported_and_other_options_are_refused(text, tmp_path, monkeypatch, capsys):
    run(text, tmp_path / "out", workers=2)
    monkeypatch.setattr(module, "for_chunks", None)  # no document is read again
    run(text, tmp_path / "out")
    assert "already prepared" in capsys.readouterr().out
    for options, name in [
        ({"max_bytes": 5}, "max_bytes"),
        ({"holdout": 0.5}, "holdout"),
        ({"text_key": "x"}, "text_key"),
    ]:
        with pytest.raises(UserError, match=f"prepared with another {name}"):
            run(text, tmp_path / "out", **options)


def test_a_dataset_of_a_version_without_an_option_is_taken_as_finished(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("some text")
    run(tmp_path / "a.txt", tmp_path / "out")
    index = json.loads((tmp_path / "out" / INDEX).read_text())
    del index["origin"]["options"]["extensions"]
    (tmp_path / "out" / INDEX).write_text(json.dumps(index))
    run(tmp_path / "a.txt", tmp_path / "out")
    assert "already prepared" in capsys.readouterr().out


def test_d3_bad_documents_are_counted_and_too_many_refused(tmp_path, capsys):
    lines = [json.dumps({"text": f"line {i}"}) for i in range(95)] + ["{"] * 5
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    with pytest.raises(
        UserError,
        match=r"5 of 100 documents are bad; --max-bad-fraction .* The first is a\.jsonl, line at byte \d+: not JSON",
    ):
        run(tmp_path / "a.jsonl", tmp_path / "out")
    run(tmp_path / "a.jsonl", tmp_path / "out", max_bad_fraction=0.05)
    output = capsys.readouterr().err
    assert "continuing" in output and "5 of 100 documents are bad" in output
    assert len(documents(tmp_path / "out")) == 95


def test_d3_an_unreadable_file_of_many_documents_is_refused(tmp_path, monkeypatch):
    """Unreadable it would count as one bad document among those of the other files."""
    (tmp_path / "in").mkdir()
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / "in" / name).write_text("".join(f'{{"text": "{name} {i}"}}\n' for i in range(200)))

    def read(piece, text_key, _keys):
        unreadable = piece.file.key == "b.jsonl"
        return [Bad("b.jsonl", "bad disk", many=True)] if unreadable else read_documents(piece, text_key)

    with monkeypatch.context() as patched:
        patched.setattr(part, "read_documents", read)
        with pytest.raises(UserError, match=r"^b\.jsonl: bad disk; an unknown number of documents is lost"):
            run(tmp_path / "in", tmp_path / "out", max_bad_fraction=0.9)
    run(tmp_path / "in", tmp_path / "out")
    assert len(documents(tmp_path / "out")) == 400


def test_d1_an_empty_split_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("one document")
    with pytest.raises(UserError, match=r"out/.*no document with text"):
        run(tmp_path / "a.txt", tmp_path / "out", holdout=0.001)


def test_two_at_once_are_refused(text, tmp_path):
    with (
        locked(tmp_path / "out" / ".parts"),
        pytest.raises(UserError, match="another prepare_data is writing"),
    ):
        run(text, tmp_path / "out")
