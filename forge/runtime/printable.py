"""Text from outside, such as a file name or a model's output, as text that a terminal shows and does not obey."""

from __future__ import annotations

import unicodedata

# They reorder the text around them.
_DIRECTIONS = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


def printable(text: str, keep: str = "") -> str:
    """Return `text` with control characters, marks of direction and lone surrogates as escapes. keep: characters to leave."""
    return "".join(
        character.encode("unicode_escape").decode()
        if character not in keep
        and (character in _DIRECTIONS or unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp"))
        else character
        for character in text
    )
