"""Train a SentencePiece tokenizer on text, JSON lines and Parquet files. Writes DIR/tokenizer.model."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # works from a clone, installed or not

from forge.tools.prepare.train_tokenizer import BYTES_PER_PIECE, LEAST_SAMPLE, train_tokenizer
from scripts.options import Options, add_input_options, exit_code_of, local_path, positive


def main(arguments: list[str] | None = None) -> int:
    """Train the tokenizer and return the exit code."""
    parser = Options(description=__doc__)
    add = parser.add_argument
    add_input_options(add)
    add("--output", type=local_path, required=True, metavar="DIR", help="folder to write tokenizer.model to")
    add(
        "--vocab-size",
        required=True,
        type=int,
        metavar="N",
        help="number of ids, including special tokens and 256 bytes",
    )
    sample = f"{BYTES_PER_PIECE} for each id of the vocabulary, at least {LEAST_SAMPLE}"
    sample = f"train on a sample of this many bytes, shared over all files ({sample})"
    add("--max-bytes", type=positive, metavar="N", help=sample)
    given = parser.parse_args(arguments)
    return exit_code_of(
        lambda: train_tokenizer(
            given.input,
            given.output,
            given.vocab_size,
            max_bytes=given.max_bytes,
            text_key=given.text_key,
            extensions=given.extensions,
        )
    )


if __name__ == "__main__":
    sys.exit(main())
