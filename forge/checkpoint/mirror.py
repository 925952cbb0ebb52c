"""Copies of complete checkpoints in a store, made by a thread, and the way back.

URL/mirror.json              the steps of this run's history that the store has whole, ascending; written last
URL/step-00000100/...        what the local folder of that name holds
"""

from __future__ import annotations

import json
import logging
import os
import queue
import shutil
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from forge.checkpoint import folders
from forge.checkpoint.manifest import MANIFEST, Damaged, entry, read_manifest
from forge.errors import UserError
from forge.files import sync_folder
from forge.remote import filesystem_of, give_up_on, join, read_whole, with_retries

INDEX = "mirror.json"
_AT_ONCE = 8  # files
log = logging.getLogger(__name__)


class Mirror:
    """Copies checkpoints of `root` to `url`. Only one process may; its methods return at once unless they say otherwise.

    The newest `keep_last` (0: all) and the multiples of `keep_every` (0: none) are kept there. A failure is logged, and the
    next checkpoint is tried again.
    """

    def __init__(self, url: str, root: Path, keep_last: int, keep_every: int):
        self._url, self._root, self._keep_last, self._keep_every = url, root, keep_last, keep_every
        self._files = filesystem_of(url)
        self._steps: list[int] | None = None  # known once the index has been read
        self._newest, self._count = -1, 0
        self._given_up = threading.Event()
        self._work: queue.Queue[Callable[[], None] | None] = queue.Queue()
        for left in root.glob(".mirrored-step-*"):
            shutil.rmtree(left)
        self._thread = threading.Thread(target=self._run, name="forge-mirror", daemon=True)
        self._thread.start()

    def copy(self, step: int) -> None:
        """Copy the complete checkpoint of `step`, unless a newer one is ready by the time it can begin."""
        self._newest, self._count = step, self._count + 1
        # Links, because the checkpoint may be removed before it has been copied; numbered, because a step may be saved again.
        links = self._root / f".mirrored-{folders.step_name(step)}.{self._count}"
        try:
            shutil.copytree(self._root / folders.step_name(step), links, copy_function=_link)
        except OSError as error:
            log.error("checkpoint.mirror %s: step %d is not copied: %s", self._url, step, error)
            return

        def work() -> None:
            try:
                if step == self._newest:
                    self._copy(step, links)
            finally:
                shutil.rmtree(links, ignore_errors=True)

        self._work.put(work)

    def forget_after(self, step: int) -> None:
        """No longer return to checkpoints after `step`: the history goes on from there without them."""
        self._newest = min(self._newest, step)
        self._work.put(lambda: self._forget_after(step))

    def close(self, wait: bool) -> None:
        """End the thread; with `wait` when all that was asked for has been done."""
        if not wait:
            self._given_up.set()
            self._newest = -1
        self._work.put(None)
        if wait:
            self._thread.join()

    def _run(self) -> None:
        give_up_on(self._given_up)
        while (work := self._work.get()) is not None:
            try:
                work()
            except Exception as error:
                log.error("checkpoint.mirror %s: %s", self._url, error)

    def _copy(self, step: int, folder: Path) -> None:
        target = join(self._url, folders.step_name(step))
        names = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]

        def put(name: str) -> None:
            url = join(target, name)
            with_retries(url, lambda: self._files.put_file(str(folder / name), url))

        _each(put, names, self._given_up)
        steps = sorted({*self._known(), step})
        newest = steps[-self._keep_last :] if self._keep_last else steps
        kept = [one for one in steps if one in newest or (self._keep_every and one % self._keep_every == 0)]
        self._write(kept)
        log.info("step %d is copied to %s", step, target)
        for old in set(steps) - set(kept):
            try:
                self._files.rm(join(self._url, folders.step_name(old)), recursive=True)
            except Exception as error:  # such as a store without removal
                log.warning("%s: step %d is not removed: %s", self._url, old, error)

    def _forget_after(self, step: int) -> None:
        known = self._known()
        if any(one > step for one in known):
            self._write([one for one in known if one <= step])

    def _known(self) -> list[int]:
        if self._steps is None:
            self._steps = _steps_of(self._url)
        return self._steps

    def _write(self, steps: list[int]) -> None:
        with tempfile.NamedTemporaryFile("w") as file:
            json.dump({"version": 1, "steps": steps}, file)
            file.flush()
            url = join(self._url, INDEX)
            with_retries(url, lambda: self._files.put_file(file.name, url))
        self._steps = steps


def restore(url: str, root: Path) -> int | None:
    """Bring the newest checkpoint of the mirror at `url` into `root`; return its step, or None if there is none.

    One that is incomplete or damaged there is passed over, with an error in the log. Raises UserError if none is usable.
    """
    steps = _steps_of(url)
    for step in reversed(steps):
        source, partial = join(url, folders.step_name(step)), root / f".partial-{folders.step_name(step)}"
        log.warning("%s has no checkpoint: bringing step %d from %s", root, step, source)
        try:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            _fetch(source, partial)
        except (Damaged, UserError) as error:
            shutil.rmtree(partial)
            log.error("%s cannot be used: %s", source, error)
            continue
        partial.rename(root / folders.step_name(step))
        sync_folder(root)
        return step
    if steps:
        raise UserError(
            f"checkpoint.mirror = {url}: none of its checkpoints {steps} can be used; see the log. To begin a new "
            "history, use another run.name"
        )
    return None


def _fetch(source: str, folder: Path) -> None:
    files = filesystem_of(source)
    (folder / MANIFEST).write_bytes(_read(join(source, MANIFEST)))
    expected = read_manifest(folder)["files"]

    def get(name: str) -> None:
        path, url = folder / name, join(source, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        with_retries(url, lambda: files.get_file(url, str(path)))
        if entry(path) != expected[name]:
            raise Damaged(f"{url} is not what was saved")
        with open(path, "rb") as file:
            os.fsync(file.fileno())

    _each(get, list(expected), threading.Event())


def _read(url: str) -> bytes:
    try:
        return read_whole(url)
    except FileNotFoundError:
        raise Damaged(f"{url} is missing") from None


def _steps_of(url: str) -> list[int]:
    try:
        return [int(step) for step in json.loads(read_whole(join(url, INDEX)))["steps"]]
    except FileNotFoundError:
        return []
    except (ValueError, KeyError, TypeError):
        raise UserError(
            f"checkpoint.mirror: {join(url, INDEX)} cannot be read as JSON; restore or remove it"
        ) from None


def _each(work: Callable[[str], None], names: list[str], given_up: threading.Event) -> None:
    with ThreadPoolExecutor(_AT_ONCE, "forge-mirror", give_up_on, (given_up,)) as pool:
        list(pool.map(work, names))


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # a file system without links
        shutil.copy2(source, target)
