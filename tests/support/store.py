"""An object store on the loopback interface with injected faults: latency, truncation, resets, 503s and changes."""

from __future__ import annotations

import re
import socket
import struct
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from email.utils import formatdate
from hashlib import md5
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

Fault = Callable[["Request"], str | None]
"""Returns the fault to inject: "503", "reset", "truncate", "404" or None."""


class Request:
    """A request for an object. count: requests for this object so far, including this request."""

    def __init__(self, method: str, key: str, span: tuple[int, int] | None, count: int):
        self.method, self.key, self.range, self.count = method, key, span, count


class Store:
    """Objects by key (`bucket/path`), over plain HTTP and the part of S3 needed by s3fs. Thread-safe for tests."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.fault: Fault = lambda request: None
        self.before: Callable[[Request], None] = lambda request: None
        """Called by the server's thread before each answer. Tests sleep here for latency."""
        self.gets: Counter[tuple[str, tuple[int, int] | None]] = Counter()
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()
        self.port = 0

    def url(self, key: str = "", protocol: str = "http") -> str:
        return f"http://127.0.0.1:{self.port}/{key}" if protocol == "http" else f"{protocol}://{key}"

    def put_folder(self, folder: Path, key: str) -> None:
        for path in folder.rglob("*"):
            if path.is_file():
                self.objects[f"{key}/{path.relative_to(folder).as_posix()}"] = path.read_bytes()

    def request(self, method: str, key: str, span: tuple[int, int] | None) -> Request:
        with self._lock:
            self._counts[key] += 1
            if method == "GET":
                self.gets[key, span] += 1
            return Request(method, key, span, self._counts[key])


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    store: Store

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._get(body=False)

    def do_GET(self) -> None:
        address = urlsplit(self.path)
        query = parse_qs(address.query, keep_blank_values=True)
        if "list-type" in query:
            return self._list(unquote(address.path).strip("/"), query)
        self._get(body=True)

    def do_PUT(self) -> None:
        key = unquote(urlsplit(self.path).path).lstrip("/")
        if "chunked" in self.headers.get("Transfer-Encoding", ""):
            data = b""
            while size := int(self.rfile.readline().split(b";")[0], 16):
                data += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        else:
            data = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if "aws-chunked" in self.headers.get("Content-Encoding", ""):
            data = _unframed(data)
        request = self.store.request("PUT", key, None)
        self.store.before(request)
        if self._goes_wrong(request):
            return
        self.store.objects[key] = data
        self._answer(200, b"", {"ETag": _etag(data)})

    do_POST = do_PUT

    def do_DELETE(self) -> None:
        self.store.objects.pop(unquote(urlsplit(self.path).path).lstrip("/"), None)
        self._answer(204, b"", {})

    def _get(self, body: bool) -> None:
        key = unquote(urlsplit(self.path).path).lstrip("/")
        found = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        span = (int(found[1]), int(found[2])) if found else None
        request = self.store.request("GET" if body else "HEAD", key, span)
        self.store.before(request)
        if self._goes_wrong(request):
            return
        data = self.store.objects.get(key)
        if data is None:
            return self._answer(404, b"", {}, body)
        headers = {
            "ETag": _etag(data),
            "Accept-Ranges": "bytes",
            "Last-Modified": formatdate(0, usegmt=True),
        }
        part = data
        if span:
            part = data[span[0] : span[1] + 1]
            headers["Content-Range"] = f"bytes {span[0]}-{span[0] + len(part) - 1}/{len(data)}"
        cut = len(part) // 2 if self.store.fault(request) == "truncate" else None
        self._answer(206 if span else 200, part, headers, body, cut)

    def _goes_wrong(self, request: Request) -> bool:
        fault = self.store.fault(request)
        if fault == "reset":
            # Closing with a linger of 0 sends RST.
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()
            self.close_connection = True
            return True
        if fault and fault.isdigit():
            self._answer(int(fault), b"", {}, request.method != "HEAD")
            return True
        return False

    def _answer(
        self, status: int, data: bytes, headers: dict[str, str], body: bool = True, cut: int | None = None
    ) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if body:
            self.wfile.write(data[:cut])
        if cut is not None:
            self.close_connection = True

    def _list(self, bucket: str, query: dict[str, list[str]]) -> None:
        prefix, delimiter = query.get("prefix", [""])[0], query.get("delimiter", [""])[0]
        names = [key.removeprefix(f"{bucket}/") for key in self.store.objects if key.startswith(f"{bucket}/")]
        entries, folders = [], set()
        for name in sorted(name for name in names if name.startswith(prefix)):
            rest = name[len(prefix) :]
            if delimiter and delimiter in rest:
                folders.add(prefix + rest.split(delimiter)[0] + delimiter)
                continue
            data = self.store.objects[f"{bucket}/{name}"]
            entries.append(
                f"<Contents><Key>{escape(name)}</Key><LastModified>1970-01-01T00:00:00Z</LastModified>"
                f"<ETag>{escape(_etag(data))}</ETag><Size>{len(data)}</Size></Contents>"
            )
        common = [
            f"<CommonPrefixes><Prefix>{escape(one)}</Prefix></CommonPrefixes>" for one in sorted(folders)
        ]
        text = (
            '<?xml version="1.0" encoding="UTF-8"?><ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
            f"<Name>{bucket}</Name><Prefix>{escape(prefix)}</Prefix><KeyCount>{len(entries) + len(common)}</KeyCount>"
            f"<MaxKeys>1000</MaxKeys><IsTruncated>false</IsTruncated>{''.join(entries + common)}</ListBucketResult>"
        )
        self._answer(200, text.encode(), {"Content-Type": "application/xml"})


def _unframed(data: bytes) -> bytes:
    """Decode AWS's chunks: size in hex, `;signature`, content, until a chunk of size 0."""
    content = b""
    while data:
        line, _, data = data.partition(b"\r\n")
        size = int(line.split(b";")[0], 16)
        if not size:
            break
        content, data = content + data[:size], data[size + 2 :]
    return content


def _etag(data: bytes) -> str:
    return f'"{md5(data).hexdigest()}"'


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def handle_error(self, *_: object) -> None:
        """Ignore clients that disconnect."""


@contextmanager
def serving() -> Iterator[Store]:
    """Serve a store on a free port during the body."""
    store = Store()
    handler = type("Handler", (_Handler,), {"store": store})
    with _Server(("127.0.0.1", 0), handler) as server:
        store.port = server.server_address[1]
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        try:
            yield store
        finally:
            server.shutdown()
            thread.join()
