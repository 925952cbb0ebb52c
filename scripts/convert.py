"""Convert weights: a checkpoint of forge to a folder for transformers (to-hf), or such a folder to a checkpoint (from-hf).

to-hf reads a checkpoint, or the newest complete checkpoint of a run. AutoModelForCausalLM and AutoTokenizer load the output.
from-hf reads a folder with config.json and safetensors. checkpoint.init, generate.py and evaluate.py load the output.
Only one tensor is in memory at a time. If the conversion fails, no output folder is left.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # works from a clone, installed or not

import torch

from forge.checkpoint import find_checkpoint
from forge.observe.progress import ProgressLine
from forge.tools.hf import export_weights, import_weights
from scripts.options import Options, exit_code_of, local_path, number

DTYPES = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float16", "float64")}


def main(arguments: list[str] | None = None) -> int:
    """Convert weights and return the exit code."""
    given = _parser().parse_args(arguments)
    return exit_code_of(lambda: _run(given), f"interrupted; nothing was left at {given.output}")


def _run(given: argparse.Namespace) -> None:
    # Resolved, because a finished folder cannot be renamed to a link.
    source, output, progress = Path(given.input), Path(given.output).resolve(), _Progress()
    try:
        if given.direction == "to-hf":
            source = find_checkpoint(source)
            converted = export_weights(
                source,
                output,
                dtype=DTYPES.get(given.dtype),
                shard_bytes=int(given.shard_size * 1e9),
                tokenizer=not given.no_tokenizer,
                progress=progress.update,
            )
            what = f"{source} as {converted.architecture}"
        else:
            converted = import_weights(source, output, progress=progress.update)
            what = f"{converted.architecture} from {source}"
    finally:
        progress.close()
    print(f"{output}: {what}, {'with its' if converted.with_tokenizer else 'without a'} tokenizer")


class _Progress:
    """A progress line on the terminal. A change of the activity replaces the line."""

    def __init__(self) -> None:
        self._activity = ""
        self._line: ProgressLine | None = None

    def update(self, activity: str, done: int, total: int) -> None:
        if activity != self._activity or self._line is None:
            self.close()
            self._activity, self._line = activity, ProgressLine(activity, total)
        self._line.update(done)

    def close(self) -> None:
        if self._line is not None:
            self._line.close()


def _parser() -> Options:
    parser = Options(description=__doc__)
    directions = parser.add_subparsers(dest="direction", required=True, metavar="to-hf|from-hf")
    to_hf = directions.add_parser("to-hf", help="convert a checkpoint or run for transformers")
    from_hf = directions.add_parser("from-hf", help="convert a folder of transformers to a checkpoint")
    for direction, source in (
        (to_hf, "a checkpoint, or the folder of a run"),
        (from_hf, "a folder with config.json and safetensors"),
    ):
        direction.add_argument("--input", required=True, metavar="DIR", help=source)
        direction.add_argument(
            "--output", type=local_path, required=True, metavar="DIR", help="folder to write; must not exist"
        )
    to_hf.add_argument(
        "--dtype", choices=[*DTYPES, "stored"], default="stored", help="type of the weights (as stored)"
    )
    size, limit = (
        number(float, lambda value: 0 < value < math.inf, "a finite number above 0"),
        "maximum size of a file in GB (%(default)s)",
    )
    to_hf.add_argument("--shard-size", type=size, default=5.0, metavar="GB", help=limit)
    to_hf.add_argument("--no-tokenizer", action="store_true", help="do not write the tokenizer")
    return parser


if __name__ == "__main__":
    sys.exit(main())
