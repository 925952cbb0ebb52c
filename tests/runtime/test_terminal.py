"""Messages to a hanging reader."""

from __future__ import annotations

import contextlib
import os
import sys

import pytest

from forge.runtime import terminal
from forge.runtime.errors import FAILED, UserError
from forge.runtime.terminal import PatientStream, print_result


@pytest.fixture
def pipe() -> tuple[int, int]:
    reader, writer = os.pipe()
    yield reader, writer
    os.close(reader)
    os.close(writer)


def fill(writer: int) -> int:
    """Write to the pipe until it is full; return the number of bytes."""
    os.set_blocking(writer, False)
    total = 0
    for size in (4096, 1):
        while True:
            try:
                total += os.write(writer, b"x" * size)
            except BlockingIOError:
                break
    os.set_blocking(writer, True)
    return total


def read(reader: int, until: str) -> list[str]:
    text = b""
    while not text.endswith(until.encode()):
        text += os.read(reader, 65536)
    return text.decode().lstrip("x").splitlines()


def test_a_text_is_written_when_write_returns(pipe) -> None:
    reader, writer = pipe
    PatientStream(writer).write("one\n")
    os.set_blocking(reader, False)
    assert os.read(reader, 100) == b"one\n"


def test_a_hanging_reader_delays_nobody_and_dropped_lines_are_counted(pipe, monkeypatch) -> None:
    monkeypatch.setattr(terminal, "MOST", 3)
    reader, writer = pipe
    fill(writer)
    stream = PatientStream(writer)
    for number in range(10):
        stream.write(f"line {number}\n")
    lines = read(reader, "stderr\n")
    assert lines == [
        *(f"line {number}" for number in range(3)),
        "forge: 7 lines dropped here: nobody read stderr",
    ]
    stream.write("after\n")
    assert read(reader, "after\n") == ["after"]


def test_a_forked_child_writes_though_its_parent_waits(pipe) -> None:
    reader, writer = pipe
    fill(writer)
    stream = PatientStream(writer)
    stream.write("parent\n")
    other_reader, other_writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.dup2(other_writer, writer)
        stream.write("child\n")
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert os.read(other_reader, 100) == b"child\n"
    assert read(reader, "parent\n") == ["parent"]
    os.close(other_reader)
    os.close(other_writer)


def test_a_closed_reader_raises_nothing() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    PatientStream(writer).write("text\n")
    os.close(writer)


def test_a_descriptor_made_non_blocking_elsewhere_loses_nothing(pipe) -> None:
    reader, writer = pipe
    fill(writer)
    os.set_blocking(writer, False)
    stream = PatientStream(writer)
    stream.write("kept\n")
    assert read(reader, "kept\n") == ["kept"]


def test_a_result_into_a_closed_pipe_is_no_error(monkeypatch) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        print_result("text")


def test_a_result_onto_a_full_disk_is_an_error_in_one_sentence(monkeypatch) -> None:
    stream = open("/dev/full", "w")  # noqa: SIM115
    monkeypatch.setattr(sys, "stdout", stream)
    with pytest.raises(UserError, match="stdout: cannot be written: No space left on device") as caught:
        print_result("text")
    assert caught.value.exit_code == FAILED
    with contextlib.suppress(OSError):
        stream.close()  # writes again
