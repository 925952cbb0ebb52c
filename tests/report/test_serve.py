"""A page that is served follows its run, and only this machine can ask for it."""

import json
import threading
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest

from forge.report.serve import make_server
from scripts import report
from tests.support.recorded import write_run


def test_each_request_makes_the_page_again_and_a_failure_ends_nothing() -> None:
    pages: list[str | None] = ["first", None, "second"]

    def make() -> str:
        page = pages.pop(0)
        if page is None:
            raise OSError("the file is being replaced")
        return page

    server = make_server(make, 0)
    assert server.server_address[0] == "127.0.0.1"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        address = f"http://127.0.0.1:{server.server_port}/"
        assert urlopen(address).read() == b"first"
        for path in (address, address + "elsewhere"):
            with pytest.raises(HTTPError):
                urlopen(path)
        assert urlopen(address).read() == b"second"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.mark.slow
def test_the_command_follows_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`report.py RUN --live`: lines that the run writes later are on the next page, and the browser asks for it by itself."""
    run, servers, ready = write_run(tmp_path / "run"), list[ThreadingHTTPServer](), threading.Event()

    def make(*arguments: Any) -> ThreadingHTTPServer:
        servers.append(make_server(*arguments))
        ready.set()
        return servers[0]

    monkeypatch.setattr(report, "make_server", make)
    options = [str(run), "--live", "--port", "0", "--no-plan", "--refresh", "7"]
    thread = threading.Thread(target=report.main, args=(options,))
    thread.start()
    assert ready.wait(60)
    try:
        address = f"http://127.0.0.1:{servers[0].server_port}/"
        first = urlopen(address).read().decode()
        with (run / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": 4321, "loss": 1.0, "tokens": 987654321}) + "\n")
        second = urlopen(address).read().decode()
    finally:
        servers[0].shutdown()
        thread.join()
    assert '<meta http-equiv="refresh" content="7">' in first
    assert "987,654,321" in second and "987,654,321" not in first
