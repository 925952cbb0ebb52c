"""Read remote files by URL, through fsspec: whole or by blocks, with retries.

`waiting_for` returns the remote store that the process waits for.
"""

from __future__ import annotations

import errno
import hashlib
import io
import logging
import random
import socket
import ssl
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from forge.runtime.causes import Cause
from forge.runtime.errors import FAILED, UserError, is_redacted, redact
from forge.runtime.files import is_url

BLOCK_BYTES = 1 << 18
"""Block size for fetching, caching and checking files; the last block is shorter."""
# A store may be unreachable for minutes. The watchdog's limits (resilience.step_timeout_s) are longer.
RETRY_S = 600.0
_FIRST_S, _LONGEST_S = 0.25, 30.0
_TIMEOUT_S = 60.0  # of one request
_READ_BYTES = 4 << 20
_RETRIED_STATUS = {408, 425, 429, 500, 502, 503, 504, 507, 509, *range(520, 531)}
_RETRIED_ERRNO = {
    *(
        errno.EAGAIN,
        errno.EBUSY,
        errno.EINTR,
        errno.EIO,
        errno.ENOBUFS,
        errno.ESTALE,
        errno.EHOSTDOWN,
        errno.EHOSTUNREACH,
    ),
    *(errno.ENETDOWN, errno.ENETRESET, errno.ENETUNREACH, errno.ENOTCONN, socket.EAI_AGAIN),
    getattr(errno, "EREMOTEIO", errno.EIO),  # Linux only
}
# By top-level package and class name, because only the packages of the stores in use are installed. Includes
# subclasses.
_RETRIED_TYPES = {
    *("aiohttp.ClientConnectionError", "aiohttp.ClientPayloadError", "azure.ServiceRequestError"),
    *("azure.ServiceResponseError", "botocore.ConnectionError", "botocore.HTTPClientError"),
    *("botocore.IncompleteReadError", "google.TransportError", "http.IncompleteRead", "httpx.TransportError"),
    *("requests.ChunkedEncodingError", "requests.ConnectionError", "requests.Timeout"),
    *("urllib3.ProtocolError", "urllib3.TimeoutError"),
}
log = logging.getLogger(__name__)
Result = TypeVar("Result")


class Corrupt(Exception):
    """Received data differ from the expected data. The message describes the difference."""


def join(folder: str | Path, name: str) -> str:
    """Return the path or URL of a file in a folder."""
    return f"{str(folder).rstrip('/')}/{name}" if is_url(folder) else str(Path(folder) / name)


def filesystem(protocol: str) -> Any:
    """Return fsspec's file system for a protocol.

    Raises UserError if its package is not installed. Credentials and endpoints come from the package's own
    configuration and from fsspec's environment variables, e.g. FSSPEC_S3_ENDPOINT_URL.
    """
    options: dict[str, Any] = {}
    try:
        import fsspec

        if protocol in ("http", "https"):
            import aiohttp

            options["client_kwargs"] = {"timeout": aiohttp.ClientTimeout(total=None, sock_read=_TIMEOUT_S)}
        elif protocol == "file":
            options["auto_mkdir"] = True
        elif protocol == "s3":
            options["config_kwargs"] = {"read_timeout": _TIMEOUT_S, "connect_timeout": 10}
        # Listings change during a run.
        return fsspec.filesystem(protocol, use_listings_cache=False, **options)
    except (ImportError, ValueError) as error:
        package = {"s3": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "http": "aiohttp", "https": "aiohttp"}
        needs = package.get(protocol, f"the fsspec package for {protocol}://")
        raise UserError(
            f"{protocol}://: reading it needs {needs} ({error}); pip install 'forge[remote]' {needs}"
        ) from None


def filesystem_of(url: str) -> Any:
    """Return fsspec's file system for a URL.

    Raises UserError for a URL with redacted secrets, e.g. from a run's config.toml.
    """
    if is_redacted(url):
        raise UserError(
            f"{url}: forge removed the password or signature when it wrote the configuration; on the command line, set the "
            "key again to the full URL with its secret"
        )
    return filesystem(url.split("://", 1)[0])


_waits: dict[int, str] = {}
_thread = threading.local()


def give_up_on(event: threading.Event) -> None:
    """Stop retrying in this thread once `event` is set."""
    _thread.given_up = event


def waiting_for() -> str:
    """Return a text about this process's threads that wait for stores now, the longest wait first. Empty if none waits."""
    waits = list(_waits.values())
    return "; ".join(waits[:3]) + (f"; and {len(waits) - 3} more" if len(waits) > 3 else "")


