"""Serve the page of runs that are still going, on this machine only."""

from __future__ import annotations

import logging
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

log = logging.getLogger(__name__)


def make_server(make: Callable[[], str], port: int) -> ThreadingHTTPServer:
    """Return a server on the loopback interface that makes the page again at each request. port 0: any free one."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path != "/":
                return self.send_error(404)
            try:
                page = make().encode()
            except Exception as error:  # a file may be replaced while it is read: the next request succeeds
                log.warning("no page: %s: %s", type(error).__name__, error)
                return self.send_error(
                    503, "the run's files could not be read; the page is loaded again shortly"
                )
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(page)))
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            self.wfile.write(page)

        def log_message(self, *_: object) -> None:
            """Do not print a line for each request."""

    return ThreadingHTTPServer(("127.0.0.1", port), Handler)
