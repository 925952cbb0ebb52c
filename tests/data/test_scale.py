"""An index of ten trillion tokens, without the tokens: the cost of opening, of the first batch, and of memory."""

import time
import tracemalloc

import numpy as np
import pytest

from forge.data import format as format_module
from forge.data.cache import BlockCache
from forge.data.dataset import PackedDataset
from forge.data.format import DatasetIndex, TokenDataset, block_digest
from forge.data.loader import Loader
from forge.runtime.remote import BLOCK_BYTES, RemoteFile

SHARDS, SHARD_TOKENS, DOCUMENT = 40_000, 250_000_000, 1000


def index() -> bytes:
    documents = SHARD_TOKENS // DOCUMENT
    blocks = -(-2 * SHARD_TOKENS // BLOCK_BYTES) + -(-8 * documents // BLOCK_BYTES)

    def file(kind: str, number: int, size: int) -> dict:
        return {"name": f"{kind}-{number:05d}.bin", "bytes": size, "sha256": f"{kind}{number}".ljust(64, "0")}

    shards = [
        {
            "tokens": SHARD_TOKENS,
            "documents": documents,
            "token_file": file("tokens", number, 2 * SHARD_TOKENS),
            "document_file": file("documents", number, 8 * documents),
            "block_file": file("blocks", number, 8 * blocks),
        }
        for number in range(SHARDS)
    ]
    return (
        DatasetIndex.model_validate(
            {
                "dtype": "uint16",
                "vocab_size": 50_000,
                "tokenizer": "t",
                "max_token_id": 1,
                "tokens": SHARDS * SHARD_TOKENS,
                "documents": SHARDS * documents,
                "text_bytes": 1,
                "shards": shards,
            }
        )
        .model_dump_json()
        .encode()
    )


@pytest.mark.slow
def test_ten_trillion_tokens_cost_the_index_and_a_few_blocks(tmp_path, monkeypatch, capsys) -> None:
    content, fetched = index(), []

    def fetch(file: RemoteFile, block: int) -> bytes:
        """Return the store's block: documents of 1000 tokens, without checksums."""
        fetched.append(file.url)
        size = min(BLOCK_BYTES, file.size - block * BLOCK_BYTES)
        if "documents" in file.url:
            first = block * BLOCK_BYTES // 8
            return (np.arange(first, first + size // 8, dtype="<u8") * DOCUMENT).tobytes()
        return bytes(size)

    monkeypatch.setattr(RemoteFile, "fetch", fetch)
    monkeypatch.setattr(RemoteFile, "is_intact", lambda *_: True)
    monkeypatch.setattr(format_module, "read_whole", lambda _url: content)
    assert block_digest(b"")  # a dataset with checksums opens without a request for each object
    tracemalloc.start()
    began = time.perf_counter()
    source = TokenDataset("memory://corpus", 50_000, BlockCache(tmp_path, 1.0))
    dataset = PackedDataset([source], [1.0], 4096, seed=0, document_mask=True)
    opened_s, opened = time.perf_counter() - began, tracemalloc.get_traced_memory()[1]
    tracemalloc.reset_peak()
    began = time.perf_counter()
    loader = Loader(dataset, global_batch_size=1024, rank=3, ranks=128, start_sample=10**9)
    batch = next(loader)
    first_s = time.perf_counter() - began
    loader.close()
    grown = tracemalloc.get_traced_memory()[1] - opened
    tracemalloc.stop()
    with capsys.disabled():
        print(
            f"\n10^13 tokens: opened in {opened_s:.1f} s with {opened / 1e6:.0f} MB, first batch after {first_s:.1f} s "
            f"more, {grown / 1e6:.0f} MB more and {len(fetched)} requests"
        )
    assert batch.tokens.shape == (8, 4096) and batch.documents is not None and int(batch.documents.max()) >= 4
    assert opened < 500e6 and grown < 100e6
