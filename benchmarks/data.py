"""The loader's sequences per second, compared with a bare read of mapped memory, for cold and for warm files.

    python benchmarks/data.py
    python benchmarks/data.py --dataset data/python/train --seq-len 2048

Without --dataset, the script writes a dataset of random ids to a temporary folder (size: --megabytes). All contenders read
the same number of sequences in random order, each sequence once, and make int64 inputs and labels from them.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # works from a clone, installed or not

import numpy as np
import torch

from benchmarks.measure import Spread, environment, markdown, parser, publish, ratio
from forge.data.dataset import PackedDataset
from forge.data.format import TokenDataset
from forge.data.loader import Loader
from forge.data.permutation import key_of
from forge.data.sources import count_windows
from forge.data.synthetic import SyntheticSource
from forge.runtime.errors import UserError
from forge.tools.prepare.writer import ShardWriter
from scripts.options import exit_code_of, positive

VOCAB = 32_000
DOCUMENT = 1000  # tokens


def main(arguments: list[str] | None = None) -> int:
    """Measure, write the results and return the exit code."""
    given = _parser().parse_args(arguments)
    return exit_code_of(lambda: measure(given))


def measure(given: argparse.Namespace) -> None:
    """Measure the contenders in turns, with cold files and with warm files; print and write the table."""
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        _measure(given, given.dataset or write_dataset(Path(folder) / "dataset", given.megabytes))


def _measure(given: argparse.Namespace, path: Path) -> None:
    windows = count_windows(TokenDataset(path), given.seq_len)
    batches = min(given.batches, windows // given.batch)
    if not batches:
        raise UserError(
            f"{path}: has {windows} sequences of {given.seq_len}, fewer than --batch {given.batch}"
        )
    read: dict[str, Callable[[], None]] = {
        "bare memmap": lambda: _bare(path, given, batches),
        "loader": lambda: _loader(
            TokenDataset(path, VOCAB if not given.dataset else None), given, batches, False
        ),
        "loader, document mask": lambda: _loader(TokenDataset(path), given, batches, True),
    }
    about = environment(torch.device("cpu")) | {"settings": _settings(given, path, batches)}
    synthetic = SyntheticSource(0, VOCAB)
    contenders: dict[str, Callable[[], float]] = {}
    for name, action in read.items():
        contenders[f"{name}, cold"] = lambda action=action: _after(lambda: forget(path), action)  # type: ignore[misc]
        contenders[f"{name}, warm"] = lambda action=action: _after(lambda: touch(path), action)  # type: ignore[misc]
    contenders["loader, synthetic"] = lambda: _after(
        lambda: None, lambda: _loader(synthetic, given, batches, False)
    )
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(given.rounds):
        for name, contender in contenders.items():
            seconds[name].append(contender())
    samples = batches * given.batch
    rows = []
    for name, values in seconds.items():
        base = "bare memmap, cold" if name.endswith("cold") else "bare memmap, warm"
        rows.append(
            {
                "name": name,
                "samples_per_second": Spread.of([samples / value for value in values]),
                "tokens_per_second": Spread.of([samples * given.seq_len / value for value in values]),
                "base": base,
                "ratio": ratio(seconds[base], values),
            }
        )
    table = _table(rows)
    publish("data", given.output, about, {"rows": rows}, table)


def write_dataset(folder: Path, megabytes: int) -> Path:
    """Write a dataset of random ids, `megabytes` MB in documents of 1000 tokens, to `folder`. Return `folder`."""
    writer = ShardWriter(folder, vocab_size=VOCAB, tokenizer="none")
    generator = np.random.default_rng(0)
    for _ in range(max(1, megabytes)):
        tokens = generator.integers(0, VOCAB, 500_000, dtype=np.uint16)
        writer.append(tokens, np.arange(0, len(tokens), DOCUMENT))
    writer.finish()
    return folder


def forget(path: Path) -> None:
    """Ask the operating system to drop the files in `path` from its page cache.

    The system may decline, e.g. for mapped files on a container's overlay.
    """
    for file in path.iterdir():
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def touch(path: Path) -> None:
    """Read every file in `path` once, into the page cache."""
    for file in path.iterdir():
        with open(file, "rb", buffering=0) as content:
            while content.read(1 << 24):
                pass


def _after(prepare: Callable[[], None], action: Callable[[], None]) -> float:
    """Call `prepare`, then `action`. Return the seconds of `action` alone."""
    prepare()
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def _bare(path: Path, given: argparse.Namespace, batches: int) -> None:
    """Read `batches` batches of sequences in random order from one mapped shard. Each batch is a new tensor."""
    index = TokenDataset(path).index
    tokens = np.memmap(path / index.shards[0].token_file.name, index.token_dtype, mode="r")
    order = np.random.default_rng(0).permutation((len(tokens) - 1) // given.seq_len)
    for number in range(batches):
        rows = order[np.arange(number * given.batch, (number + 1) * given.batch) % len(order)]
        windows = np.stack([tokens[row * given.seq_len : (row + 1) * given.seq_len + 1] for row in rows])
        batch = torch.from_numpy(windows.astype(np.int64))
        _ = batch[:, :-1].contiguous(), batch[:, 1:].contiguous()


def _loader(source: Any, given: argparse.Namespace, batches: int, document_mask: bool) -> None:
    dataset = PackedDataset([source], [1.0], given.seq_len, key_of("benchmark"), document_mask=document_mask)
    loader = Loader(dataset, global_batch_size=given.batch, rank=0, ranks=1)
    for _ in range(batches):
        next(loader)
    loader.close()


def _table(rows: list[dict[str, Any]]) -> str:
    head = ["reader", "samples/s", "million tokens/s", "times as fast as", "ratio"]
    lines = [
        [
            row["name"],
            row["samples_per_second"].show(0),
            f"{row['tokens_per_second'].median / 1e6:.1f}",
            row["base"],
            row["ratio"].show(2),
        ]
        for row in rows
    ]
    return f"{markdown(head, lines)}\n\nMedian of {rows[0]['ratio'].rounds} rounds (lowest to highest)."


def _settings(given: argparse.Namespace, path: Path, batches: int) -> dict[str, Any]:
    size = sum(file.stat().st_size for file in path.iterdir())
    return {
        "device": "cpu",
        "dataset MB": round(size / 1e6),
        "seq_len": given.seq_len,
        "sequences per batch": given.batch,
        "batches": batches,
        "rounds": given.rounds,
    }


def _parser() -> argparse.ArgumentParser:
    made = parser(__doc__, tiny=False, rounds=5)
    add = made.add_argument
    add("--dataset", type=Path, metavar="DIR", help="a dataset of prepare_data (one of random ids)")
    add(
        "--megabytes",
        type=positive,
        default=400,
        metavar="N",
        help="size of the dataset to write (%(default)s)",
    )
    add(
        "--folder",
        type=Path,
        metavar="DIR",
        help="folder for the written dataset, on the disk to measure (/tmp)",
    )
    add("--seq-len", type=positive, default=2048, metavar="N", help="tokens in a sequence (%(default)s)")
    add("--batch", type=positive, default=16, metavar="N", help="sequences in a batch (%(default)s)")
    add(
        "--batches",
        type=positive,
        default=400,
        metavar="N",
        help="batches that are read each time (%(default)s)",
    )
    return made


if __name__ == "__main__":
    sys.exit(main())