def with_retries(what: str, work: Callable[[], Result]) -> Result:
    """Return `work()`. After a transient error, call `work` again, with growing random pauses.

    what: the URL and the operation, for messages. Raises UserError at once for an error that is not transient. Raises
    UserError for a transient error if RETRY_S seconds have passed, or if the event that this thread gave to `give_up_on`
    is set.
    """
    what = redact(what)
    given_up: threading.Event = getattr(_thread, "given_up", None) or threading.Event()
    began, attempt, pause = time.monotonic(), 0, _FIRST_S
    thread = threading.get_ident()
    _waits[thread] = what
    try:
        while True:
            attempt += 1
            try:
                return work()
            except UserError:
                raise
            except Exception as error:
                cause = redact(f"{type(error).__name__}: {error}")
                times = "" if attempt == 1 else f" after {attempt} attempts"
                failed = UserError(f"{what}: failed{times}: {cause}", FAILED, Cause.STORE_FAILED)
                if given_up.is_set() or not is_transient(error) or time.monotonic() - began > RETRY_S:
                    raise failed from error
                wait = pause * random.uniform(0.5, 1.5)
                pause = min(2 * pause, _LONGEST_S)
                attempts = f"{attempt} attempt{'s' if attempt > 1 else ''}"
                _waits[thread] = f"{what}: {attempts} failed, the last with {cause}"
                again = "%s: attempt %d failed, next attempt in %.1f s: %s"
                log.warning(again, what, attempt, wait, cause, extra=Cause.NOTE.mark)
                if given_up.wait(wait):
                    raise failed from error
    finally:
        _waits.pop(thread, None)


def is_transient(error: BaseException) -> bool:
    """Return whether a store's error may be transient: by its type, otherwise by its HTTP status, otherwise by its errno.

    File systems translate errors, so the original errors (`raise ... from`) are also examined: fsspec reports an
    unreachable server as FileNotFoundError, and s3fs reports an unknown status as EIO.
    """
    chain = [error]
    while (cause := chain[-1].__cause__) is not None:
        chain.append(cause)
    if any(isinstance(one, ssl.SSLCertVerificationError) for one in chain):
        return False
    if any(
        isinstance(one, TimeoutError | ConnectionError | Corrupt) or _names(one) & _RETRIED_TYPES
        for one in chain
    ):
        return True
    if statuses := [status for one in chain if (status := _status(one)) is not None]:
        return statuses[0] in _RETRIED_STATUS
    return any(isinstance(one, OSError) and one.errno in _RETRIED_ERRNO for one in chain)


def _names(error: BaseException) -> set[str]:
    return {f"{kind.__module__.split('.')[0]}.{kind.__name__}" for kind in type(error).__mro__}


def _status(error: BaseException) -> int | None:
    """Return the HTTP status in an error of aiohttp, azure, gcsfs, requests or botocore; None if it has none."""
    response = getattr(error, "response", None)
    if isinstance(response, dict):
        found = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    else:
        pairs = [(error, "status"), (error, "status_code"), (response, "status_code"), (error, "code")]
        found = next((getattr(one, name) for one, name in pairs if hasattr(one, name)), None)
    return found if isinstance(found, int) else None


def read_whole(url: str) -> bytes:
    """Return the content of a small object.

    Raises FileNotFoundError if the object does not exist. Raises UserError like `with_retries` for other errors.
    """
    files = filesystem_of(url)

    def read() -> bytes | None:
        try:
            return files.cat_file(url)
        except FileNotFoundError as error:
            if is_transient(error):
                raise
            return None

    content = with_retries(url, read)
    if content is None:
        raise FileNotFoundError(url)
    return content


def read_range(files: Any, url: str, begin: int, end: int, size: int) -> bytes:
    """Return bytes begin ... end - 1 of an object of `size` bytes in the file system `files`. Raises like `with_retries`."""

    def read() -> bytes:
        data = files.cat_file(url, start=begin, end=end)
        if len(data) != end - begin:
            if len(data) == size:
                raise UserError(
                    f"{url}: its server ignores HTTP range requests, which forge needs; copy the data to another "
                    "server or to this machine"
                )
            raise Corrupt(f"received {len(data)} bytes instead of {end - begin}")
        return data

    return with_retries(_bytes(url, begin, end), read)


def _bytes(url: str, begin: int, end: int) -> str:
    return f"{url}, bytes {begin} to {end - 1}"


