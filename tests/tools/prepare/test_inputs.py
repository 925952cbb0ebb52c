"""Parts and datasets belong to one input, one filter and one set of test passages; changes of any of them are noticed."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from forge.runtime.errors import UserError
from forge.tools.prepare import part
from forge.tools.prepare import prepare as module
from forge.tools.prepare.prepare import Request, prepare
from forge.tools.prepare.quality import Quality
from forge.tools.prepare.train_tokenizer import train_tokenizer
from tests.support.prepared import documents, text_of

LINES = 400


def write_lines(path: Path, first: str = "line 0000") -> None:
    """Lines of equal size, enough for several chunks."""
    texts = [first, *(f"line {number:04d}" for number in range(1, LINES))]
    path.write_text("".join(json.dumps({"text": text + " word" * 2000}) + "\n" for text in texts))


@pytest.fixture
def request_of(tmp_path) -> Callable[..., Request]:
    write_lines(tmp_path / "lines.jsonl")

    def made(**options) -> Request:
        return Request((str(tmp_path / "lines.jsonl"),), "bytes", tmp_path / "out", **options)

    return made


def interrupt(request: Request, monkeypatch) -> None:
    """Prepare, and end before the parts are joined."""
    with monkeypatch.context() as patch:
        patch.setattr(module, "_check_tally", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            prepare(request)


def change(path: Path) -> None:
    """Change a file's content, and set size and modification time back."""
    before = path.stat()
    write_lines(path, "LINE ZERO")
    assert path.stat().st_size == before.st_size
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_a_restart_makes_chunks_again_whose_content_changed_and_no_others(
    request_of, tmp_path, monkeypatch
) -> None:
    request = request_of()
    interrupt(request, monkeypatch)
    change(tmp_path / "lines.jsonl")
    again, write = [], part.write_part
    monkeypatch.setattr(
        part, "write_part", lambda path, arrays: (again.append(path.name), write(path, arrays))
    )
    prepare(request)
    assert documents(request.output)[0].startswith("LINE ZERO")
    assert again == ["part-00000.npz"]


def test_a_chunk_made_again_and_interrupted_is_not_the_one_before(request_of, tmp_path, monkeypatch) -> None:
    """Even if the file changes back, because half of its tokens were replaced."""
    request = request_of()
    interrupt(request, monkeypatch)
    change(tmp_path / "lines.jsonl")
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(part, "write_part", lambda *_: 1 / 0)
        prepare(request)
    write_lines(tmp_path / "lines.jsonl")
    prepare(request)
    undisturbed = replace(request, output=tmp_path / "undisturbed")
    prepare(undisturbed)
    assert documents(request.output) == documents(undisturbed.output)


def test_files_with_other_times_and_the_same_content_are_not_tokenized_again(
    request_of, tmp_path, monkeypatch, capsys
) -> None:
    request = request_of()
    interrupt(request, monkeypatch)
    write_lines(tmp_path / "lines.jsonl")
    monkeypatch.setattr(part, "write_part", None)
    prepare(request)
    write_lines(tmp_path / "lines.jsonl")
    capsys.readouterr()
    prepare(request)
    assert "already prepared" in capsys.readouterr().out


@pytest.mark.processes
@pytest.mark.parametrize("workers", [1, 2])
def test_a_finished_dataset_of_other_input_is_not_already_prepared(request_of, tmp_path, workers) -> None:
    request = request_of(holdout=0.1, workers=workers)
    prepare(request)
    change(tmp_path / "lines.jsonl")
    with pytest.raises(UserError, match="not made from the present content of --input"):
        prepare(request)
    with open(tmp_path / "lines.jsonl", "a") as file:
        file.write('{"text": "one more"}\n')
    with pytest.raises(UserError, match="not made from the present content of --input"):
        prepare(request)


def test_a_finished_dataset_is_complete_without_its_input(request_of, tmp_path, capsys) -> None:
    request = request_of()
    prepare(request)
    (tmp_path / "lines.jsonl").unlink()
    prepare(replace(request, packing="best_fit", seq_len=100))
    printed = capsys.readouterr()
    assert "sequences of 100" in printed.out and "is not compared" in printed.err


def test_a_dataset_joined_before_a_change_of_the_input_is_not_completed(
    request_of, tmp_path, monkeypatch
) -> None:
    request = request_of(holdout=0.1)
    join = module._join
    with monkeypatch.context() as patch:
        only = lambda folder, split, *rest: join(folder, split, *rest) if split == "train" else 1 / 0  # noqa: E731
        patch.setattr(module, "_join", only)
        with pytest.raises(ZeroDivisionError):
            prepare(request)
    change(tmp_path / "lines.jsonl")
    with pytest.raises(UserError, match="present content of --input"):
        prepare(request)


