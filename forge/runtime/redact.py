"""Secrets in URLs (passwords, signatures, tokens), which are left out of everything that is logged or written."""

from __future__ import annotations

import re
from typing import Any

HIDDEN = "REDACTED"
_LOGIN = re.compile(r"://[^/?#\s\"'<>\\]*@")
_SECRET = re.compile(
    r"([?&][^=&?#\s\"'<>\\]*(?:auth|credential|key|passw|pwd|secret|sig|token)[^=&#\s\"'<>\\]*=)[^&#\s\"'<>\\]+",
    re.IGNORECASE,
)


def redact(text: str) -> str:
    """Return `text` with the secrets of each URL replaced by REDACTED: user and password, and values such as `sig=...`."""
    if "://" not in text:
        return text
    return _SECRET.sub(rf"\g<1>{HIDDEN}", _LOGIN.sub(f"://{HIDDEN}@", text))


def redact_all(value: Any) -> Any:
    """Return a value of JSON with every text in it redacted."""
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, list | tuple):
        return [redact_all(one) for one in value]
    if isinstance(value, dict):
        return {key: redact_all(one) for key, one in value.items()}
    return value


def is_redacted(url: str) -> bool:
    """Return whether secrets of this URL have been replaced, so that it cannot be opened."""
    return f"://{HIDDEN}@" in url or any(match[0].endswith(f"={HIDDEN}") for match in _SECRET.finditer(url))
