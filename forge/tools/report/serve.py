"""Serve the report of unfinished runs to browsers on this machine, for this user only."""

from __future__ import annotations

import hmac
import logging
import secrets
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from forge.runtime.causes import Cause

log = logging.getLogger(__name__)


class PageServer(ThreadingHTTPServer):
    """An HTTP server on the loopback interface, with one page at `url`. make: returns the page as HTML.

    Other users of the machine can connect, so the path has a random token. A web page elsewhere can make a browser
    connect under another host name, so the Host header must name the loopback interface. A lock serialises `make`,
    because matplotlib's settings are global.
    """

    def __init__(self, make: Callable[[], str], port: int):
        super().__init__(("127.0.0.1", port), _Handler)
        self._make, self._lock = make, threading.Lock()
        self.path = f"/{secrets.token_urlsafe(16)}/"
        self.url = f"http://127.0.0.1:{self.server_port}{self.path}"
        self.hosts = [f"{name}:{self.server_port}" for name in ("127.0.0.1", "localhost")]

    def page(self) -> bytes:
        with self._lock:
            return self._make().encode()


class _Handler(BaseHTTPRequestHandler):
    server: PageServer

    def do_GET(self) -> None:
        if self.headers.get("Host") not in self.server.hosts:
            return self.send_error(421)
        if not hmac.compare_digest(self.path.encode(), self.server.path.encode()):
            return self.send_error(404)
        try:
            page = self.server.page()
        except Exception as error:  # e.g. a file is replaced while it is read; the next request succeeds
            log.warning(
                "the page was not served: %s: %s", type(error).__name__, error, extra=Cause.SIDE_SYSTEM.mark
            )
            return self.send_error(503, "the run's files could not be read; the page is loaded again shortly")
        self.send_response(200)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(page)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("Referrer-Policy", "no-referrer")
        self.end_headers()
        self.wfile.write(page)

    def log_message(self, *_: object) -> None:
        """Log nothing. The method of the standard library would print a line for each request."""
