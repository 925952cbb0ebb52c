"""Text from outside, such as a file name or a model's output, as text that a terminal shows and does not obey."""

from __future__ import annotations

import unicodedata


def printable(text: str, keep: str = "") -> str:
    """Return `text` with control characters, marks of direction and lone surrogates as escapes. keep: characters to leave."""
    return "".join(
        character
        if character in keep or unicodedata.category(character) not in ("Cc", "Cf", "Cs", "Zl", "Zp")
        else character.encode("unicode_escape").decode()
        for character in text
    )
