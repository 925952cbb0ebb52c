"""Record the files of forge/ whose functions run while a model is built and trained."""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from forge import hook
from forge.runtime import world
from forge.train import trainer

FORGE = Path(hook.__file__).parent
# Calls from hooks and from the logger count as `reports`. All other calls count as `trains`.
REPORTS: set[CodeType] = {hook._call.__code__, logging.Logger._log.__code__}


class Traced:
    """File names relative to forge/, by kind: `trains` and `reports`."""

    def __init__(self) -> None:
        self.files: dict[str, set[str]] = {"trains": set(), "reports": set()}
        self._thread = threading.local()

    def profile(self, frame: FrameType, event: str, _: object) -> None:
        state = self._thread.__dict__
        inside = state.setdefault("inside", [])
        if event == "return" and inside and inside[-1] is frame:
            inside.pop()
        if event != "call":
            return
        main = threading.current_thread() is threading.main_thread()
        if frame.f_code in REPORTS:
            inside.append(frame)
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(FORGE) and frame.f_code.co_name != "<module>":
            name = path.relative_to(FORGE).as_posix()
            # Of the other threads, the loader counts as `trains`; savers and watchers count as `reports`.
            trains = state.setdefault("trains", main or name == "data/loader.py")
            self.files["trains" if trains and not inside else "reports"].add(name)


def trace() -> None:
    """Trace all builds and steps of this process and its threads; write `traced.RANK.json` at the end of the run."""
    found = Traced()
    threading.setprofile(found.profile)  # the loader's thread

    def traced(owner: Any, name: str) -> None:
        inner = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            sys.setprofile(found.profile)
            try:
                return inner(*args, **kwargs)
            finally:
                sys.setprofile(None)

        setattr(owner, name, call)

    for owner, name in (
        (trainer, "build_parallel_model"),
        (trainer.Trainer, "_make_optimizer"),
        (trainer.Trainer, "step"),
    ):
        traced(owner, name)
    train = trainer.Trainer.train

    def train_and_write(self: Any, *args: Any) -> Any:
        result = train(self, *args)
        files = {kind: sorted(names) for kind, names in found.files.items()}
        rank = world.read_world().rank
        (Path(os.environ["RUN_UNDER_TEST"]) / f"traced.{rank}.json").write_text(json.dumps(files))
        return result

    trainer.Trainer.train = train_and_write  # type: ignore[method-assign]