def test_a_changed_filter_starts_over_and_refuses_a_finished_dataset(
    tmp_path, request_of, monkeypatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    code = "def keep(text, metadata):\n    return 'zero' if 'line 000' + '{}' in text else None\n"

    def request(number: int) -> Request:
        # Python takes a .pyc for current if second and size of the file agree, so the sizes differ.
        (tmp_path / "own_filter.py").write_text(code.format(number) + "#" * number)
        sys.modules.pop("own_filter", None)
        from forge.tools.prepare.quality import load_filter

        load_filter.cache_clear()
        return request_of(quality=Quality(filter="own_filter:keep"))

    interrupt(request(1), monkeypatch)
    prepare(request(2))
    found = documents(tmp_path / "out")
    assert len(found) == LINES - 1 and not any(text.startswith("line 0002") for text in found)
    with pytest.raises(UserError, match="prepared with another code of --filter"):
        prepare(request(3))


def test_changed_test_passages_start_over_and_refuse_a_finished_dataset(
    request_of, tmp_path, monkeypatch
) -> None:
    passages = tmp_path / "passages.txt"
    request = request_of(quality=Quality(decontaminate=(str(passages),), ngram=3))
    passages.write_text("line 0001 word")
    interrupt(request, monkeypatch)
    passages.write_text("line 0001 word\nline 0002 word")
    prepare(request)
    assert len(documents(tmp_path / "out")) == LINES - 2
    passages.write_text("line 0003 word")
    with pytest.raises(UserError, match="prepared with another content of --decontaminate"):
        prepare(request)


@pytest.mark.parametrize("name", ["metadata.jsonl", "tokens-00000.bin"])
def test_files_that_forge_did_not_write_are_not_overwritten(request_of, name: str) -> None:
    request = request_of(quality=Quality(metadata=("text",)))
    mine = request.output / name
    mine.parent.mkdir(parents=True)
    mine.write_text("my only copy")
    with pytest.raises(UserError, match=f"{name}: would be overwritten"):
        prepare(request)
    assert mine.read_text() == "my only copy"
    mine.unlink()
    prepare(request)
    assert not (request.output / ".parts").exists()


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("metadata.jsonl", {"quality": Quality(metadata=("text",))}),
        ("train/tokens-00000.bin", {"holdout": 0.2}),
    ],
)
def test_an_interrupted_run_with_other_options_does_not_permit_to_overwrite_files(
    request_of, monkeypatch, name: str, options: dict[str, Any]
) -> None:
    interrupt(request_of(), monkeypatch)
    mine = request_of().output / name
    mine.parent.mkdir(exist_ok=True)
    mine.write_text("my only copy")
    with pytest.raises(UserError, match=f"{name}: would be overwritten"):
        prepare(request_of(**options))
    assert mine.read_text() == "my only copy"


def test_files_of_an_interrupted_run_are_overwritten(request_of, monkeypatch) -> None:
    request = request_of(quality=Quality(metadata=("text",)), holdout=0.2)
    interrupt(request, monkeypatch)
    for name in ("train/metadata.jsonl", "validation/tokens-00000.bin"):
        (request.output / name).parent.mkdir(exist_ok=True)
        (request.output / name).touch()
    prepare(request)


def test_files_that_forge_did_not_write_are_not_removed(request_of) -> None:
    request = request_of()
    mine = request.output / ".parts" / "mine"
    mine.parent.mkdir(parents=True)
    mine.write_text("my only copy")
    prepare(request)
    assert [path.name for path in mine.parent.iterdir()] == ["mine"]


def test_test_sets_without_an_ngram_are_an_error(request_of, tmp_path) -> None:
    (tmp_path / "short.jsonl").write_text('{"text": "What is the capital of France?"}\n')
    request = request_of(quality=Quality(decontaminate=(str(tmp_path / "short.jsonl"),)))
    with pytest.raises(UserError, match="no document has --ngram 13 words, so nothing would be compared"):
        prepare(request)


