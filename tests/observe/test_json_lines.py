import errno
import json
import math
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge.observe.json_lines import JsonLines, warn_of_gap


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "metrics.jsonl"


def test_a_reader_sees_every_line_when_append_returns(path):
    metrics = JsonLines(path)
    for step in (1, 2):
        metrics.append(step=step, loss=0.5)
        assert read(path)[-1] == {"step": step, "loss": 0.5}


@given(value=st.floats(allow_nan=False, allow_infinity=False))
def test_floats_read_back_exactly(tmp_path_factory, value):
    path = tmp_path_factory.mktemp("metrics") / "metrics.jsonl"
    metrics = JsonLines(path)
    metrics.append(step=1, loss=value)
    metrics.close()
    read_back = read(path)[0]["loss"]
    assert read_back == value and math.copysign(1, read_back) == math.copysign(1, value)


def test_non_finite_numbers_are_null_at_any_depth(path):
    JsonLines(path).append(step=1, loss=math.nan, eval={"a": math.inf, "b": [1.0, -math.inf]})
    assert read(path) == [{"step": 1, "loss": None, "eval": {"a": None, "b": [1.0, None]}}]


def test_cut_drops_all_lines_after_the_step_evaluations_too(path):
    metrics = JsonLines(path)
    for step in range(1, 5):
        metrics.append(step=step, loss=1.0)
        metrics.append(step=step, eval={"held_out": 2.0})
    before = path.read_bytes().splitlines(keepends=True)
    metrics.cut(2)
    assert path.read_bytes() == b"".join(before[:4])
    metrics.append(step=3, loss=1.5)
    assert [line["step"] for line in read(path)] == [1, 1, 2, 2, 3]


def test_cut_to_the_beginning_leaves_an_empty_file(path):
    metrics = JsonLines(path)
    metrics.append(step=1, loss=1.0)
    metrics.cut(0)
    assert path.read_bytes() == b""


@pytest.mark.parametrize("torn", [b'{"step": 2, "lo', b'{"step": 1}'])
def test_cut_drops_a_torn_last_line(path, torn):
    path.write_bytes(b'{"step": 1}\n' + torn)
    JsonLines(path).cut(5)
    assert path.read_bytes() == b'{"step": 1}\n'


def test_cut_drops_and_reports_unreadable_lines(path, caplog):
    path.write_bytes(b'\0\0\0\n[]\n{"step": 1}\n{"step": "x"}\n')
    JsonLines(path).cut(5)
    assert path.read_bytes() == b'{"step": 1}\n'
    assert "line 1 " in caplog.text and "line 2 " in caplog.text and "line 4 " in caplog.text


def test_lines_waiting_for_a_full_disk_are_cut_too(path, monkeypatch):
    metrics, write = JsonLines(path), os.write
    metrics.append(step=1, loss=1.0)
    room = [5, 0]

    def full(descriptor, content):
        if not room[0]:
            raise OSError("No space left on device")
        return write(descriptor, content[: room.pop(0)])

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", full)
        for step in (2, 3):
            metrics.append(step=step, loss=1.0)
    metrics.cut(2)
    metrics.append(step=3, loss=2.0)
    assert [(line["step"], line["loss"]) for line in read(path)] == [(1, 1.0), (2, 1.0), (3, 2.0)]


@pytest.mark.parametrize(
    ("lines", "step", "origin", "gap"),
    [
        ((), 1, 0, ""),
        ((), 2, 0, "1 to 2"),
        ((1, 2, 3), 6, 0, "4 to 6"),
        ((1, 10, 20, 30), 35, 0, ""),
        ((), 500, 500, ""),
        ((), 510, 500, "501 to 510"),
        ((501, 502), 502, 500, ""),
        ((501, 502), 510, 500, "503 to 510"),
        ((499, 500), 500, 500, ""),
    ],
)
def test_lost_lines_are_reported_from_the_origin_on(path, caplog, lines, step, origin, gap):
    for line in lines:
        JsonLines(path).append(step=line, loss=1.0)
    warn_of_gap(path, step, 1, origin)
    assert caplog.text.count("lacks the training lines") == bool(gap)
    assert f"of steps {gap}" in caplog.text or not gap


def test_cut_of_no_file_makes_none(path):
    JsonLines(path).cut(3)
    assert not path.exists()


def test_cut_with_nothing_to_drop_does_not_touch_the_file(path):
    JsonLines(path).append(step=1, loss=1.0)
    before = path.stat()
    JsonLines(path).cut(1)
    after = path.stat()  # except the access time, which may have changed
    assert (after.st_ino, after.st_mtime_ns, after.st_size) == (
        before.st_ino,
        before.st_mtime_ns,
        before.st_size,
    )


def test_a_crash_in_the_middle_of_a_cut_loses_nothing(path, monkeypatch):
    JsonLines(path).append(step=1, loss=1.0)
    before = path.read_bytes()

    def crash(*_):
        raise OSError("crash")

    with monkeypatch.context() as patched, pytest.raises(OSError, match="crash"):
        patched.setattr(os, "replace", crash)
        JsonLines(path).cut(0)
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


def test_a_line_after_a_torn_one_is_separate(path):
    path.write_bytes(b'{"event": "sta')
    JsonLines(path).append(event="resumed")
    torn, line = path.read_text().splitlines()
    assert torn == '{"event": "sta' and json.loads(line)["event"] == "resumed"


def test_lines_refused_by_a_full_disk_cost_one_warning_and_are_written_later(path, monkeypatch, caplog):
    lines = JsonLines(path)
    lines.append(event="a")
    write, calls = os.write, []

    def half_then_full(descriptor, content):
        calls.append(content)
        if len(calls) == 1:
            return write(descriptor, content[:10])
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(os, "write", half_then_full)
        lines.append(event="b")
        lines.append(event="c")
    assert len(caplog.records) == 1
    lines.append(event="d")
    assert [line["event"] for line in read(path)] == ["a", "b", "c", "d"]
