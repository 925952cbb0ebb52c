"""Tokenize text, JSON lines and Parquet files into shards. After an interruption, the same command continues.

A document is a text file, a line of JSON lines or a row of Parquet. Files may be compressed with gzip or zstd. Parquet and
zstd need the extra `forge[parquet]`. For training, name the output folder in data.sources or data.validation.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # works from a clone, installed or not

from forge.runtime.cores import cores
from forge.tools.prepare.part import MAX_BAD_FRACTION
from forge.tools.prepare.prepare import Request, prepare
from forge.tools.prepare.quality import Quality
from scripts.options import Options, add_input_options, exit_code_of, local_path, number, positive


def main(arguments: list[str] | None = None) -> int:
    """Prepare the dataset and return the exit code."""
    parser = _parser()
    given = parser.parse_args(arguments)
    if (given.packing is None) != (given.seq_len is None):
        parser.error("give both --packing and --seq-len, or neither")
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
        part=given.part,
        packing=given.packing,
        quality=Quality(
            filter=given.filter,
            decontaminate=tuple(given.decontaminate),
            ngram=given.ngram,
            duplicates=given.duplicates,
            metadata=tuple(given.metadata),
        ),
        seq_len=given.seq_len or 0,
    )
    return exit_code_of(lambda: prepare(request), "interrupted; the same command continues from here")


def _parser() -> Options:
    parser = Options(description=__doc__)
    add = parser.add_argument
    share = number(float, lambda value: 0 <= value < 1, "at least 0 and less than 1")
    add_input_options(add)
    tokenizers = "'bytes', a SentencePiece .model, a tokenizer.json, or a folder with one"
    add("--tokenizer", required=True, metavar="PATH", help=tokenizers)
    targets = "folder to write; with --holdout, its subfolders train and validation"
    add("--output", type=local_path, required=True, metavar="DIR", help=targets)
    add(
        "--workers",
        type=positive,
        default=cores(),
        metavar="N",
        help="number of processes (%(default)s, the cores of this machine)",
    )
    held_out = "fraction of the documents kept for validation (0: none)"
    add("--holdout", type=share, default=0.0, metavar="F", help=held_out)
    sample = "use a sample of this many bytes of text, shared over all files (all)"
    add("--max-bytes", type=positive, metavar="N", help=sample)
    bad = "maximum fraction of unreadable documents; above it, fail with exit code 2 (%(default)s)"
    add("--max-bad-fraction", type=share, default=MAX_BAD_FRACTION, metavar="F", help=bad)
    part = (
        "process only share K of N (K from 1), e.g. on one of N machines, with the same --output for all shares. "
        "Then run the same command without --part, which joins the shares. slurm: K and N of the srun step or job array"
    )
    add("--part", type=_part, metavar="K/N", help=part)
    packing = (
        "also make a plan for data.packing with sequences of --seq-len tokens, even for a finished dataset"
    )
    add("--packing", choices=("best_fit", "document"), help=packing)
    add("--seq-len", type=positive, metavar="N", help="train.seq_len, for --packing")
    duplicates = "leave out exact copies of an earlier document's text, or also near copies (%(default)s)"
    add("--duplicates", choices=("none", "exact", "near"), default="none", help=duplicates)
    chosen = "a function of (text, metadata) that returns a reason to leave out a document, or None"
    add("--filter", default="", metavar="MODULE:FUNCTION", help=chosen)
    kept = "keys of JSON lines and Parquet to pass to the filter and to keep in metadata.jsonl"
    add("--metadata", nargs="+", default=[], metavar="KEY", help=kept)
    tests = "files, e.g. of test sets; leave out documents that share --ngram consecutive words with one of their documents"
    add("--decontaminate", nargs="+", default=[], metavar="PATH", help=tests)
    add(
        "--ngram",
        type=positive,
        default=13,
        metavar="N",
        help="number of consecutive words for --decontaminate (%(default)s)",
    )
    return parser


def _part(text: str) -> tuple[int, int]:
    if text == "slurm":
        found = _slurm_part()
        if found is None:
            raise argparse.ArgumentTypeError(
                "slurm: this process is neither in an srun step nor in a job array"
            )
        return found
    number, _, count = text.partition("/")
    if not (number.isdigit() and count.isdigit() and 1 <= int(number) <= int(count)):
        raise argparse.ArgumentTypeError("must be K/N with K from 1 to N, or slurm")
    return int(number), int(count)


def _slurm_part() -> tuple[int, int] | None:
    """Return (number of this process's part, number of parts), from the Slurm job array, the srun step, or both.

    Parts are numbered from 1. None outside of a Slurm step or job array.
    """
    variables = {
        name: os.environ.get(f"SLURM_{name}", "")
        for name in (
            "ARRAY_TASK_ID",
            "ARRAY_TASK_MIN",
            "ARRAY_TASK_STEP",
            "ARRAY_TASK_COUNT",
            "PROCID",
            "STEP_NUM_TASKS",
        )
    }
    task, least, step, tasks, process, processes = (
        int(value) if value.isdigit() else None for value in variables.values()
    )
    in_step = process is not None and processes is not None
    within = (process or 0, processes or 1) if in_step else (0, 1)
    if task is not None and tasks is not None:
        place = (task - (least or 0)) // (step or 1)
        if place >= tasks:
            raise argparse.ArgumentTypeError(
                "slurm: needs an array of consecutive tasks, such as --array=0-7, also to repeat some of them"
            )
        return place * within[1] + within[0] + 1, tasks * within[1]
    return (within[0] + 1, within[1]) if in_step else None


if __name__ == "__main__":
    sys.exit(main())
