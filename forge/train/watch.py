"""What looks on while the loop trains: the one place to hook something in that the algorithm does not need."""

from __future__ import annotations

from typing import Protocol


class Watcher(Protocol):
    """Called on every rank around every step, in the order of the list; it must change nothing and not be collective."""

    def before_step(self, step: int) -> None:
        """`step` is about to be made; its batch is not yet read."""

    def after_step(self, step: int) -> None:
        """`step` has been launched; on a CUDA card it may still be running."""
