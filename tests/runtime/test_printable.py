"""Untrusted text cannot control the terminal."""

import pytest

from forge.runtime.terminal import printable


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain é 中 👩\u200d💻", "plain é 中 👩\u200d💻"),
        ("\x1b[2J\x1b]0;title\x07", r"\x1b[2J\x1b]0;title\x07"),
        ("a\rb\x9b2J\x7f", r"a\rb\x9b2J\x7f"),
        ("a\u202eb\u2066c", r"a\u202eb\u2066c"),
        ("bad\udce9", r"bad\udce9"),
        ("one\ntwo", r"one\ntwo"),
    ],
)
def test_control_characters_are_escaped_and_letters_are_not(text: str, shown: str) -> None:
    assert printable(text) == shown


def test_characters_may_be_kept() -> None:
    assert printable("a\n\tb\x1b", keep="\n\t") == "a\n\tb\\x1b"
