"""events.jsonl: what happened to a run, over all its starts. Never cut."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from forge.observe.json_lines import JsonLines


def utc_now() -> str:
    """The time in ISO 8601, UTC, to the millisecond: 2025-06-01T12:00:00.123+00:00."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


class EventLog(JsonLines):
    """Lines `{"time": ..., "event": kind, ...}`."""

    def write(self, kind: str, **fields: Any) -> None:
        self.append(time=utc_now(), event=kind, **fields)
