"""exit_code_of: an expected error is one sentence and the documented exit code."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path

import pytest

from forge.runtime.errors import BAD_CONFIG, FAILED, FINISHED
from forge.runtime.files import replace_atomically
from scripts import elastic, report
from scripts.options import exit_code_of


def test_a_wrong_path_is_named_as_typed_with_exit_code_2(tmp_path: Path, capsys) -> None:
    path = tmp_path / "missing" / "r.html"
    assert exit_code_of(lambda: replace_atomically(path, b"")) == BAD_CONFIG
    assert capsys.readouterr().err == f"forge: {path}: No such file or directory\n"


def test_a_full_disk_is_exit_code_1_with_the_path(tmp_path: Path, monkeypatch, capsys) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    assert exit_code_of(lambda: replace_atomically(tmp_path / "r.html", b"")) == FAILED
    assert capsys.readouterr().err == f"forge: {tmp_path}/r.html: No space left on device\n"
    assert not any(tmp_path.iterdir())


def test_a_closed_stdout_is_no_error(monkeypatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    assert exit_code_of(lambda: print("text")) == FINISHED


def test_layouts_into_a_closed_pipe_end_quietly(monkeypatch) -> None:
    def closed(given: object) -> int:
        raise BrokenPipeError

    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        monkeypatch.setattr(elastic, "_node", closed)
        assert elastic.main(["layouts", "--nodes=1"]) == FINISHED


def test_a_live_report_writes_no_page(capsys) -> None:
    with pytest.raises(SystemExit, match="2"):
        report.main(["run", "--live", "--output", "a.html"])
    assert "--output: cannot be combined with --live" in capsys.readouterr().err
