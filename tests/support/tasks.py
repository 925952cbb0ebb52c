"""A patch of a run that scores lm-eval's tasks."""

from __future__ import annotations

import os
from typing import Any


def cannot_load_once() -> None:
    """Let rank 1 fail when it loads tasks for the first time."""
    from forge.tools.inference import tasks

    load, calls = tasks.load_tasks, []

    def fails(*arguments: Any) -> None:
        calls.append(arguments)
        if os.environ["RANK"] == "1" and len(calls) == 1:
            raise OSError("the hub does not answer")
        load(*arguments)

    tasks.load_tasks = fails
