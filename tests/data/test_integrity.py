"""In-place changes of a dataset: a run detects them in the blocks it reads, scripts/verify_data.py in all blocks."""

from __future__ import annotations

import json
import re
import threading
from pathlib import Path

import numpy as np
import pytest

from forge.data import format as format_module
from forge.data.dataset import PackedDataset
from forge.data.format import TokenDataset
from forge.data.loader import Loader
from forge.runtime.errors import BAD_CONFIG, FAILED, FINISHED, UserError
from forge.runtime.remote import BLOCK_BYTES
from forge.tools.prepare.prepare import Request, prepare
from scripts import verify_data
from tests.support.megatron import Written
from tests.support.streams import write_documents

LENGTHS = [1 + 37 * n % 900 for n in range(2000)]  # 900,000 tokens
SHARD_BYTES = 700_000  # two whole blocks and a shorter one


@pytest.fixture
def dataset(tmp_path) -> TokenDataset:
    return write_documents(tmp_path / "set", LENGTHS, shard_bytes=SHARD_BYTES)


def flip(path: Path, place: int) -> None:
    with open(path, "r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 1]))


def refusal(read) -> str:
    with pytest.raises(UserError) as error:
        read()
    return str(error.value)


def test_a_changed_block_is_refused_and_the_others_are_read(dataset) -> None:
    per_block = BLOCK_BYTES // 2
    path = dataset.path / "tokens-00001.bin"
    flip(path, BLOCK_BYTES + 10)
    first = dataset.index.shards[0].tokens
    dataset.read(0, first + per_block)
    dataset.read(first + 2 * per_block, 1000)
    expected = (
        f"{path}: block 1 (bytes {BLOCK_BYTES} to {2 * BLOCK_BYTES - 1}) does not match its recorded checksum"
    )
    for begin in (first + per_block, first + 2 * per_block - 1, first):
        assert refusal(lambda begin=begin: dataset.read(begin, per_block + 1)).startswith(expected)


def test_the_last_block_and_the_documents_are_compared_as_well(dataset) -> None:
    shard = dataset.index.shards[0]
    flip(dataset.path / "tokens-00000.bin", shard.token_file.bytes - 1)
    assert "tokens-00000.bin: block 2 " in refusal(lambda: dataset.read(shard.tokens - 5, 5))
    flip(dataset.path / "documents-00000.bin", 800)
    assert "documents-00000.bin: block 0 " in refusal(lambda: dataset.document_ids(0, 100))


def test_changed_checksums_are_named_as_such(dataset) -> None:
    flip(dataset.path / "blocks-00000.bin", 3)
    assert "blocks-00000.bin: has another checksum" in refusal(lambda: dataset.read(0, 10))


def test_each_block_is_hashed_once_in_the_loader_s_thread(dataset, monkeypatch) -> None:
    hashed: list[tuple[int, str]] = []
    digest = format_module.block_digest

    def counting(data: memoryview) -> bytes:
        hashed.append((len(data), threading.current_thread().name))
        return digest(data)

    monkeypatch.setattr(format_module, "block_digest", counting)
    packed = PackedDataset([dataset], [1], 2048, seed=3, document_mask=True)
    loader = Loader(packed, global_batch_size=8, rank=0, ranks=1)
    for _ in range(3 * (dataset.tokens // 2048) // 8):  # three epochs
        next(loader)
    loader.close()
    files = [file for shard in dataset.index.shards for file in (shard.token_file, shard.document_file)]
    assert len(hashed) == sum(-(-file.bytes // BLOCK_BYTES) for file in files)
    assert {name for _, name in hashed} == {"forge-loader"}


def verify(capsys, path: object) -> tuple[int, str, str]:
    code = verify_data.main([str(path)])
    return code, *capsys.readouterr()


def test_an_intact_dataset_is_reported_with_the_number_of_its_files(dataset, capsys) -> None:
    code, out, _ = verify(capsys, dataset.path)
    files = 3 * len(dataset.index.shards)
    assert code == FINISHED and out.startswith(f"{dataset.path}: intact: {files} files, 0.0018")


def test_every_damaged_file_is_named_with_its_blocks(dataset, capsys) -> None:
    flip(dataset.path / "tokens-00000.bin", 2 * BLOCK_BYTES)
    flip(dataset.path / "documents-00001.bin", 5)
    (dataset.path / "tokens-00001.bin").unlink()
    with open(dataset.path / "blocks-00002.bin", "ab") as file:
        file.write(b"x")
    code, out, err = verify(capsys, dataset.path)
    assert code == FAILED and "Traceback" not in err
    other = f"has another SHA-256 than dataset.json records; damaged blocks of {BLOCK_BYTES} bytes"
    assert f"tokens-00000.bin: {other}: 2\n" in out and f"documents-00001.bin: {other}: 0\n" in out
    assert "tokens-00001.bin: cannot be read: No such file or directory\n" in out
    assert "blocks-00002.bin: has " in out and len(out.splitlines()) == 4
    assert f"4 of {3 * len(dataset.index.shards)} files are damaged" in err


def test_an_older_dataset_without_checksums_of_blocks_is_checked_by_file(dataset, capsys) -> None:
    path = dataset.path / "dataset.json"
    index = json.loads(path.read_text())
    for shard in index["shards"]:
        del shard["block_file"]
    path.write_text(json.dumps(index))
    assert verify(capsys, dataset.path)[0] == FINISHED
    flip(dataset.path / "tokens-00000.bin", 0)
    code, out, _ = verify(capsys, dataset.path)
    assert code == FAILED and out.endswith(
        "tokens-00000.bin: has another SHA-256 than dataset.json records\n"
    )


def test_the_plan_of_a_packing_is_checked(tmp_path, capsys) -> None:
    (tmp_path / "text.txt").write_text("It was a bright cold day in April. " * 400)
    prepare(Request((str(tmp_path / "text.txt"),), "bytes", tmp_path / "set", packing="best_fit", seq_len=64))
    assert verify(capsys, tmp_path / "set")[0] == FINISHED
    [pieces] = (tmp_path / "set").glob("packing-*-pieces.bin")
    flip(pieces, 4)
    code, out, _ = verify(capsys, tmp_path / "set")
    assert code == FAILED and out.startswith(f"{pieces}: has another SHA-256")
    flip(pieces, 4)
    plan = tmp_path / "set" / "packing-best_fit-64.json"
    content = plan.read_text()
    plan.write_text(re.sub(r'("dataset": ")[0-9a-f]{8}', r"\g<1>00000000", content))
    code, out, _ = verify(capsys, tmp_path / "set")
    assert code == FAILED and f"{plan}: was made for other content of this dataset" in out
    plan.write_text(content.replace(f'"{pieces.name}"', '"/dev/zero"'))
    code, out, _ = verify(capsys, tmp_path / "set")
    assert code == FAILED and "packing-best_fit-64.json: cannot be read" in out
    plan.write_text("{")
    code, out, _ = verify(capsys, tmp_path / "set")
    assert code == FAILED and "packing-best_fit-64.json: cannot be read" in out


def test_damaged_dataset_json_is_damage_and_a_missing_one_is_bad_usage(dataset, capsys) -> None:
    index = dataset.path / "dataset.json"
    text = index.read_text()
    for damaged in (text.replace(f'"tokens": {dataset.tokens}', '"tokens": 7', 1), "{"):
        assert damaged != text
        index.write_text(damaged)
        assert verify(capsys, dataset.path)[0] == FAILED
    index.unlink()
    code, out, err = verify(capsys, dataset.path)
    assert code == BAD_CONFIG and not out and "holds no dataset.json" in err


def test_data_without_checksums_are_reported_as_unchecked(tmp_path, capsys) -> None:
    np.arange(100, dtype="<u2").tofile(tmp_path / "raw.bin")
    Written([1000, 500], [0, 1, 2]).to(tmp_path / "megatron")
    for name in ("raw.bin", "megatron.idx", "megatron.bin", "megatron"):
        code, out, err = verify(capsys, tmp_path / name)
        assert code == BAD_CONFIG and not out and "nothing was checked" in err
    assert verify(capsys, tmp_path / "absent")[0] == BAD_CONFIG
    assert verify(capsys, "https://example.org/set")[0] == BAD_CONFIG
    with pytest.raises(SystemExit) as error:
        verify_data.main([])
    assert error.value.code == BAD_CONFIG
