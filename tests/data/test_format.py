import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forge.data import format as format_module
from forge.data.format import TokenDataset, block_digest
from forge.data.integrity import check_files
from forge.data.sources import count_windows, open_source
from forge.runtime.errors import UserError
from forge.tools.prepare.writer import ShardWriter
from tests.support.streams import write_documents


@pytest.mark.long
@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=12),
    shard_tokens=st.integers(1, 40),
    vocab_size=st.sampled_from([7, 1 << 16, (1 << 16) + 1]),
    data=st.data(),
)
def test_written_tokens_are_read_back_across_shards(
    tmp_path_factory, lengths, shard_tokens, vocab_size, data
):
    item = 2 if vocab_size <= 1 << 16 else 4
    folder = tmp_path_factory.mktemp("set") / "x"
    dataset = write_documents(folder, lengths, vocab_size=vocab_size, shard_bytes=shard_tokens * item)
    total = sum(lengths)
    assert (dataset.tokens, dataset.documents) == (total, len(lengths))
    assert max(file.stat().st_size for file in folder.glob("tokens-*")) <= shard_tokens * item
    start = data.draw(st.integers(0, total - 1))
    count = data.draw(st.integers(1, total - start))
    assert np.array_equal(dataset.read(start, count), np.arange(start, start + count) % vocab_size)
    owner = np.repeat(np.arange(len(lengths)), lengths)[start : start + count]
    assert np.array_equal(dataset.document_ids(start, count), owner - owner[0])
    assert not any(check.problem for check in check_files(folder))


def test_dtype_is_the_smallest_for_the_vocabulary(tmp_path):
    assert write_documents(tmp_path / "a", [5], vocab_size=1 << 16).read(0, 1).dtype == np.uint16
    assert write_documents(tmp_path / "b", [5], vocab_size=(1 << 16) + 1).read(0, 1).dtype == np.uint32


def test_writing_many_documents_at_once_equals_one_by_one(tmp_path):
    one_by_one = write_documents(tmp_path / "a", [3, 1, 6, 2], shard_bytes=8)
    writer = ShardWriter(tmp_path / "b", vocab_size=1000, tokenizer="test", shard_bytes=8)
    writer.append(np.arange(10), np.array([0, 3, 4]))
    writer.append(np.arange(10, 12), np.array([0]))
    writer.finish()
    assert TokenDataset(tmp_path / "b").fingerprint == one_by_one.fingerprint


def test_an_interrupted_writer_leaves_no_dataset_and_nothing_in_the_way(tmp_path):
    writer = ShardWriter(tmp_path / "a", vocab_size=1000, tokenizer="test", shard_bytes=8)
    writer.append(np.arange(9), np.zeros(1, np.int64))
    with pytest.raises(UserError, match=r"holds no dataset\.json"):
        TokenDataset(tmp_path / "a")
    assert write_documents(tmp_path / "a", [4]).tokens == 4


def test_a_dataset_is_not_overwritten(tmp_path):
    write_documents(tmp_path / "a", [4])
    with pytest.raises(UserError, match="already holds a dataset"):
        ShardWriter(tmp_path / "a", vocab_size=10, tokenizer="test")


def test_a_folder_of_datasets_is_refused_with_their_names(tmp_path):
    for split in ("train", "validation"):
        write_documents(tmp_path / "a" / split, [4])
    with pytest.raises(
        UserError, match=r"a: holds no .*; name one of the datasets in it: .*a/train, .*a/validation$"
    ):
        TokenDataset(tmp_path / "a")


def test_d2_the_fingerprint_depends_on_the_content(tmp_path):
    first = write_documents(tmp_path / "a", [40, 3])
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    assert TokenDataset(tmp_path / "b").fingerprint == first.fingerprint
    assert write_documents(tmp_path / "c", [40, 4]).fingerprint != first.fingerprint
    assert write_documents(tmp_path / "d", [39, 4]).fingerprint != first.fingerprint


def edit(folder, **changes):
    path = folder / "dataset.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def without_checksums_of_blocks(folder):
    """Remove the checksums, as in datasets of older versions."""
    shards = json.loads((folder / "dataset.json").read_text())["shards"]
    edit(folder, shards=[{k: v for k, v in shard.items() if k != "block_file"} for shard in shards])


def replace(folder, old, new):
    path = folder / "dataset.json"
    path.write_text(path.read_text().replace(old, new))