class RemoteFile:
    """A remote object, read in blocks.

    expected: returns the recorded digest of a block; None: blocks have no digests, and the object must keep the version
    (ETag or modification time) that it had when it was opened. In both cases a changed object raises UserError with its URL.

    key: identifies the object's content in a cache; equal keys mean equal bytes. Used only with `expected`. Without
    digests nothing compares the bytes with the key, so the URL and the version identify the content.
    """

    def __init__(
        self,
        url: str,
        size: int | None = None,
        key: str | None = None,
        expected: Callable[[int], bytes] | None = None,
        digest: Callable[[bytes], bytes] | None = None,
    ):
        self.url, self._expected, self._digest = url, expected, digest
        self._files = filesystem_of(url)
        self._version = None if expected and size is not None else self._look()
        found = self._version[0] if self._version else size
        if size is not None and found != size:
            raise UserError(
                f"{url}: has {found} bytes instead of {size}; it is truncated or was replaced: restore it"
            )
        assert found is not None
        self.size = found
        named = hashlib.blake2b(repr((redact(url), self._version)).encode(), digest_size=16).hexdigest()
        self.key = key if key and expected else named

    def fetch(self, block: int) -> bytes:
        """Fetch a block from the store and verify it. Raises UserError for changed content."""
        begin = block * BLOCK_BYTES
        end = min(begin + BLOCK_BYTES, self.size)
        data = read_range(self._files, self.url, begin, end, self.size)
        if self._expected is None or self._digest is None:
            if (now := self._look()) != self._version:
                raise UserError(
                    f"{self.url}: was changed while it was in use (from {self._version} to {now}); a run's data must not "
                    "change: restore the object, or give the new data another path"
                )
            return data
        if not self.is_intact(block, data):
            # The transfer may have damaged the data; try once more.
            data = read_range(self._files, self.url, begin, end, self.size)
            if not self.is_intact(block, data):
                raise UserError(
                    f"{_bytes(self.url, begin, end)}: have another checksum than when the dataset was written, so the object "
                    "was changed or is damaged; copy the dataset to this store again"
                )
        return data

    def is_intact(self, block: int, data: bytes) -> bool:
        """Return whether `data` matches the checksum of block `block`; True if the file has no checksums."""
        return self._expected is None or self._digest is None or self._digest(data) == self._expected(block)

    def _look(self) -> tuple[int, str]:
        """Return the object's size in bytes, and its version."""
        about = with_retries(self.url, lambda: self._files.info(self.url))
        return _size(self.url, about), _version(about)


def open_remote(url: str) -> io.BufferedReader:
    """Open an object for reading. Reads are retried like in `with_retries`."""
    return io.BufferedReader(_Reader(url), _READ_BYTES)


class _Reader(io.RawIOBase):
    def __init__(self, url: str):
        self._url, self._files, self._place = url, filesystem_of(url), 0
        self._size = _size(url, with_retries(url, lambda: self._files.info(url)))

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, origin: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._place, io.SEEK_END: self._size}[origin]
        self._place = base + offset
        return self._place

    def readinto(self, buffer: Any) -> int:
        begin, end = self._place, min(self._place + len(buffer), self._size)
        if begin >= end:
            return 0
        data = read_range(self._files, self._url, begin, end, self._size)
        buffer[: len(data)] = data
        self._place = end
        return len(data)


def find_objects(url: str) -> dict[str, int]:
    """Return URL -> size in bytes of the object `url`, or of each object below it, in order. Empty if there is none."""
    files = filesystem_of(url)

    def found_by(look: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        def found_or_empty() -> dict[str, Any]:
            try:
                return look()
            except FileNotFoundError as error:
                if is_transient(error):
                    raise
                return {}

        return with_retries(url, found_or_empty)

    found = found_by(lambda: files.find(url, detail=True))
    # Some stores do not list a single object below itself, or list it without its size.
    if set(found) <= {url}:
        found = found_by(lambda: {url: files.info(url)}) or found
    urls = {(name if is_url(name) else files.unstrip_protocol(name)): found[name] for name in sorted(found)}
    return {name: _size(name, about) for name, about in urls.items()}


def _size(url: str, about: dict[str, Any]) -> int:
    if about.get("size") is None:
        raise UserError(
            f"{url}: its server does not report its size, which forge needs; name each file by its URL, or copy the "
            "files to this machine"
        )
    return int(about["size"])


def version_of(url: str) -> str:
    """Return the object's ETag or modification time, which changes with its content; empty if the store has neither."""
    return _version(with_retries(url, lambda: filesystem_of(url).info(url)))


def _version(about: dict[str, Any]) -> str:
    return next(
        (str(about[name]) for name in ("ETag", "etag", "LastModified", "mtime") if about.get(name)), ""
    )
