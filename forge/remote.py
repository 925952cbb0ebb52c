"""Files by URL, through fsspec: whole, or by blocks, with retries. What they wait for is known to `waiting_for`."""

from __future__ import annotations

import hashlib
import io
import logging
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from forge.errors import FAILED, UserError

BLOCK_BYTES = 1 << 18
"""Files are fetched, kept and checked in blocks of this size, the last one shorter."""
# A store that is away for minutes comes back; the watchdog's limits (resilience.step_timeout_s) are longer.
RETRY_S = 600.0
_FIRST_S, _LONGEST_S = 0.25, 30.0
_TIMEOUT_S = 60.0  # of one request
_READ_BYTES = 4 << 20
_RETRIED_STATUS = (408, 425, 429)
log = logging.getLogger(__name__)
Result = TypeVar("Result")


class Corrupt(Exception):
    """What was received is not what it should be; the message says how."""


def is_url(path: str | Path) -> bool:
    """Whether it is read through fsspec: `s3://bucket/key`, `gs://...`, `https://...` and so on."""
    return "://" in str(path)


def join(folder: str | Path, name: str) -> str:
    """Return the path or URL of a file in a folder."""
    return f"{str(folder).rstrip('/')}/{name}" if is_url(folder) else str(Path(folder) / name)


def filesystem(protocol: str) -> Any:
    """Return fsspec's file system for a protocol. UserError where the package that it needs is not installed.

    Credentials and endpoints come from where the package looks for them, and from fsspec's own variables, such as
    FSSPEC_S3_ENDPOINT_URL.
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
        # Listings change while a run goes on.
        return fsspec.filesystem(protocol, use_listings_cache=False, **options)
    except (ImportError, ValueError) as error:
        package = {"s3": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "http": "aiohttp", "https": "aiohttp"}
        needs = package.get(protocol, f"the fsspec package for {protocol}://")
        raise UserError(
            f"{protocol}://: reading it needs {needs} ({error}); pip install 'forge[remote]' {needs}"
        ) from None


def filesystem_of(url: str) -> Any:
    """Return fsspec's file system for a URL."""
    return filesystem(url.split("://", 1)[0])


_waits: dict[int, str] = {}
_thread = threading.local()


def give_up_on(event: threading.Event) -> None:
    """Have this thread end its attempts to read once `event` is set."""
    _thread.given_up = event


def waiting_for() -> str:
    """Return what threads of this process wait for, as text; empty if nothing. The longest wait comes first."""
    waits = list(_waits.values())
    return "; ".join(waits[:3]) + (f"; and {len(waits) - 3} more" if len(waits) > 3 else "")


def with_retries(what: str, work: Callable[[], Result]) -> Result:
    """Call `work` until it succeeds, with growing, random pauses. `what`: the URL and what is done with it.

    Raises UserError where the object does not exist or may not be read, which does not pass, and after RETRY_S seconds.
    """
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
                cause = f"{type(error).__name__}: {error}"
                status = getattr(error, "status", None)
                lasts = isinstance(error, FileNotFoundError | PermissionError | NotImplementedError)
                lasts |= isinstance(status, int) and 400 <= status < 500 and status not in _RETRIED_STATUS
                if lasts or given_up.is_set() or time.monotonic() - began > RETRY_S:
                    times = "" if attempt == 1 else f" after {attempt} attempts"
                    raise UserError(f"{what}: failed{times}: {cause}", FAILED) from None
                wait = pause * random.uniform(0.5, 1.5)
                pause = min(2 * pause, _LONGEST_S)
                _waits[thread] = f"{what}: {attempt} failed, the last by {cause}"
                log.warning("%s: attempt %d failed, again in %.1f s: %s", what, attempt, wait, cause)
                given_up.wait(wait)
    finally:
        _waits.pop(thread, None)


def read_whole(url: str) -> bytes:
    """Return the content of a small object. Raises FileNotFoundError if it does not exist, else as `with_retries`."""
    files = filesystem_of(url)

    def read() -> bytes | None:
        try:
            return files.cat_file(url)
        except FileNotFoundError:
            return None

    content = with_retries(url, read)
    if content is None:
        raise FileNotFoundError(url)
    return content


