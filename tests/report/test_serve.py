"""A page that is served follows its run, and only this machine can ask for it."""

import threading
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest

from forge.report.serve import make_server


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
