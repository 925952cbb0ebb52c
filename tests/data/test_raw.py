import errno

import numpy as np
import pytest

from forge.data.array import map_array
from forge.data.raw import SAMPLE_BYTES, SAMPLES, RawTokens
from forge.data.sources import open_source
from forge.runtime.errors import BAD_CONFIG, FAILED, UserError


def write(path, ids, dtype="uint16"):
    np.asarray(ids).astype(dtype).tofile(path)
    return path


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_ids_are_read_from_anywhere(tmp_path, dtype):
    source = open_source(str(write(tmp_path / "a.bin", range(1000), dtype)), 0, 1000, dtype=dtype)
    assert source.tokens == 1000
    assert source.read(990, 10).tolist() == list(range(990, 1000))


def test_a_dtype_is_never_guessed(tmp_path):
    """Trap 12: refused both for a file size valid for two dtypes and for a size valid for one."""
    for ids in (range(1000), range(999)):
        with pytest.raises(UserError, match=r'write {path = ".*a.bin", dtype = "uint16"} or .*"uint32"'):
            open_source(str(write(tmp_path / "a.bin", ids)), 0, 1000)


def test_a_megatron_dataset_named_by_its_bin_is_refused_with_its_index(tmp_path):
    write(tmp_path / "a.bin", range(10))
    (tmp_path / "a.idx").touch()
    with pytest.raises(UserError, match=r"if it belongs to a Megatron dataset, name a.idx beside it instead"):
        open_source(str(tmp_path / "a.bin"), 0, 1000)


def test_documents_end_with_eos(tmp_path):
    path = write(tmp_path / "a.bin", [5, 6, 0, 7, 0, 0, 8])
    source = RawTokens(path, "uint16", 100, eos_id=0)
    assert source.document_ids(0, 7).tolist() == [0, 0, 0, 1, 1, 2, 3]
    assert source.document_ids(2, 3).tolist() == [0, 1, 1]
    assert RawTokens(path, "uint16", 100).document_ids(1, 4).tolist() == [0, 0, 0, 0]


def test_an_eos_id_outside_the_vocabulary_is_refused(tmp_path):
    path = write(tmp_path / "a.bin", [5, 6, 0])
    with pytest.raises(UserError, match=r"a.bin: eos_id 100 is not below model.vocab_size 100"):
        open_source(str(path), 0, 100, dtype="uint16", eos_id=100)
    assert RawTokens(path, "uint16", 100, eos_id=99).tokens == 3


def test_d1_an_id_beyond_the_vocabulary_is_reported_by_file_and_byte(tmp_path):
    source = RawTokens(write(tmp_path / "a.bin", [1, 2, 300, 4]), "uint16", 300)
    assert source.read(0, 2).tolist() == [1, 2]
    with pytest.raises(UserError, match=r"a.bin: token id 300 at byte 4 .* model.vocab_size 300"):
        source.read(1, 3)


def test_a_wrong_dtype_exceeds_the_vocabulary(tmp_path):
    source = RawTokens(write(tmp_path / "a.bin", range(100)), "uint32", 1000)
    with pytest.raises(UserError, match=r"correct the source's dtype"):
        source.read(0, 50)


@pytest.mark.parametrize(("content", "message"), [(b"", "is empty"), (b"abc", "not a multiple of 2")])
def test_d1_files_without_ids_are_refused(tmp_path, content, message):
    (tmp_path / "a.bin").write_bytes(content)
    with pytest.raises(UserError, match=message):
        RawTokens(tmp_path / "a.bin", "uint16", 10)


def test_a_missing_file_is_reported(tmp_path):
    with pytest.raises(UserError, match=r"b.bin: cannot be read: No such file"):
        RawTokens(tmp_path / "b.bin", "uint16", 10)


def test_d2_the_fingerprint_depends_on_content_not_on_the_path(tmp_path):
    def fingerprint(name, ids, **options):
        return RawTokens(write(tmp_path / name, ids), "uint16", 2**16, **options).fingerprint

    large = np.arange(2 * SAMPLES * SAMPLE_BYTES // 2)  # twice the sampled bytes
    same = fingerprint("a.bin", large)
    assert fingerprint("b.bin", large) == same
    assert fingerprint("c.bin", large, eos_id=3) != same
    assert fingerprint("d.bin", large[:-1]) != same
    assert fingerprint("e.bin", large[::-1]) != same
    assert fingerprint("f.bin", np.append(large[:-1], 0)) != same, "the end is always among the samples"


@pytest.mark.parametrize(
    ("number", "code"), [(errno.EACCES, BAD_CONFIG), (errno.ESTALE, FAILED), (errno.EIO, FAILED)]
)
def test_a_failing_file_system_is_no_error_of_the_user(tmp_path, monkeypatch, number: int, code: int) -> None:
    """Exit code 2 would end a chain of jobs, 1 lets it start again."""

    def fail(*_: object) -> None:
        raise OSError(number, "as planted")

    monkeypatch.setattr(np, "memmap", fail)
    with pytest.raises(UserError, match=r"a.bin: cannot be read: as planted") as error:
        map_array(tmp_path / "a.bin", np.dtype("u2"))
    assert error.value.exit_code == code
