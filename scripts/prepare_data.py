"""Turn text, JSONL and Parquet files into token shards. The same command goes on where an earlier run was interrupted.

A text file is one document, a JSONL line or a Parquet row is one. The folder that is written is what
data.sources and data.validation name. Parquet needs the extra `forge[parquet]`.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # works from a clone, installed or not

from forge.data.corpus import EXTENSIONS
from forge.data.prepare import Request, prepare
from forge.errors import STOPPED, UserError


def main(arguments: list[str] | None = None) -> int:
    given = _parser().parse_args(arguments)
    try:
        prepare(
            Request(
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
        )
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:  # a full disk
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted; the same command goes on from here", file=sys.stderr)
        return STOPPED
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--input", nargs="+", required=True, metavar="PATH", help="files, or directories to walk")
    add(
        "--tokenizer",
        required=True,
        metavar="PATH",
        help="'bytes', a SentencePiece .model, a tokenizer.json, or a folder with one",
    )
    add(
        "--output",
        required=True,
        metavar="DIR",
        help="the dataset, or with --holdout DIR/train and DIR/validation",
    )
    cores = len(os.sched_getaffinity(0))
    add(
        "--workers",
        type=_count,
        default=cores,
        metavar="N",
        help="processes (%(default)s, the cores of this machine)",
    )
    add(
        "--holdout",
        type=_share,
        default=0.0,
        metavar="F",
        help="share of the documents kept for validation (0: none)",
    )
    add("--max-bytes", type=_count, metavar="N", help="take a sample of so many bytes of the files (all)")
    add("--text-key", default="text", metavar="KEY", help="where JSONL and Parquet keep text (%(default)s)")
    add(
        "--extensions",
        nargs="+",
        default=EXTENSIONS,
        metavar="EXT",
        help=f"in directories ({' '.join(EXTENSIONS)})",
    )
    add(
        "--max-bad-fraction",
        type=_share,
        default=0.01,
        metavar="F",
        help="more bad documents: exit 2 (%(default)s)",
    )
    return parser


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def _share(text: str) -> float:
    value = float(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError("must be at least 0 and less than 1")
    return value


if __name__ == "__main__":
    sys.exit(main())
