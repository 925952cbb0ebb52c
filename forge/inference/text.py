"""Text from tokens that come one at a time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol


class Decoder(Protocol):
    """A tokenizer's way back."""

    def decode(self, ids: Iterable[int]) -> str: ...


class TextStream:
    """The text that tokens add to a prompt, as soon as it is certain.

    What a token says depends on those before it: a character may take several tokens, and a word's space may be left
    out where a text begins. So what was told last is decoded along, and what ends within a character waits.
    """

    def __init__(self, tokenizer: Decoder, prompt: Sequence[int]):
        self._tokenizer = tokenizer
        self._told = list(prompt)
        self._waiting: list[int] = []
        self.text = ""

    def add(self, token: int) -> str:
        """The text that has become certain with this token; may be empty."""
        self._waiting.append(token)
        new = self._new_text()
        if not new or new.endswith("\ufffd"):
            return ""
        return self._tell(new)

    def end(self) -> str:
        """What is left when no more tokens come: a character that was never finished, as U+FFFD."""
        return self._tell(self._new_text()) if self._waiting else ""

    def _new_text(self) -> str:
        before = self._tokenizer.decode(self._told)
        return self._tokenizer.decode(self._told + self._waiting)[len(before) :]

    def _tell(self, new: str) -> str:
        self._told, self._waiting = self._waiting, []
        self.text += new
        return new
