"""Train a SentencePiece tokenizer on text and JSONL files. Writes DIR/tokenizer.model."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # works from a clone, installed or not

from forge.data.corpus import EXTENSIONS
from forge.data.train_tokenizer import MAX_BYTES, train_tokenizer
from forge.errors import UserError


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--input", nargs="+", required=True, metavar="PATH", help="files, or directories to walk"
    )
    parser.add_argument("--output", required=True, metavar="DIR", help="the folder that gets tokenizer.model")
    parser.add_argument(
        "--vocab-size", required=True, type=int, metavar="N", help="ids, specials and 256 bytes included"
    )
    parser.add_argument(
        "--max-bytes",
        type=int,
        default=MAX_BYTES,
        metavar="N",
        help="train on a sample of so much (%(default)s)",
    )
    parser.add_argument(
        "--text-key", default="text", metavar="KEY", help="where JSONL keeps its text (%(default)s)"
    )
    parser.add_argument(
        "--extensions",
        nargs="+",
        default=EXTENSIONS,
        metavar="EXT",
        help=f"in directories ({' '.join(EXTENSIONS)})",
    )
    given = parser.parse_args(arguments)
    try:
        train_tokenizer(
            given.input,
            given.output,
            given.vocab_size,
            max_bytes=given.max_bytes,
            text_key=given.text_key,
            extensions=given.extensions,
        )
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:  # a full disk
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
