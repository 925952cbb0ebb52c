import numpy as np
import pytest

from forge.data.raw import MegatronTokens
from forge.data.sources import open_source
from forge.runtime.errors import UserError
from tests.support.megatron import Written


def plain(**changes):
    """Return documents of 3 + 2, 4 and 1 tokens; the first has two sequences."""
    return Written(**({"lengths": [3, 2, 4, 1], "firsts": [0, 2, 3, 4]} | changes))


@pytest.mark.parametrize("name", ["set", "set.idx"])
def test_opened_by_prefix_or_index(tmp_path, name):
    plain().to(tmp_path / "set")
    source = open_source(str(tmp_path / name), 0, 100)
    assert isinstance(source, MegatronTokens) and (source.tokens, source.documents) == (10, 3)
    assert source.read(2, 5).tolist() == [2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("code", "dtype"), [(1, "u1"), (2, "i1"), (3, "<i2"), (4, "<i4"), (5, "<i8"), (8, "<u2")]
)
def test_every_integer_dtype(tmp_path, code, dtype):
    source = MegatronTokens(plain(code=code, dtype=dtype).to(tmp_path / "set"), 100)
    assert source.read(0, 10).tolist() == list(range(10))
    assert source.document_ids(0, 10).tolist() == [0, 0, 0, 0, 0, 1, 1, 1, 1, 2]


def test_documents_within_a_window(tmp_path):
    source = MegatronTokens(plain().to(tmp_path / "set"), 100)
    assert source.document_ids(3, 3).tolist() == [0, 0, 1]
    assert source.document_ids(5, 4).tolist() == [0, 0, 0, 0]
    assert source.document_ids(9, 1).tolist() == [0]


def test_empty_documents_have_no_effect(tmp_path):
    written = Written(lengths=[2, 2], firsts=[0, 0, 1, 1, 2, 2])
    source = MegatronTokens(written.to(tmp_path / "set"), 100)
    assert source.document_ids(0, 4).tolist() == [0, 0, 1, 1]


def test_modes_of_multimodal_datasets_are_ignored(tmp_path):
    assert MegatronTokens(plain(tail=bytes(4)).to(tmp_path / "set"), 100).tokens == 10


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"magic": b"SOMETHING"}, "MMIDIDX"),
        ({"version": 2}, "version 2"),
        ({"code": 6}, "dtype code 6"),
        ({"tail": b"x"}, "truncated or damaged"),
        ({"pointers": [0, 6, 12, 18]}, "sequence 2 does not begin where"),
        ({"code": 4}, "sequence 1 does not begin where"),
        ({"firsts": [0, 3, 2, 4]}, "do not ascend"),
        ({"firsts": [1, 4]}, "must begin with 0 and end with 4"),
        ({"firsts": [0, 3]}, "must begin with 0 and end with 4"),
        ({"firsts": []}, "must begin with 0 and end with 4"),
        ({"lengths": [], "firsts": [0]}, "holds no sequence"),
    ],
)
def test_an_inconsistent_index_is_refused(tmp_path, changes, message):
    with pytest.raises(UserError, match=message):
        MegatronTokens(plain(**changes).to(tmp_path / "set"), 100)


def test_d1_a_truncated_bin_is_refused(tmp_path):
    plain().to(tmp_path / "set")
    (tmp_path / "set.bin").write_bytes((tmp_path / "set.bin").read_bytes()[:-2])
    with pytest.raises(UserError, match=r"set.bin: has 18 bytes, but set.idx says 20"):
        MegatronTokens(tmp_path / "set", 100)


def test_missing_files_are_reported(tmp_path):
    with pytest.raises(UserError, match=r"a.idx: cannot be read"):
        open_source(str(tmp_path / "a.idx"), 0, 100)
    plain().to(tmp_path / "b")
    (tmp_path / "b.bin").unlink()
    with pytest.raises(UserError, match=r"b.bin: cannot be read"):
        open_source(str(tmp_path / "b"), 0, 100)


@pytest.mark.parametrize(
    ("written", "vocab_size", "message"), [(plain(), 9, "id 9 at byte 18"), (plain(), 4, "id 4")]
)
def test_d1_an_id_beyond_the_vocabulary_is_reported_by_file_and_byte(tmp_path, written, vocab_size, message):
    source = MegatronTokens(written.to(tmp_path / "set"), vocab_size)
    with pytest.raises(UserError, match=message):
        source.read(0, 10)


def test_a_negative_id_is_refused(tmp_path):
    plain(code=4, dtype="<i4").to(tmp_path / "set")
    np.full(10, -1, "<i4").tofile(tmp_path / "set.bin")
    with pytest.raises(UserError, match=r"token id -1 at byte 0"):
        MegatronTokens(tmp_path / "set", 100).read(0, 10)


def test_d2_the_fingerprint_depends_on_content(tmp_path):
    first = MegatronTokens(plain().to(tmp_path / "a"), 100).fingerprint
    assert MegatronTokens(plain().to(tmp_path / "b"), 100).fingerprint == first
    assert MegatronTokens(plain(firsts=[0, 4]).to(tmp_path / "c"), 100).fingerprint != first
