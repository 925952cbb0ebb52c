"""The pieces that TextStream emits add up to the text of all tokens."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge.data.tokenizer import ByteTokenizer
from forge.tools.inference import TextStream


def emitted(prompt: list[int], new: list[int]) -> list[str]:
    stream = TextStream(ByteTokenizer(), prompt)
    parts = [stream.add(token) for token in new] + [stream.end()]
    assert stream.text == "".join(parts)
    return parts


def test_a_character_of_several_tokens_waits_until_it_is_whole() -> None:
    assert emitted([256], list("aé😀b".encode())) == ["a", "", "é", "", "", "", "😀", "b", ""]


def test_an_incomplete_character_is_emitted_at_the_end() -> None:
    assert emitted([256], [97, 0xC3]) == ["a", "", "\ufffd"]
    assert emitted([256], [0xC3, 97]) == ["", "\ufffda", ""]


@pytest.mark.parametrize("split", [1, 2, 3])
def test_a_character_begun_in_the_prompt_is_emitted_whole(split: int) -> None:
    character = list("😀".encode())
    parts = emitted([256, 97, *character[:split]], [*character[split:], 98])
    assert parts == [*[""] * (3 - split), "😀", "b", ""]


def test_a_prompt_ending_in_an_incomplete_character_loses_nothing() -> None:
    assert emitted([256, 97, 0xC3], [98]) == ["b", ""]
    assert emitted([256, *"\ufffd".encode()], [98]) == ["b", ""]


def test_special_tokens_emit_nothing() -> None:
    assert emitted([256, 97], [257, 98, 256, 257]) == ["", "b", "", "", ""]


@given(
    prompt=st.text(st.characters(exclude_categories=["Cs"])),
    new=st.text(st.characters(exclude_categories=["Cs"])),
)
def test_any_text_is_emitted_whole(prompt: str, new: str) -> None:
    assert "".join(emitted([256, *prompt.encode()], list(new.encode()))) == new


@given(
    text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\ufffd"), min_size=1),
    cut=st.integers(0),
)
def test_any_split_of_a_text_emits_the_characters_completed_by_the_new_tokens(text: str, cut: int) -> None:
    tokens = list(text.encode())
    cut %= len(tokens)
    whole = bytes(tokens[:cut]).decode(errors="ignore")
    assert "".join(emitted([256, *tokens[:cut]], tokens[cut:])) == text[len(whole) :]


@pytest.mark.parametrize("split", range(1, 12))
def test_a_space_between_words_is_kept_by_a_tokenizer_dropping_the_first(split: int) -> None:
    class Words:
        """Ids are words; like SentencePiece with a dummy prefix, a text does not begin with a space."""

        def decode(self, ids):  # type: ignore[no-untyped-def]
            return "".join(f" w{i}" for i in ids)[1:]

    ids = list(range(12))
    stream = TextStream(Words(), ids[:split])
    for token in ids[split:]:
        stream.add(token)
    assert Words().decode(ids[:split]) + stream.text == Words().decode(ids)