DAMAGE = {
    "no folder": (shutil.rmtree, "is not a folder"),
    "no dataset.json": (lambda f: (f / "dataset.json").unlink(), r"holds no dataset\.json"),
    "torn dataset.json": (lambda f: (f / "dataset.json").write_text('{"format"'), r"dataset\.json: damaged"),
    "other version": (lambda f: edit(f, version=2), "version"),
    "other dtype": (lambda f: edit(f, dtype="uint32"), "dtype uint32"),
    "other totals": (lambda f: edit(f, tokens=7), r"says \(tokens, documents\) = \(7, "),
    "no document": (lambda f: edit(f, shards=[], tokens=0, documents=0), "no document"),
    "path in a name": (lambda f: replace(f, "tokens-00000.bin", "../tokens.bin"), r"token_file\.name"),
    "missing shard": (lambda f: (f / "tokens-00000.bin").unlink(), r"tokens-00000\.bin: cannot be read"),
    "empty shard": (lambda f: (f / "tokens-00000.bin").write_bytes(b""), r"tokens-00000\.bin: has 0 bytes"),
    "truncated shard": (
        lambda f: (f / "tokens-00000.bin").write_bytes(b"x" * 57),
        "has 57 bytes, but .* 80",
    ),
    "truncated documents": (lambda f: (f / "documents-00000.bin").write_bytes(b"x" * 8), "documents-00000"),
    "empty checksums": (
        lambda f: (f / "blocks-00000.bin").write_bytes(b""),
        r"blocks-00000\.bin: has 0 bytes",
    ),
    "torn checksums": (lambda f: (f / "blocks-00000.bin").write_bytes(b"x" * 9), r"blocks-.*: has 9 bytes"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_d1_damage_is_found_at_opening_and_named(tmp_path, damage):
    write_documents(tmp_path / "set", [30, 10])
    do, message = DAMAGE[damage]
    do(tmp_path / "set")
    with pytest.raises(UserError, match=message) as error:
        TokenDataset(tmp_path / "set")
    assert error.value.exit_code == 2 and str(tmp_path / "set") in str(error.value)


def test_d1_an_id_beyond_the_vocabulary_is_found_at_opening(tmp_path):
    write_documents(tmp_path / "set", [30])
    assert open_source(str(tmp_path / "set"), 0, vocab_size=30).tokens == 30
    with pytest.raises(UserError, match=r"token id 29, but model\.vocab_size is 29"):
        open_source(str(tmp_path / "set"), 0, vocab_size=29)


def test_d1_an_id_beyond_the_vocabulary_is_found_in_the_batch_with_file_and_byte(tmp_path):
    write_documents(tmp_path / "set", [30, 20], shard_bytes=40)
    path = tmp_path / "set" / "tokens-00001.bin"
    values = np.fromfile(path, "<u2")
    values[4] = 999
    values.tofile(path)
    without_checksums_of_blocks(tmp_path / "set")
    dataset = TokenDataset(tmp_path / "set", vocab_size=100)
    dataset.read(0, 24)
    with pytest.raises(UserError, match=r"tokens-00001\.bin: token id 999 at byte 8 .*vocab_size 100"):
        dataset.read(10, 30)


def test_d1_less_than_one_sequence_is_refused(tmp_path):
    dataset = write_documents(tmp_path / "set", [30, 2])
    assert count_windows(dataset, 31) == 1
    with pytest.raises(UserError, match=r"has 32 tokens.* 33"):
        count_windows(dataset, 32)


def test_a_dataset_of_many_shards_opens_few_files_and_verifies_each_block_once(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(format_module, "OPEN_FILES", 4)
    write_documents(tmp_path / "x", [10] * 20, shard_bytes=20)
    verified: list[int] = []

    def digest(data: memoryview) -> bytes:
        verified.append(len(data))
        return block_digest(data)

    monkeypatch.setattr(format_module, "block_digest", digest)
    dataset = TokenDataset(tmp_path / "x")
    assert len(dataset.index.shards) == 20
    for _ in range(3):
        for start in range(0, 200, 10):
            assert np.array_equal(dataset.read(start, 10), np.arange(start, start + 10))
            assert not dataset.document_ids(start, 10).any()
        assert len(open_files(tmp_path)) <= 4 + 1
    assert len(verified) == 2 * 20


def open_files(folder: Path) -> list[str]:
    """Return the files of `folder` that this process has open or has mapped."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    mapped = {line.split()[-1] for line in maps if str(folder) in line}
    opened = {os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()}
    return sorted(mapped | {path for path in opened if str(folder) in path})
