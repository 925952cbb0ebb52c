"""A served page follows its run, and only this machine can request it."""

import json
import threading
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest

from forge.tools.report.serve import PageServer
from scripts import report
from tests.support.recorded import write_run


def test_each_request_makes_the_page_again_and_a_failure_ends_nothing() -> None:
    pages: list[str | None] = ["first", None, "second"]

    def make() -> str:
        page = pages.pop(0)
        if page is None:
            raise OSError("the file is being replaced")
        return page

    server = PageServer(make, 0)
    assert server.server_address[0] == "127.0.0.1"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        address = server.url
        assert urlopen(address).read() == b"first"
        for path in (address, address + "elsewhere"):
            with pytest.raises(HTTPError):
                urlopen(path)
        assert urlopen(address).read() == b"second"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_only_the_printed_address_and_a_name_of_this_machine_get_the_page() -> None:
    made: list[int] = []
    server = PageServer(lambda: made.append(1) or "page", 0)  # type: ignore[func-returns-value]
    thread = threading.Thread(target=server.serve_forever)
    thread.start()

    def status(path: str, host: str | None) -> int:
        connection = HTTPConnection("127.0.0.1", server.server_port)
        connection.putrequest("GET", path, skip_host=True)
        if host is not None:
            connection.putheader("Host", host)
        connection.endheaders()
        found = connection.getresponse().status
        connection.close()
        return found

    port = server.server_port
    try:
        for host in (f"attacker.example:{port}", f"127.0.0.1.nip.example:{port}", "127.0.0.1", None, ""):
            assert status(server.path, host) == 421
        for path in ("/", "/favicon.ico", server.path[:-2] + "x/", server.path + "x", "/%ff/"):
            assert status(path, f"127.0.0.1:{port}") == 404
        assert not made
        assert status(server.path, f"localhost:{port}") == 200 and made == [1]
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
    assert server.path != PageServer(lambda: "", 0).path


def test_pages_are_made_one_at_a_time() -> None:
    """Two browser tabs at once share the process's matplotlib settings."""
    inside, together, both = threading.Event(), [], threading.Barrier(2)

    def make() -> str:
        together.append(inside.is_set())
        inside.set()
        both.wait()  # with the test's thread: the other request has arrived or waits for the lock
        inside.clear()
        return "page"

    server = PageServer(make, 0)
    serving = threading.Thread(target=server.serve_forever)
    serving.start()
    asking = [threading.Thread(target=lambda: urlopen(server.url).read()) for _ in range(2)]
    try:
        for thread in asking:
            thread.start()
        for _ in asking:
            both.wait()
        for thread in asking:
            thread.join()
    finally:
        server.shutdown()
        server.server_close()
        serving.join()
    assert together == [False, False]


@pytest.mark.slow
def test_the_command_follows_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`report.py RUN --live`: the next page has the run's new lines, and the browser requests it automatically."""
    run, servers, ready = write_run(tmp_path / "run"), list[PageServer](), threading.Event()

    def make(*arguments: Any) -> PageServer:
        servers.append(PageServer(*arguments))
        ready.set()
        return servers[0]

    monkeypatch.setattr(report, "PageServer", make)
    options = [str(run), "--live", "--port", "0", "--no-plan", "--refresh", "7"]
    thread = threading.Thread(target=report.main, args=(options,))
    thread.start()
    assert ready.wait(60)
    try:
        address = servers[0].url
        first = urlopen(address).read().decode()
        with (run / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": 4321, "loss": 1.0, "tokens": 987654321}) + "\n")
        second = urlopen(address).read().decode()
    finally:
        servers[0].shutdown()
        thread.join()
    assert '<meta http-equiv="refresh" content="7">' in first
    assert "987,654,321" in second and "987,654,321" not in first
