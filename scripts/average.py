#!/usr/bin/env python
"""Average the weights of several checkpoints of one model, and write the result as a checkpoint without optimizer state.

    python scripts/average.py runs/debug/checkpoints/step-00000200 runs/debug/checkpoints/step-00000300 --output mean
    python scripts/average.py runs/debug/checkpoints/step-00000300 --ema --output mean

Like any other checkpoint, the output can be evaluated, exported, and used as checkpoint.init.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # works from a clone, installed or not

from forge.tools.inference.average import average
from scripts.options import Options, exit_code_of, local_path


def main(arguments: list[str] | None = None) -> int:
    """Average checkpoints and return the exit code."""
    parser = Options(description=__doc__)
    add = parser.add_argument
    add("checkpoints", type=Path, nargs="+", metavar="CHECKPOINT", help="folders of checkpoints, step-...")
    add("--output", type=local_path, required=True, help="folder to write; must not exist")
    add(
        "--ema",
        action="store_true",
        help="average the exponential moving averages kept by optimizer.ema, instead of the weights",
    )
    given = parser.parse_args(arguments)
    return exit_code_of(lambda: _run(given))


def _run(given: argparse.Namespace) -> None:
    tensors = average(given.checkpoints, given.output, ema=given.ema)
    print(f"{given.output}: the mean of {len(given.checkpoints)}, {tensors} tensors")


if __name__ == "__main__":
    sys.exit(main())
