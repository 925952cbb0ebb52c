import errno
import fcntl
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from forge.observe import run_directory
from forge.observe.run_directory import RunDirectory
from forge.runtime.causes import Cause
from forge.runtime.errors import BAD_CONFIG, STOPPED, UserError

HOLD = """
import os, pathlib, subprocess, sys, time
from forge.observe.run_directory import RunDirectory
from forge.runtime.causes import Cause
directory = RunDirectory(pathlib.Path(sys.argv[1]))
directory.acquire()
helpers = []
if os.fork() == 0:
    time.sleep(3600)
helpers.append(subprocess.Popen(["sleep", "3600"], close_fds=False, stdout=subprocess.DEVNULL))
print("held", flush=True)
time.sleep(3600)
"""


@pytest.fixture
def holder(tmp_path):
    """Yield a process that holds `tmp_path`, with a forked and a spawned helper, in their own process group."""
    arguments = [sys.executable, "-c", HOLD, str(tmp_path)]
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout.readline() == "held\n"
    yield process
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()


def test_makes_the_folders_and_leaves_nothing_else_behind(tmp_path):
    directory = RunDirectory(tmp_path / "runs" / "one")
    directory.acquire()
    assert {path.name for path in directory.root.iterdir()} == {".lock", "checkpoints", "logs", "tensorboard"}
    assert not any(directory.checkpoints.iterdir())


@pytest.mark.parametrize("parent", ["file", "/proc"])
def test_an_impossible_output_folder_is_refused_in_one_sentence(tmp_path, parent):
    (tmp_path / "file").write_text("")
    root = tmp_path / parent / "run"
    with pytest.raises(UserError) as caught:
        RunDirectory(root).acquire()
    assert caught.value.exit_code == BAD_CONFIG
    assert str(root) in str(caught.value) and "run.output_dir" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES, errno.ENOSPC, errno.EDQUOT])
def test_s3_the_probe_write_finds_a_read_only_or_full_disk(tmp_path, monkeypatch, code):
    def refuse(dir):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    with pytest.raises(UserError, match=os.strerror(code)) as caught:
        RunDirectory(tmp_path).acquire()
    full = code in (errno.ENOSPC, errno.EDQUOT)
    assert (caught.value.exit_code, caught.value.cause is Cause.DISK_FULL) == (1 if full else 2, full)
    assert ("point run.output_dir" in str(caught.value)) != full


def test_an_unopenable_lock_file_is_a_user_error(tmp_path):
    (tmp_path / ".lock").mkdir()
    with pytest.raises(UserError, match="cannot be opened"):
        RunDirectory(tmp_path).acquire()


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(run_directory, "PATIENCE_S", 0.0)


def test_s6_a_second_run_is_refused_and_the_holder_is_named(tmp_path, holder, impatient):
    with pytest.raises(UserError) as caught:
        RunDirectory(tmp_path).acquire()
    assert caught.value.exit_code == BAD_CONFIG
    assert f"process {holder.pid} on {socket.gethostname()} since 20" in str(caught.value)


def test_a_requeued_job_waits_for_a_rank_of_its_lost_node(tmp_path, holder, impatient, monkeypatch, caplog):
    """Slurm requeues a job at once, but NFS notices the death of a node later."""
    content = json.loads((tmp_path / ".lock").read_text()) | {"launch": ["4711", "token"]}
    (tmp_path / ".lock").write_text(json.dumps(content))
    monkeypatch.setattr(run_directory, "LOST_RANK_S", 0.3)
    with pytest.raises(UserError, match="a rank of an earlier start of this job; end that process") as caught:
        RunDirectory(tmp_path).acquire(["4711"], restarted=True)
    assert caught.value.exit_code == STOPPED
    assert "waiting until process" in caplog.text
    with pytest.raises(UserError, match="wait for that run") as caught:
        RunDirectory(tmp_path).acquire(["4712"], restarted=True)
    assert caught.value.exit_code == BAD_CONFIG
    monkeypatch.setattr(run_directory, "LOST_RANK_S", 60.0)
    timer = threading.Timer(0.3, holder.kill)
    timer.start()
    RunDirectory(tmp_path).acquire(["4711"], restarted=True)
    timer.join()


def test_a_refused_run_leaves_the_holder_named(tmp_path, holder, impatient):
    for _ in range(2):
        with pytest.raises(UserError, match=f"process {holder.pid} "):
            RunDirectory(tmp_path).acquire()


def test_s6_a_killed_holder_is_recognised_as_stale_though_its_helpers_live(
    tmp_path, holder, caplog, monkeypatch
):
    monkeypatch.setattr(run_directory, "PATIENCE_S", 60.0)
    holder.kill()
    with caplog.at_level(logging.WARNING):
        directory = RunDirectory(tmp_path)
        directory.acquire()
    assert f"process {holder.pid} " in caplog.text
    assert json.loads((tmp_path / ".lock").read_text())["pid"] == os.getpid()


def test_a_released_directory_is_acquired_without_a_warning(tmp_path, caplog, impatient):
    first = RunDirectory(tmp_path)
    first.acquire()
    first.release()
    first.release()
    RunDirectory(tmp_path).acquire()
    assert not caplog.records


def test_a_forgotten_object_gives_its_lock_back(tmp_path, caplog):
    RunDirectory(tmp_path).acquire()
    RunDirectory(tmp_path).acquire()
    assert not caplog.records


def test_the_end_of_the_process_is_a_release(tmp_path, caplog):
    script = HOLD.split("helpers")[0]
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True)
    RunDirectory(tmp_path).acquire()
    assert not caplog.records


def test_s6_a_file_system_without_locks_costs_a_warning(tmp_path, monkeypatch, caplog):
    def refuse(descriptor, operation):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", refuse)
    RunDirectory(tmp_path).acquire()
    assert "no locks" in caplog.text


def test_paths_follow_the_documented_layout():
    directory = RunDirectory(Path("runs/debug"))
    assert [
        str(path) for path in (directory.config, directory.status, directory.metrics, directory.events)
    ] == [
        "runs/debug/config.toml",
        "runs/debug/status.json",
        "runs/debug/metrics.jsonl",
        "runs/debug/events.jsonl",
    ]
