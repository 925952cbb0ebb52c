"""Compare every byte of a dataset on disk with its checksums (scripts/verify_data.py)."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from forge.data.format import DIGEST_BYTES, INDEX, FileRecord, TokenDataset, block_digest, read_index
from forge.data.packing import plans_in
from forge.runtime.errors import FAILED, UserError
from forge.runtime.files import is_url
from forge.runtime.remote import BLOCK_BYTES


@dataclass(frozen=True)
class FileCheck:
    """The result of checking one file: the number of bytes read, and the problem (None: undamaged)."""

    path: Path
    bytes: int
    problem: str | None


def check_files(dataset: str | Path) -> Iterator[FileCheck]:
    """Check each file of the dataset (shards, block checksums, packing plans) and yield the results.

    Threads read the files. Raises UserError with exit 2 if `dataset` is not a forge dataset with checksums, and with
    exit 1 if `dataset.json` is damaged.
    """
    folder = Path(dataset)
    if is_url(dataset):
        raise UserError(
            f"{dataset}: is a URL, but this command checks folders only; training checks each block that it fetches"
        )
    if not folder.is_dir() and (folder.exists() or folder.with_suffix(".idx").exists()):
        raise UserError(
            f"{dataset}: nothing was checked: bare token files and Megatron datasets record no checksums; "
            "scripts/prepare_data.py makes datasets that do"
        )
    try:
        index = read_index(folder)
    except UserError as error:
        raise UserError(str(error), FAILED) if (folder / INDEX).exists() else error from None
    if not index.shards:
        raise UserError(f"{dataset}: nothing was checked: {INDEX} names no files")
    work: list[tuple[Path, FileRecord, Path | None, int]] = []
    for shard in index.shards:
        sums = None
        if shard.block_file is not None:
            work.append((folder / shard.block_file.name, shard.block_file, None, 0))
            if _check(*work[-1]).problem is None:
                sums = work[-1][0]
        work.append((folder / shard.token_file.name, shard.token_file, sums, 0))
        first = -(-shard.token_file.bytes // BLOCK_BYTES)
        work.append((folder / shard.document_file.name, shard.document_file, sums, first))
    plans = plans_in(folder)
    broken = [FileCheck(path, 0, "cannot be read") for path, plan in plans.items() if plan is None]
    for plan in plans.values():
        if plan is not None:
            work += [(folder / file.name, file, None, 0) for file in (plan.sequence_file, plan.piece_file)]
    damaged = len(broken)
    yield from broken
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        for check in pool.map(lambda one: _check(*one), work):
            damaged += check.problem is not None
            yield check
    if not damaged:
        try:
            fingerprint = TokenDataset(folder).fingerprint
        except UserError as error:  # numbers in dataset.json contradict each other
            raise UserError(str(error), FAILED) from None
        for path, plan in plans.items():
            if plan is not None and plan.dataset != fingerprint:
                yield FileCheck(
                    path, 0, "was made for other content of this dataset; remove it and pack again"
                )


def _check(path: Path, record: FileRecord, sums: Path | None, first: int) -> FileCheck:
    """Compare the file at `path` with its recorded size and SHA-256.

    sums: file with block checksums, to find damaged blocks; None: no such file. first: index in `sums` of this file's first
    block checksum.
    """
    digest, size, changed = hashlib.sha256(), 0, []
    try:
        expected = np.fromfile(sums, f"V{DIGEST_BYTES}")[first:] if sums else np.zeros(0, f"V{DIGEST_BYTES}")
        with open(path, "rb") as file:
            while data := file.read(BLOCK_BYTES):
                block = size // BLOCK_BYTES
                if block < len(expected) and block_digest(data) != expected[block].tobytes():
                    changed.append(block)
                digest.update(data)
                size += len(data)
    except OSError as error:
        return FileCheck(path, size, f"cannot be read: {error.strerror}")
    if size != record.bytes:
        return FileCheck(path, size, f"has {size} bytes instead of {record.bytes}")
    if digest.hexdigest() == record.sha256:
        return FileCheck(path, size, None)
    blocks = ", ".join(map(str, changed[:5])) + (f" and {len(changed) - 5} more" if len(changed) > 5 else "")
    where = f"; damaged blocks of {BLOCK_BYTES} bytes: {blocks}" if changed else ""
    return FileCheck(path, size, f"has another SHA-256 than {INDEX} records{where}")
