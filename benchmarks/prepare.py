"""Megabytes of text prepared per core second by forge, by Hugging Face datasets with tokenizers, and by Megatron's method.

    python benchmarks/prepare.py
    python benchmarks/prepare.py --input corpus.jsonl --tokenizer tokenizer.json

All three turn the same JSON lines into token ids on disk, with the same tokenizer.json. Without --tokenizer, the package
tokenizers trains a tokenizer on the text. Megatron's method follows Megatron's tools/preprocess_data.py. It has a pool of
processes. Each process takes a line, tokenizes it and sends the ids to the process that writes the file. datasets (if
installed) maps batches and writes Arrow. Core seconds are the summed processor time of all processes, so other work on the
machine hardly counts. The scaling from 1 to 2 processes is measured by wall time.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # works from a clone, installed or not
# One thread per process, so that a process uses one core.
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["RAYON_NUM_THREADS"] = "1"

import numpy as np
import torch

from benchmarks.measure import Spread, environment, markdown, parser, publish
from forge.runtime.errors import UserError
from scripts.options import exit_code_of, positive

# A contender: (input, tokenizer.json, output, processes). Called in a new process.
Prepare = Callable[[Path, Path, Path, int], None]


def by_forge(text: Path, tokenizer: Path, output: Path, processes: int) -> None:
    """Prepare `text` with scripts/prepare_data.py, into a dataset in `output`."""
    # Run a command, because workers started from this script would also import this script's imports.
    script = Path(__file__).resolve().parent.parent / "scripts" / "prepare_data.py"
    options = ["--input", text, "--tokenizer", tokenizer, "--output", output, "--workers", str(processes)]
    subprocess.run([sys.executable, script, *options], check=True, capture_output=True)


def by_datasets(text: Path, tokenizer: Path, output: Path, processes: int) -> None:
    """Prepare `text` with Hugging Face datasets and tokenizers, into `output`/ids."""
    import datasets
    from tokenizers import Tokenizer

    encoder = Tokenizer.from_file(str(tokenizer))

    def encode(rows: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        return {"ids": [found.ids for found in encoder.encode_batch_fast(rows["text"])]}

    cache = str(output / "cache")
    rows = datasets.load_dataset("json", data_files=str(text), split="train", cache_dir=cache)
    count = processes if processes > 1 else None
    rows.map(encode, batched=True, num_proc=count, remove_columns=rows.column_names).save_to_disk(
        str(output / "ids")
    )


def by_pool(text: Path, tokenizer: Path, output: Path, processes: int) -> None:
    """Prepare `text` like Megatron: a pool of workers encodes, one process writes `output`/ids.bin and lengths.npy."""
    output.mkdir()
    with (
        open(text, encoding="utf-8") as lines,
        open(output / "ids.bin", "wb") as file,
        multiprocessing.get_context("fork").Pool(processes, _start_encoder, (str(tokenizer),)) as pool,
    ):
        lengths = []
        for ids in pool.imap(_encode_line, lines, 32):
            file.write(np.array(ids, np.uint16).tobytes(order="C"))
            lengths.append(len(ids))
    np.save(output / "lengths.npy", np.array(lengths))


_encoder: Any = None


def _start_encoder(path: str) -> None:
    from tokenizers import Tokenizer

    global _encoder
    _encoder = Tokenizer.from_file(path)


def _encode_line(line: str) -> list[int]:
    return _encoder.encode(json.loads(line)["text"]).ids


CONTENDERS: dict[str, Prepare] = {
    "forge": by_forge,
    "datasets and tokenizers": by_datasets,
    "Megatron's way": by_pool,
}


def main(arguments: list[str] | None = None) -> int:
    """Measure, write the results and return the exit code."""
    given = _parser().parse_args(arguments)
    return exit_code_of(lambda: measure(given))


def measure(given: argparse.Namespace) -> None:
    """Measure the contenders in turns; print and write the table."""
    if find_spec("tokenizers") is None:
        raise UserError("benchmarks/prepare.py: needs tokenizers; pip install 'forge[tokenizers]'")
    names = [name for name in CONTENDERS if name != "datasets and tokenizers" or find_spec("datasets")]
    with tempfile.TemporaryDirectory(dir=given.folder) as scratch:
        folder = Path(scratch)
        text = given.input or write_text(folder / "text.jsonl", given.megabytes)
        tokenizer = given.tokenizer or train(text, folder / "tokenizer.json")
        found: dict[tuple[str, int], list[tuple[float, float]]] = {}
        for _ in range(given.rounds):
            for processes in (1, 2):
                for name in names:
                    cost = run(CONTENDERS[name], text, tokenizer, folder / "out", processes)
                    found.setdefault((name, processes), []).append(cost)
        size = text_bytes(text) / 1e6
    rows = []
    for (name, processes), costs in found.items():
        one = [wall for wall, _ in found[name, 1]]
        rows.append(
            {
                "name": name,
                "processes": processes,
                "per_core": Spread.of([size / core for _, core in costs]),
                "per_second": Spread.of([size / wall for wall, _ in costs]),
                "scaling": Spread.of([first / wall for first, (wall, _) in zip(one, costs, strict=True)]),
            }
        )
    head = ["", "processes", "MB per core second", "MB per second", "times one process"]
    lines = [
        [
            row["name"],
            str(row["processes"]),
            *(row[key].show(2) for key in ("per_core", "per_second", "scaling")),
        ]
        for row in rows
    ]
    settings = {"device": "cpu", "megabytes": f"{size:.1f}", "rounds": given.rounds}
    about = environment(torch.device("cpu")) | {"settings": settings}
    publish("prepare", given.output, about, {"rows": rows}, markdown(head, lines))


def run(prepare: Prepare, text: Path, tokenizer: Path, output: Path, processes: int) -> tuple[float, float]:
    """Run a contender in a new process. Return its wall seconds and processor seconds, child processes included."""
    shutil.rmtree(output, ignore_errors=True)
    before, began = _children(), time.perf_counter()
    process = multiprocessing.get_context("spawn").Process(
        target=_quietly, args=(prepare, text, tokenizer, output, processes)
    )
    process.start()
    process.join()
    if process.exitcode:
        raise UserError(f"{prepare.__name__} failed with exit code {process.exitcode}", exit_code=1)
    return time.perf_counter() - began, _children() - before


def _quietly(prepare: Prepare, *arguments: Any) -> None:
    with open(os.devnull, "w") as nowhere:
        sys.stdout = sys.stderr = nowhere
        prepare(*arguments)


def _children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def write_text(path: Path, megabytes: int) -> Path:
    """Write the files of Python's standard library as JSON lines, repeated up to `megabytes` MB. Return `path`."""
    left = megabytes * 10**6
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("**/*.py"))
    with open(path, "w", encoding="utf-8") as file:
        while left > 0:
            for source in sources:
                content = source.read_text("utf-8", errors="replace").replace("\ufffd", "?")
                if content.strip():
                    left -= file.write(json.dumps({"text": content}) + "\n")
                if left <= 0:
                    break
    return path


