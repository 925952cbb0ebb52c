"""Show the data of a training step: each sequence with its source, epoch, document starts and text.

The script opens the data as in training. Options override keys as in train.py:

    python scripts/inspect_data.py --config debug.toml --step 100 --train.global_batch_size=8
    python scripts/inspect_data.py --config debug.toml --mixture --steps 1:100

If a run of this name has checkpoints, the output follows the run's history, i.e. its mixtures and the samples skipped by
roll-backs. The script assumes that all steps have the config's batch size.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # works from a clone, installed or not

from forge.config import Phases, load_config
from forge.data.build import build_tokenizer
from forge.runtime.errors import UserError
from forge.tools.prepare.inspect import dataset_of_run, mixture_of_steps, samples_of_step
from scripts.options import Options, count, exit_code_of, positive


def main(arguments: list[str] | None = None) -> int:
    """Print the data of steps and return the exit code."""
    parser = _parser()
    given, overrides = parser.parse_known_args(arguments)
    if given.mixture == (given.step is not None) or (given.steps and not given.mixture):
        parser.error("give --step N, or --mixture with --steps A:B")
    return exit_code_of(lambda: _run(given, overrides))


def _run(given: argparse.Namespace, overrides: list[str]) -> None:
    config = load_config(["--config", given.config, *overrides])
    phases = Phases(config)
    if given.mixture:
        first, last = given.steps or (1, config.train.steps)
        dataset = dataset_of_run(config, last)
        readings = mixture_of_steps(dataset, first, last, config.train.global_batch_size, phases)
        for reading in readings:
            print(json.dumps(asdict(reading)) if given.json else reading.describe(), flush=True)
        return
    _check(given, phases.at(phases.tokens_after(given.step - 1)).global_batch_size)
    samples = samples_of_step(
        dataset_of_run(config, given.step),
        build_tokenizer(config),
        given.step,
        global_batch_size=config.train.global_batch_size,
        phases=phases,
        rank=given.rank,
        ranks=given.ranks,
        head=given.tokens,
        excerpt=given.text,
    )
    for sample in samples:
        print(json.dumps(asdict(sample)) if given.json else sample.describe(), flush=True)


def _check(given: argparse.Namespace, batch: int) -> None:
    if batch % given.ranks:
        raise UserError(
            f"--ranks {given.ranks}: must divide the {batch} sequences of the step; --ranks is the number of "
            "data-parallel ranks, dp_replicate * dp_shard"
        )
    if given.rank is not None and given.rank >= given.ranks:
        raise UserError(
            f"--rank {given.rank}: must be from 0 to {given.ranks - 1}; set the number of ranks with --ranks"
        )


def _parser() -> Options:
    parser = Options(
        description=__doc__,
        epilog="Any other option, --section.key=value, overrides a key of the config.",
    )
    add = parser.add_argument
    add("--config", required=True, metavar="PATH_OR_NAME", help="a TOML file, or a name in configs/")
    add("--step", type=positive, metavar="N", help="optimizer step, from 1")
    mixture = "show the samples and tokens per source in a range of steps, without reading the data"
    add("--mixture", action="store_true", help=mixture)
    add("--steps", type=_steps, metavar="A:B", help="first and last step of --mixture (all)")
    add("--rank", type=count, metavar="R", help="show only the data of this data-parallel rank (all)")
    add("--ranks", type=positive, default=1, metavar="K", help="number of data-parallel ranks (%(default)s)")
    ids = "number of ids to show of each sequence (%(default)s)"
    add("--tokens", type=count, default=16, metavar="N", help=ids)
    add("--text", type=count, default=64, metavar="N", help="number of ids to show as text (%(default)s)")
    add("--json", action="store_true", help="print one JSON object per sequence")
    return parser


def _steps(text: str) -> tuple[int, int]:
    first, _, last = text.partition(":")
    if not (first.isdigit() and last.isdigit() and 1 <= int(first) <= int(last)):
        raise argparse.ArgumentTypeError("must be A:B with 1 <= A <= B")
    return int(first), int(last)


if __name__ == "__main__":
    sys.exit(main())