def read_range(files: Any, url: str, begin: int, end: int, size: int) -> bytes:
    """Return bytes begin ... end - 1 of an object of `size` bytes, of the file system `files`. Raises as `with_retries`."""

    def read() -> bytes:
        data = files.cat_file(url, start=begin, end=end)
        if len(data) != end - begin:
            if len(data) == size:
                raise UserError(f"{url}: its server ignores ranges of bytes, which are needed")
            raise Corrupt(f"received {len(data)} bytes instead of {end - begin}")
        return data

    return with_retries(_bytes(url, begin, end), read)


def _bytes(url: str, begin: int, end: int) -> str:
    return f"{url}, bytes {begin} to {end - 1}"


class RemoteFile:
    """One object, read in blocks. `key` names its content in a cache: equal keys, equal bytes.

    With `expected`, which gives the digest of each block, a block is what it was when the dataset was written. Without it the
    object must keep the version (ETag, or time) that it had when it was opened. Either way a changed object is a UserError
    that names it.
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
            raise UserError(f"{url}: has {found} bytes instead of {size}; it is truncated or was replaced")
        assert found is not None
        self.size = found
        self.key = key or hashlib.blake2b(repr((url, self._version)).encode(), digest_size=16).hexdigest()

    @property
    def blocks(self) -> int:
        return -(-self.size // BLOCK_BYTES)

    def fetch(self, block: int) -> bytes:
        """Return a block's bytes from the store."""
        begin = block * BLOCK_BYTES
        end = min(begin + BLOCK_BYTES, self.size)
        data = read_range(self._files, self.url, begin, end, self.size)
        if self._expected is None or self._digest is None:
            if (now := self._look()) != self._version:
                raise UserError(
                    f"{self.url}: was changed while it was in use (from {self._version} to {now}); a run's data must stay "
                    "what they were: restore it, or give the new data another path"
                )
            return data
        if not self.is_intact(block, data):
            # The transfer may have been damaged.
            data = read_range(self._files, self.url, begin, end, self.size)
            if not self.is_intact(block, data):
                raise UserError(
                    f"{_bytes(self.url, begin, end)}: have another checksum than when the dataset was written; the object "
                    "was changed or is damaged: copy the dataset there again"
                )
        return data

    def is_intact(self, block: int, data: bytes) -> bool:
        """Return whether `data` has the checksum of a block; True if the file has no checksums."""
        return self._expected is None or self._digest is None or self._digest(data) == self._expected(block)

    def _look(self) -> tuple[int, str]:
        """Its size and version."""
        about = with_retries(self.url, lambda: self._files.info(self.url))
        if about.get("size") is None:
            raise UserError(f"{self.url}: its server does not report its size, which is needed")
        return int(about["size"]), _version(about)


def open_remote(url: str) -> io.BufferedReader:
    """Open an object for reading; each block is read as by `with_retries`."""
    return io.BufferedReader(_Reader(url), _READ_BYTES)


class _Reader(io.RawIOBase):
    def __init__(self, url: str):
        self._url, self._files, self._place = url, filesystem_of(url), 0
        self._size = int(with_retries(url, lambda: self._files.info(url))["size"])

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
    """Return URL -> size in bytes of the object `url`, or of all objects below it, in the order of their URLs."""
    files = filesystem_of(url)
    found = with_retries(url, lambda: files.find(url, detail=True))
    objects = {
        (name if is_url(name) else files.unstrip_protocol(name)): int(about["size"])
        for name, about in sorted(found.items())
    }
    if not objects:  # not every store finds a single object below itself

        def look() -> dict[str, int]:
            try:
                return {url: int(files.info(url)["size"])}
            except FileNotFoundError:
                return {}

        objects = with_retries(url, look)
    return objects


def version_of(url: str) -> str:
    """Return what changes when the object does: its ETag or time; empty where the store has neither."""
    return _version(with_retries(url, lambda: filesystem_of(url).info(url)))


def _version(about: dict[str, Any]) -> str:
    return next(
        (str(about[name]) for name in ("ETag", "etag", "LastModified", "mtime") if about.get(name)), ""
    )
