"""At a tokenizer's allowed cuts, the ids of the parts are the ids of the whole, in any context."""

import io
import json
import random
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge.data.tokenizer import _PATTERNS, ByteTokenizer, HuggingFaceTokenizer, SentencePieceTokenizer

SOURCE = [path.read_text() for path in sorted(Path(__file__).parent.glob("*.py"))]
EXACT = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False, "add_dummy_prefix": False}


def sentencepiece(**options):
    from sentencepiece import SentencePieceTrainer

    model = io.BytesIO()
    given = EXACT | {"byte_fallback": True, "model_type": "bpe"} | options
    given |= {"vocab_size": 600, "minloglevel": 2}
    SentencePieceTrainer.train(sentence_iterator=iter(SOURCE), model_writer=model, **given)
    return SentencePieceTokenizer(model.getvalue(), "test")


def huggingface(*steps, model=None, **changes):
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(list(steps))
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=900, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator(SOURCE, trainer)
    described = json.loads(made.to_str()) | changes
    return HuggingFaceTokenizer({"tokenizer.json": json.dumps(described).encode()}, "test")


def split_by(pattern, behavior="isolated"):
    tokenizers = pytest.importorskip("tokenizers")
    pre = tokenizers.pre_tokenizers
    split = pre.Split(tokenizers.Regex(pattern), behavior)
    return huggingface(split, pre.ByteLevel(add_prefix_space=False, use_regex=False))


def byte_level(**options):
    tokenizers = pytest.importorskip("tokenizers")
    pre = tokenizers.pre_tokenizers
    return huggingface(pre.Digits(individual_digits=True), pre.ByteLevel(**options))


KINDS = {
    "bytes": ByteTokenizer,
    "sentencepiece": lambda: sentencepiece(split_digits=True, allow_whitespace_only_pieces=True),
    "across spaces": lambda: sentencepiece(split_by_whitespace=False),
    "with symbols": lambda: sentencepiece(user_defined_symbols=["for i in", "[a]", "\u2581b\u2581"]),
    **{
        f"pattern {number}": lambda pattern=pattern: split_by(pattern)
        for number, pattern in enumerate(_PATTERNS)
    },
    "GPT-2's own": lambda: byte_level(add_prefix_space=False),
}
WORDS = ["23", "  ", "    ", "\r\n", "'s", "'ll", "):\n", "e\u0301", "for i in", "[a]", "return", "self."]
PARTS = st.sampled_from([*"ab1é日À²٣ǆ🎉 \n\t._/\u3000\u2581", *WORDS])
TEXTS = st.lists(PARTS, max_size=20).map("".join)


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request):
    return KINDS[request.param]()


@pytest.mark.long
@given(before=TEXTS, text=TEXTS, after=TEXTS, start=st.integers(0, 12))
def test_the_ids_of_the_parts_equal_those_of_the_whole(tokenizer, before, text, after, start):
    assert tokenizer.can_cut
    place = tokenizer.cut(text, start)
    assert 0 <= place <= len(text)
    if place < len(text):
        assert place >= max(start, 1)
        parts = tokenizer.encode(before + text[:place]) + tokenizer.encode(text[place:] + after)
        assert tokenizer.encode(before + text + after) == parts


def test_usual_text_can_be_cut_everywhere(tokenizer):
    text = "".join(SOURCE)
    places, place = [], 0
    while place < len(text):
        place = tokenizer.cut(text, place + 1)
        places.append(place)
    assert places[-1] == len(text) and max(b - a for a, b in pairwise(places)) < 500


def refused():
    spm = {"add_dummy_prefix": True}, {"remove_extra_whitespaces": True}, {"model_type": "unigram"}
    spm += {"byte_fallback": False}, {"normalization_rule_name": "nmt_nfkc"}
    yield from (lambda options=options: sentencepiece(**options) for options in spm)
    yield lambda: byte_level(add_prefix_space=True)
    yield lambda: byte_level(add_prefix_space=False, use_regex=False)
    yield lambda: split_by(r"[a-z ]+")
    yield lambda: split_by(_PATTERNS[0], "merged_with_previous")
    yield lambda: huggingface(*_gpt2(), normalizer={"type": "Prepend", "prepend": "_"})
    spanning = {"id": 5, "content": "a b", "special": False, "rstrip": False, "lstrip": False}
    spanning |= {"single_word": False, "normalized": False}
    yield lambda: huggingface(*_gpt2(), added_tokens=[spanning])
    yield lambda: huggingface(*_gpt2(), added_tokens=[spanning | {"content": "ab", "rstrip": True}])


def _gpt2():
    tokenizers = pytest.importorskip("tokenizers")
    return [tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)]


@pytest.mark.parametrize("make", list(refused()))
def test_no_cut_is_allowed_without_certainty(make):
    tokenizer = make()
    text = "a b\nc d 1 2"
    assert not tokenizer.can_cut and tokenizer.cut(text, 1) == len(text)


def test_a_letter_unknown_to_some_libraries_is_no_cut():
    """U+1DF00 is a letter since Unicode 14."""
    tokenizer = byte_level(add_prefix_space=False)
    assert tokenizer.cut("\U0001df00 ab c", 1) == 4


def test_random_texts_keep_their_ids_when_cut_everywhere(tokenizer):
    draw = random.Random(0)
    for _ in range(20):
        text = "".join(draw.choices("ab \n日é1.'s\t\r/x", k=300))
        ids, place = [], 0
        while place < len(text):
            begin, place = place, tokenizer.cut(text, place + 1)
            ids += tokenizer.encode(text[begin:place])
        assert ids == tokenizer.encode(text)
