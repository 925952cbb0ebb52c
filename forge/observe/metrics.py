"""metrics.jsonl: the history of a run, told once: one JSON object a line for a step or an evaluation."""

from __future__ import annotations

import json
import logging

from forge.files import replace_atomically
from forge.observe.json_lines import JsonLines

log = logging.getLogger(__name__)


class MetricsLog(JsonLines):
    """Lines with a `step`; a number that is not finite is null."""

    def cut(self, after_step: int) -> None:
        """Drop all lines whose step is greater than `after_step`, so that a resumed run tells no step twice.

        A line torn by a kill, or unreadable, goes too. The file is replaced atomically, if at all; lines that still wait for
        room on the disk are cut with it.
        """
        self.close()
        written = self.path.read_bytes() if self.path.exists() else b""
        lines = (written + self._unwritten).splitlines(keepends=True)
        content = b"".join(
            line for number, line in enumerate(lines, 1) if self._keeps(line, number, after_step)
        )
        if content != written:
            replace_atomically(self.path, content)
        self._unwritten = b""

    def _keeps(self, line: bytes, number: int, after_step: int) -> bool:
        try:
            keep = json.loads(line)["step"] <= after_step
        except (ValueError, KeyError, TypeError):
            if line.endswith(b"\n"):
                log.warning("%s: line %d is not a metrics line and is dropped", self.path, number)
            return False
        # Without its end a line was torn, even where what is left of it happens to be JSON.
        return keep and line.endswith(b"\n")