def text_bytes(path: Path) -> int:
    """Return the number of UTF-8 bytes of all texts in the JSON lines of `path`."""
    with open(path, encoding="utf-8") as lines:
        return sum(len(json.loads(line)["text"].encode()) for line in lines)


def train(text: Path, path: Path) -> Path:
    """Train a byte-level BPE like GPT-2's, of 8,192 ids, on `text`; write it to `path`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=8192, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    with open(text, encoding="utf-8") as lines:
        tokenizer.train_from_iterator(
            (json.loads(line)["text"] for _, line in zip(range(300), lines, strict=False)), trainer
        )
    tokenizer.save(str(path))
    return path


def _parser() -> argparse.ArgumentParser:
    found = parser(__doc__, tiny=False, rounds=3)
    add = found.add_argument
    add(
        "--input",
        type=Path,
        metavar="FILE",
        help="JSON lines with the key text (the standard library's sources)",
    )
    add(
        "--tokenizer",
        type=Path,
        metavar="FILE",
        help="a tokenizer.json of at most 65536 ids (one trained on the text)",
    )
    add(
        "--megabytes",
        type=positive,
        default=20,
        help="size of the text where --input is not given (%(default)s)",
    )
    add("--folder", type=Path, help="where to write (the system's folder for temporary files)")
    return found


if __name__ == "__main__":
    sys.exit(main())
