"""Serve the page of unfinished runs to this user's browsers on this machine."""

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
    """Serves one page on the loopback interface, only at `url`.

    Any user of the machine can connect, and any web page can make a browser connect under a foreign host name. So the path
    has a random token, and the Host header must name the loopback interface. One thread at a time makes the page, because
    matplotlib's settings are global.
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
        except Exception as error:  # a file may be replaced while it is read: the next request succeeds
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
        """Do nothing. The standard library's method would write a line for each request."""