def test_unread_files_under_decontaminate_are_errors(request_of, tmp_path) -> None:
    folder = tmp_path / "tests"
    folder.mkdir()
    (folder / "a.txt").write_text("line 0001 word")
    (folder / "b.csv").write_text("line 0002 word")
    request = request_of(quality=Quality(decontaminate=(str(folder),), ngram=3))
    with pytest.raises(UserError, match=r"--decontaminate .*files with \.csv would be skipped"):
        prepare(request)
    (folder / "b.csv").unlink()
    (folder / "c.txt").symlink_to(folder / "gone.txt")
    with pytest.raises(UserError, match=r"--decontaminate c\.txt: "):
        prepare(request)
    (folder / "c.txt").unlink()
    (folder / "d.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match=r"--decontaminate d\.txt: not UTF-8"):
        prepare(request)
    assert not (tmp_path / "out").exists()


def test_non_utf_8_names_are_read_and_reported(tmp_path, capsys) -> None:
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/in-\xe9"))
    folder.mkdir()
    for number in range(3):
        name = os.fsencode(folder) + b"/caf\xe9-%d.txt" % number
        Path(os.fsdecode(name)).write_text(f"text {number}")
    Path(os.fsdecode(os.fsencode(folder) + b"/bad\xe9\x1b[2J.txt")).write_bytes(b"\xff")
    request = Request((str(folder),), "bytes", tmp_path / "out", max_bad_fraction=0.5)
    prepare(request)
    assert sorted(documents(tmp_path / "out")) == ["text 0", "text 1", "text 2"]
    assert "bad\\udce9\\x1b[2J.txt: not UTF-8" in capsys.readouterr().err
    prepare(request)
    assert "already prepared" in capsys.readouterr().out


def test_a_file_system_without_locks_gives_a_warning(request_of, monkeypatch, capsys) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    request = request_of()
    prepare(replace(request, part=(1, 1)))
    prepare(request)
    assert len(documents(request.output)) == LINES
    assert "its file system has no locks" in capsys.readouterr().err


def test_links_leading_out_of_a_folder_are_skipped(tmp_path, capsys) -> None:
    folder, secret = tmp_path / "in", tmp_path / "secret.txt"
    (folder / "below").mkdir(parents=True)
    secret.write_text("secret")
    (folder / "a.txt").symlink_to(secret)
    (folder / "below" / "b.txt").write_text("own text")
    (folder / "c.txt").symlink_to("below/b.txt")
    prepare(Request((str(folder),), "bytes", tmp_path / "out"))
    assert documents(tmp_path / "out") == ["own text"]
    assert "1 links out of the folder" in capsys.readouterr().err
    named = Request((str(folder / "a.txt"),), "bytes", tmp_path / "named")
    prepare(named)
    assert documents(tmp_path / "named") == ["secret"]


def test_a_tokenizer_is_not_trained_on_a_tenth_of_the_documents(tmp_path) -> None:
    lines = [{"content": text_of(number)} for number in range(90)] + [{"text": text_of(1)}] * 10
    file = tmp_path / "a.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(
        UserError, match=r"90 of 100 documents are bad.*no text under the key 'text'.*--text-key"
    ):
        train_tokenizer([file], tmp_path / "tokenizer", 272)
    assert not (tmp_path / "tokenizer" / "tokenizer.model").exists()
    good = [{"text": text_of(number)} for number in range(199)]
    file.write_text("".join(json.dumps(line) + "\n" for line in [*good, {"content": ""}]))
    train_tokenizer([file], tmp_path / "tokenizer", 272)


def test_parts_of_machines_with_own_copies_of_the_input_are_joined(request_of, tmp_path) -> None:
    """The copies have other inodes and times."""
    request, file = request_of(), tmp_path / "lines.jsonl"
    prepare(replace(request, part=(1, 2)))
    shutil.copy2(file, tmp_path / "copy")
    file.unlink()
    (tmp_path / "copy").rename(file)
    prepare(replace(request, part=(2, 2)))
    prepare(request)
    assert len(documents(request.output)) == LINES


def test_a_filter_raising_in_a_worker_is_one_sentence_with_file_and_document(request_of, tmp_path) -> None:
    (tmp_path / "broken.py").write_text(
        "def keep(text, metadata):\n    return 1 / ('line 0003' not in text)\n"
    )
    script = Path(module.__file__).parents[3] / "scripts" / "prepare_data.py"
    command = [sys.executable, str(script), "--input", str(tmp_path / "lines.jsonl"), "--tokenizer=bytes"]
    command += ["--output", str(tmp_path / "out"), "--filter=broken:keep", "--workers=2"]
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{script.parents[1]}"}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 2 and "Traceback" not in ended.stderr
    assert "failed on document 4 of lines.jsonl, which begins 'line 0003 word" in ended.stderr
