import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forge.data.synthetic import SyntheticSource
from forge.runtime.errors import UserError


def entropy(counts):
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())


@settings(max_examples=50)
@given(start=st.integers(0, 10**15), count=st.integers(1, 3000), lead=st.integers(0, 2000))
def test_any_part_is_the_same_within_a_larger_part(start, count, lead):
    source = SyntheticSource(3, 500)
    whole = source.read(start, lead + count)
    assert np.array_equal(SyntheticSource(3, 500).read(start + lead, count), whole[lead:])
    documents = source.document_ids(start, lead + count)[lead:]
    assert np.array_equal(source.document_ids(start + lead, count), documents - documents[0])


@pytest.mark.parametrize("vocab_size", [2, 3, 8, 17, 258, 128_256])
def test_tokens_are_ids_and_successors_follow_half_the_time(vocab_size):
    tokens = SyntheticSource(0, vocab_size).read(0, 1 << 16)
    assert tokens.min() >= 0 and tokens.max() < vocab_size
    follows = np.mean((tokens[:-1] + 1) % vocab_size == tokens[1:])
    assert follows > 0.48 and (vocab_size < 128 or follows < 0.52)


@pytest.mark.parametrize("vocab_size", [8, 64, 256, 4096])
def test_counts_are_informative_and_pairs_more_so(vocab_size):
    tokens = SyntheticSource(0, vocab_size).read(0, 1 << 17)
    unigram = entropy(np.bincount(tokens))
    pairs = entropy(np.unique(tokens[:-1] * vocab_size + tokens[1:], return_counts=True)[1])
    assert unigram < 0.75 * np.log(vocab_size)
    assert pairs - unigram < 0.75 * unigram


def test_entropies_match_the_docstring():
    tokens = SyntheticSource(0, 4096).read(0, 1 << 18)
    unigram = entropy(np.bincount(tokens))
    pairs = entropy(np.unique(tokens[:-1] * 4096 + tokens[1:], return_counts=True)[1])
    assert unigram == pytest.approx(2.74, abs=0.05)
    assert pairs - unigram == pytest.approx(1.37, abs=0.05)


def test_far_parts_have_the_same_statistics():
    source = SyntheticSource(0, 256)
    near, far = (np.bincount(source.read(start, 1 << 17), minlength=256) for start in (0, 10**15))
    assert np.abs(near - far).max() < 6 * np.sqrt(near.max() * 2)
    assert not np.array_equal(source.read(0, 1024), source.read(10**15 // 1024 * 1024, 1024))


def test_documents_begin_at_jumps_every_128_tokens_on_average():
    source = SyntheticSource(0, 1000)
    documents, tokens = source.document_ids(0, 1 << 17), source.read(0, 1 << 17)
    begins = np.flatnonzero(np.diff(documents)) + 1
    assert 110 < (1 << 17) / len(begins) < 150
    # About one jump in a thousand hits the successor by chance.
    assert np.mean((tokens[begins - 1] + 1) % 1000 == tokens[begins]) < 0.05


def test_seeds_give_other_streams_of_the_same_chain():
    first, second = SyntheticSource(0, 256), SyntheticSource(1, 256)
    assert not np.array_equal(first.read(0, 100), second.read(0, 100))
    assert set(first.read(0, 1 << 14)) & set(second.read(0, 1 << 14)) > {0, 32, 64}
    assert first.fingerprint != second.fingerprint


def test_a_vocabulary_of_one_is_refused():
    with pytest.raises(UserError, match="at least 2"):
        SyntheticSource(0, 1)


def test_the_stream_never_changes():
    assert SyntheticSource(0, 256).read(10**15, 8).tolist() == [0, 32, 33, 0, 1, 2, 0, 1]
