"""`Mirror`: a thread copies complete checkpoints to a remote store. `restore` copies the newest copy back.

URL/mirror.json              steps of the run with a complete copy, ascending; written last
URL/step-00000100/...        the files of the local folder; manifest.json is written last and removed first
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import queue
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from forge.checkpoint import folders
from forge.checkpoint.commit import require_room
from forge.checkpoint.manifest import MANIFEST, Damaged, read_manifest
from forge.runtime.causes import Cause
from forge.runtime.distributed import cause_of
from forge.runtime.errors import FAILED, NO_CHECKPOINT, UserError
from forge.runtime.fault import fault_point
from forge.runtime.files import replace_atomically, sync_folder
from forge.runtime.remote import (
    filesystem_of,
    find_objects,
    give_up_on,
    is_transient,
    join,
    open_remote,
    read_whole,
    with_retries,
)

INDEX = "mirror.json"
_AT_ONCE = 8  # files
_READ_BYTES = 1 << 22
log = logging.getLogger(__name__)


class Mirror:
    """Copies checkpoints of `root` to `url` in the background. Only one process may copy to `url`.

    Methods return at once unless their docstring says otherwise. The store keeps the newest `keep_last` checkpoints (0:
    all) and the milestones of `keep_every` (0: none). A failed copy is logged and not repeated; the next checkpoint is
    copied as usual.
    """

    def __init__(self, url: str, root: Path, keep_last: int, keep_every: int):
        self._url, self._root, self._keep_last, self._keep_every = url, root, keep_last, keep_every
        self._files = filesystem_of(url)
        self._steps: list[int] | None = None  # known once the index has been read
        self._kept: float = math.inf  # later steps must leave the index before the next copy
        self._newest, self._count = -1, 0
        self.files = 0
        """Number of files copied so far."""
        self._given_up = threading.Event()
        self._lock = threading.Lock()
        self._waiting: Path | None = None  # the links of a copy that has not begun
        self._work: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self._thread = threading.Thread(target=self._run, name="forge-mirror", daemon=True)
        self._thread.start()

    def copy(self, step: int, *, if_missing: bool = False) -> None:
        """Copy the complete checkpoint of `step` in the background.

        The copy is skipped if a newer checkpoint completes before the copy begins. if_missing: also skip a checkpoint
        whose copy is complete.
        """
        self._newest, self._count = step, self._count + 1
        # The links are numbered, because a step may be saved again.
        links = self._root / f".mirrored-{folders.step_name(step)}.{self._count}"
        linked = None if if_missing else self._link(step, links)
        if not if_missing and linked is None:
            return
        with self._lock:
            outdated, self._waiting = self._waiting, links
        if outdated is not None:
            # The links would take up disk space until the running copy ends.
            shutil.rmtree(outdated, ignore_errors=True)

        def work() -> None:
            with self._lock:
                if self._waiting != links:
                    return  # a newer checkpoint has replaced this one
                self._waiting = None
            try:
                if step != self._newest:
                    return
                source = linked
                if if_missing and not self._has(step):
                    source = self._link(step, links)
                if source is not None:
                    self._copy(step, source)
            finally:
                shutil.rmtree(links, ignore_errors=True)

        self._work.put(work)

    def _link(self, step: int, links: Path) -> Path | None:
        """Fill the folder `links` with hard links, because the checkpoint of `step` may be removed before it is copied.

        Return `links`, or the checkpoint's own folder if the file system has no hard links, or None without a checkpoint.
        """
        folder = self._root / folders.step_name(step)
        try:
            shutil.copytree(folder, links, copy_function=os.link)
        except OSError as error:
            shutil.rmtree(links, ignore_errors=True)
            if (folder / MANIFEST).exists():
                return folder
            message = "checkpoint.mirror %s: step %d could not be copied: %s"
            log.error(message, self._url, step, error, extra=Cause.MIRROR_FAILED.mark)
            return None
        return links

    def forget_after(self, step: int) -> None:
        """Remove copies of steps after `step` from the index, and remove their manifests. The run repeats these steps.

        If the store does not answer, the next copy first tries again.
        """
        self._newest = min(self._newest, step)
        self._work.put(lambda: self._forget_after(step))

    def wait(self, seconds: float | None = None) -> bool:
        """Wait for all requested copies, at most `seconds` (None: no limit). Return whether they are complete.

        Afterwards no copy may be requested.
        """
        self._work.put(None)
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def close(self, seconds: float | None = None) -> None:
        """Wait for all requested copies, at most `seconds`. Then give up those that are not complete."""
        if not self.wait(seconds):
            message = "checkpoint.mirror %s: the copy of step %d is not complete; the next start makes it"
            log.warning(message, self._url, self._newest, extra=Cause.MIRROR_FAILED.mark)
            self._given_up.set()
            self._newest = -1

    def _run(self) -> None:
        give_up_on(self._given_up)
        while (work := self._work.get()) is not None:
            try:
                work()
            except Exception as error:
                log.error("checkpoint.mirror %s: %s", self._url, error, extra=Cause.MIRROR_FAILED.mark)

    def _copy(self, step: int, folder: Path) -> None:
        self._forget_after(self._kept)  # before the upload, because an abandoned step may be saved again
        target = join(self._url, folders.step_name(step))
        names = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]

        def put(name: str) -> None:
            url = join(target, name)
            with_retries(url, lambda: self._files.put_file(str(folder / name), url))
            self.files += 1

        _each(put, [name for name in names if name != MANIFEST], self._given_up)
        put(MANIFEST)
        steps = sorted({*self._known(), step})
        newest = steps[-self._keep_last :] if self._keep_last else steps
        milestone = folders.milestones(steps, self._keep_every)
        kept = [one for one in steps if one in newest or one in milestone]
        self._write(kept)
        log.info("copied the checkpoint of step %d to %s", step, target)
        for old in set(steps) - set(kept):
            self._remove(old, recursive=True)

    def _has(self, step: int) -> bool:
        """Return whether the index lists a copy of the checkpoint of `step` with the same manifest, i.e. the same content."""
        name = f"{folders.step_name(step)}/{MANIFEST}"
        try:
            return (
                step in self._known()
                and read_whole(join(self._url, name)) == (self._root / name).read_bytes()
            )
        except FileNotFoundError:
            return False

    def _forget_after(self, step: float) -> None:
        self._kept = min(self._kept, step)
        known = self._known()
        later = [one for one in known if one > self._kept]
        if later:
            self._write([one for one in known if one <= self._kept])
        self._kept = math.inf
        for one in later:
            self._remove(one, recursive=False)

    def _remove(self, step: int, recursive: bool) -> None:
        """Remove the manifest of a copy that is no longer in the index. A rebuilt index then omits the copy.

        recursive: also remove the copy's other files.
        """
        folder = join(self._url, folders.step_name(step))
        try:
            self._files.rm_file(join(folder, MANIFEST))
            if recursive and folder.startswith("file://"):
                shutil.rmtree(self._files._strip_protocol(folder))
            elif recursive:  # by literal names, because `rm` would expand a * in the run's name
                _each(self._files.rm_file, list(find_objects(folder)), self._given_up)
        except Exception as error:  # e.g. a store that forbids removal
            message = "%s: step %d could not be removed: %s"
            log.warning(message, self._url, step, error, extra=Cause.NOT_REMOVED.mark)

    def _known(self) -> list[int]:
        if self._steps is None:
            self._steps = copied_steps(self._url)
        return self._steps

    def _write(self, steps: list[int]) -> None:
        content, url = json.dumps({"version": 1, "steps": steps}).encode(), join(self._url, INDEX)

        def put() -> None:
            if url.startswith("file://"):  # the only store that overwrites files in place
                path = Path(self._files._strip_protocol(url))
                path.parent.mkdir(parents=True, exist_ok=True)
                replace_atomically(path, content)
            else:
                self._files.pipe_file(url, content)

        with_retries(url, put)
        self._steps = steps


def restore(
    url: str,
    root: Path,
    after: int = -1,
    is_abandoned: Callable[[Path], bool] = lambda _: False,
    copied: Callable[[], None] = lambda: None,
) -> int | None:
    """Copy the newest checkpoint of a step after `after` from the mirror at `url` into `root`.

    Return its step, or None if the mirror has none. is_abandoned: whether a copied folder is of a branch that the run has
    left; such copies are passed over. copied: called after each file, perhaps by several threads at once.

    An incomplete or damaged copy is logged as an error and skipped. The mirror is not changed. Raises UserError with exit
    code 77 if no copy is usable. Raises UserError with exit code 1 if the store does not answer or `root` has too little
    room; the same command can then be repeated.
    """
    steps = [step for step in copied_steps(url) if step > after]
    damaged = list(steps)
    for step in reversed(steps):
        source = join(url, folders.step_name(step))
        log.warning("restoring step %d from %s into %s", step, source, root, extra=Cause.NOTE.mark)
        partial = folders.start_partial(root, step)
        try:
            _fetch(source, partial, copied)
        except Damaged as error:
            shutil.rmtree(partial, ignore_errors=True)
            log.error("%s cannot be used: %s", source, error, extra=Cause.MIRROR_FAILED.mark)
            continue
        except (UserError, OSError) as error:
            shutil.rmtree(partial, ignore_errors=True)
            raise UserError(
                f"checkpoint.mirror = {url}: restoring step {step} failed: {error}. The mirror is unchanged. Remove the "
                "cause, then run the same command again",
                FAILED,
                cause_of(error),
            ) from error
        if is_abandoned(partial):
            log.warning("%s is of a branch that a roll-back has left", source, extra=Cause.NOTE.mark)
            shutil.rmtree(partial, ignore_errors=True)
            damaged.remove(step)
            continue
        partial.rename(root / folders.step_name(step))
        sync_folder(root)
        return step
    if damaged:
        raise UserError(
            f"checkpoint.mirror = {url}: none of its checkpoints {damaged} can be used; see the log. To begin a new "
            "history, use another run.name",
            NO_CHECKPOINT,
        )
    return None


def copied_steps(url: str) -> list[int]:
    """Return the steps with a complete copy in the mirror at `url`, ascending.

    The mirror's index lists them. If the index is missing or unreadable, return the steps of all copies with a manifest.
    """
    index = join(url, INDEX)
    try:
        return [int(step) for step in json.loads(read_whole(index))["steps"]]
    except FileNotFoundError:
        problem = "is missing"
    except (ValueError, KeyError, TypeError):
        problem = "cannot be read as JSON"
    found = find_objects(url)
    homes = [name.split("/")[-2] for name in found if name.endswith(f"/{MANIFEST}")]
    steps = sorted(step for home in homes if (step := folders.step_of(home)) is not None)
    if steps or problem != "is missing":
        message = "the index %s %s: it is rebuilt from the manifests of steps %s"
        log.warning(message, index, problem, steps, extra=Cause.MIRROR_FAILED.mark)
    return steps


def _fetch(source: str, folder: Path, copied: Callable[[], None]) -> None:
    """Fill `folder` from the copy at `source`. Raises Damaged if the copy differs from the saved checkpoint."""
    try:
        (folder / MANIFEST).write_bytes(read_whole(join(source, MANIFEST)))
    except FileNotFoundError:
        raise Damaged(f"{join(source, MANIFEST)} is missing") from None
    manifest = read_manifest(folder)
    files, expected = filesystem_of(source), manifest["files"]
    fault_point("mirror.restore", manifest["step"])
    require_room(folder, sum(described["size"] for described in expected.values()))

    def get(name: str) -> None:
        path, url = folder / name, join(source, name)
        size = with_retries(url, lambda: _size(files, url))
        if size != expected[name]["size"]:
            raise Damaged(f"{url} " + ("is missing" if size is None else "differs from its saved content"))
        path.parent.mkdir(parents=True, exist_ok=True)
        digest = hashlib.sha256()
        with open_remote(url) as remote, open(path, "wb") as file:
            while block := remote.read(_READ_BYTES):
                digest.update(block)
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
        if digest.hexdigest() != expected[name]["sha256"]:
            raise Damaged(f"{url} differs from its saved content")
        copied()

    _each(get, list(expected), threading.Event())


def _size(files: Any, url: str) -> int | None:
    try:
        return int(files.info(url)["size"])
    except FileNotFoundError as error:
        if is_transient(error):  # some stores report an unreachable server as a missing file
            raise
        return None


def _each(work: Callable[[str], None], names: list[str], given_up: threading.Event) -> None:
    with ThreadPoolExecutor(_AT_ONCE, "forge-mirror", give_up_on, (given_up,)) as pool:
        list(pool.map(work, names))
