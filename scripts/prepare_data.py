"""Tokenize text, JSON lines and Parquet files into shards. After an interruption, the same command continues.

A document is a text file, a line of JSON lines or a row of Parquet. Files may be compressed with gzip or zstd. Set
data.sources and data.validation to the folder that is written. Parquet and zstd need the extra `forge[parquet]`.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # works from a clone, installed or not

from forge.prepare.prepare import Request, prepare
from scripts.options import add_input_options, exit_code_of, number, positive


def main(arguments: list[str] | None = None) -> int:
    given = _parser().parse_args(arguments)
    request = Request(
        inputs=tuple(given.input),
        tokenizer=given.tokenizer,
        output=Path(given.output),
        workers=given.workers,
        holdout=given.holdout,
        max_bytes=given.max_bytes,
        text_key=given.text_key,
        extensions=tuple(given.extensions),
        max_bad_fraction=given.max_bad_fraction,
    )
    return exit_code_of(lambda: prepare(request), "interrupted; the same command continues from here")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add, cores = parser.add_argument, len(os.sched_getaffinity(0))
    share = number(float, lambda value: 0 <= value < 1, "at least 0 and less than 1")
    add_input_options(add)
    tokenizers = "'bytes', a SentencePiece .model, a tokenizer.json, or a folder with one"
    add("--tokenizer", required=True, metavar="PATH", help=tokenizers)
    targets = "folder to write; with --holdout, its subfolders train and validation"
    add("--output", required=True, metavar="DIR", help=targets)
    add(
        "--workers",
        type=positive,
        default=cores,
        metavar="N",
        help="number of processes (%(default)s, the cores of this machine)",
    )
    held_out = "fraction of the documents kept for validation (0: none)"
    add("--holdout", type=share, default=0.0, metavar="F", help=held_out)
    sample = "use a sample of this many bytes of text, shared over all files (all)"
    add("--max-bytes", type=positive, metavar="N", help=sample)
    bad = "maximum fraction of unreadable documents; above it, fail with exit code 2 (%(default)s)"
    add("--max-bad-fraction", type=share, default=0.01, metavar="F", help=bad)
    return parser


if __name__ == "__main__":
    sys.exit(main())
