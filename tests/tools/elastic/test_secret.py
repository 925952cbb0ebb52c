"""The agents' rendezvous: its reachability, and no unpickling of data without the run's signature."""

from __future__ import annotations

import base64
import os
import pickle
import socket
import threading
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from forge.runtime.errors import UserError
from forge.tools.elastic import secret
from forge.tools.elastic.meeting import Meeting
from forge.tools.elastic.secret import VARIABLE, SignedStore, read_secret
from tests.support.elastic import elastic

SECRET = b"0123456789abcdef"


class Payload:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path):
        self._path = path

    def __reduce__(self) -> tuple:
        return Path.touch, (self._path,)


@pytest.fixture
def server() -> dist.TCPStore:
    return dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=5))


def test_a_strangers_value_ends_an_agent_with_one_sentence_and_is_not_unpickled(
    tmp_path,
) -> None:
    with elastic(tmp_path, "1:1", 1) as nodes:
        stranger = dist.TCPStore("localhost", nodes.port, is_master=False)
        evil = base64.b64encode(pickle.dumps(Payload(tmp_path / "executed")))
        stranger.set("torch.rendezvous.forge", evil)
        nodes.start("a")
        assert nodes.finish() == {"a": 2}
    output = nodes.output("a")
    assert "is not signed with this run's secret" in output and "Traceback" not in output
    assert output.count("forge: ") == 1 and not (tmp_path / "executed").exists()


def test_an_agent_with_another_secret_is_refused(tmp_path) -> None:
    with elastic(tmp_path, "1:1", 1) as nodes:
        nodes.start("a", FORGE_RENDEZVOUS_SECRET="f" * 32)
        assert nodes.finish() == {"a": 2}
    assert VARIABLE in nodes.output("a") and "Traceback" not in nodes.output("a")


def test_a_signature_holds_for_one_key_one_value_and_one_secret(server) -> None:
    mine, other = SignedStore(server, SECRET), SignedStore(server, SECRET[::-1])
    mine.set("a", "1")
    assert mine.get("a") == b"1" and mine.multi_get(["a"]) == [b"1"]
    server.set("b", server.get("a"))
    server.set("c", server.get("a") + b"0")
    server.set("d", "")
    for store, key in ((other, "a"), (mine, "b"), (mine, "c"), (mine, "d")):
        with pytest.raises(
            UserError, match=f"{key} was rejected, because it is not signed with this run's secret"
        ):
            store.get(key)


def test_the_store_behind_a_prefix_compares_counts_and_waits_as_pytorchs_does(server) -> None:
    signed = SignedStore(server, SECRET)
    store = dist.PrefixStore("round", signed)
    assert store.compare_set("key", "", "first") == b"first"
    assert store.compare_set("key", "", "second") == b"first"
    assert store.compare_set("key", "first", "second") == b"second"
    store.multi_set(["x", "y"], ["1", "2"])
    assert store.multi_get(["x", "y"]) == [b"1", b"2"]
    assert store.add("count", 2) == 2 and store.check(["x"]) and not store.check(["z"])
    store.set_timeout(timedelta(milliseconds=100))
    with pytest.raises(dist.DistStoreError):
        store.get("z")


def test_a_rendezvous_listens_only_on_the_agents_address(monkeypatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    meeting = Meeting(0, "127.0.0.1")
    socket.create_connection(("127.0.0.1", meeting.port)).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", meeting.port))
    with pytest.raises(UserError, match="in use"):
        Meeting(meeting.port, "127.0.0.1")


def test_other_nodes_are_met_with_a_secret_from_the_environment_only(monkeypatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    for start in (lambda: Meeting(0, "192.0.2.1"), lambda: read_secret("192.0.2.1", 29400)):
        with pytest.raises(UserError, match=f"export {VARIABLE}=.*openssl rand") as error:
            start()
        assert error.value.exit_code == 2
    monkeypatch.setenv(VARIABLE, "short")
    with pytest.raises(UserError, match="fewer than 16 characters"):
        read_secret("192.0.2.1", 29400)
    monkeypatch.setenv(VARIABLE, SECRET.decode())
    assert read_secret("192.0.2.1", 29400) == SECRET


def test_a_local_secret_is_read_only_from_a_file_of_this_user(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(secret.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.delenv(VARIABLE, raising=False)
    made = secret.make_local_secret(7)
    [path] = tmp_path.iterdir()
    assert path.stat().st_mode & 0o777 == 0o600 and read_secret("localhost", 7) == made
    assert secret.make_local_secret(7) != made  # of a new meeting at the same port

    def refused() -> None:
        with pytest.raises(UserError, match=f"{VARIABLE} is not set"):
            read_secret("localhost", 7)

    path.chmod(0o644)
    refused()
    path.rename(tmp_path / "elsewhere")
    refused()
    (tmp_path / "elsewhere").chmod(0o600)
    path.symlink_to(tmp_path / "elsewhere")
    refused()
    path.unlink()
    os.mkfifo(path, 0o600)
    refused()


def test_the_end_of_the_run_is_believed_only_from_an_agent(monkeypatch) -> None:
    monkeypatch.setenv(VARIABLE, SECRET.decode())
    meeting, closed = Meeting(0, "127.0.0.1"), threading.Event()
    serving = threading.Thread(target=meeting.serve, args=(closed, 0.0))
    serving.start()
    raw = dist.TCPStore("127.0.0.1", meeting.port, is_master=False)
    raw.set("forge/over", "1")
    serving.join(3)
    assert serving.is_alive()
    SignedStore(raw, SECRET).set("forge/over", "1")
    serving.join(60)
    assert not serving.is_alive()
