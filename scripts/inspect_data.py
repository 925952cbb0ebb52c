"""Show the data of a training step: the sequences with their source and epoch, where documents begin, and the text.

The data are opened as in training. Keys are overridden as for train.py:

    python scripts/inspect_data.py --config debug.toml --step 100 --train.global_batch_size=8

Samples that the run of that name skips since a rollback are left out, assuming the same batch size in all its steps.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # works from a clone, installed or not

from forge.config import Config, load_config
from forge.data.build import build_dataset, build_tokenizer
from forge.data.passed_over import Ranges, merge
from forge.errors import UserError
from forge.observe.run_directory import RunDirectory
from forge.prepare.inspect import Sample, samples_of_step
from scripts.options import exit_code_of


def main(arguments: list[str] | None = None) -> int:
    given, overrides = _parser().parse_known_args(arguments)
    return exit_code_of(lambda: _run(given, overrides))


def _run(given: argparse.Namespace, overrides: list[str]) -> None:
    config = load_config(["--config", given.config, *overrides])
    _check(given, config)
    samples = samples_of_step(
        build_dataset(config),
        build_tokenizer(config),
        given.step,
        global_batch_size=config.train.global_batch_size,
        rank=given.rank,
        ranks=given.ranks,
        head=given.tokens,
        excerpt=given.text,
        passed_over=_passed_over(config),
    )
    for sample in samples:
        print(json.dumps(asdict(sample)) if given.json else _show(sample), flush=True)


def _passed_over(config: Config) -> Ranges:
    """Return the samples that the run of this config, if it exists, skips since a rollback."""
    path = RunDirectory(Path(config.run.output_dir) / config.run.name).rollbacks
    if not path.exists():
        return ()
    rollbacks = json.loads(path.read_text())
    ranges = merge((rollback["first_sample"], rollback["end_sample"]) for rollback in rollbacks)
    for first, end in ranges:
        print(f"{path}: samples {first} to {end - 1} are skipped", file=sys.stderr)
    return ranges


def _check(given: argparse.Namespace, config: Config) -> None:
    batch = config.train.global_batch_size
    if given.ranks < 1 or batch % given.ranks:
        raise UserError(
            f"--ranks {given.ranks}: must divide train.global_batch_size = {batch}; it is the number of data-parallel "
            "ranks, dp_replicate * dp_shard"
        )
    if given.rank is not None and not 0 <= given.rank < given.ranks:
        raise UserError(
            f"--rank {given.rank}: must be from 0 to {given.ranks - 1}; set the number of ranks with --ranks"
        )
    if given.step < 1:
        raise UserError(f"--step {given.step}: must be at least 1")
    for option in ("tokens", "text"):
        if getattr(given, option) < 0:
            raise UserError(f"--{option} {getattr(given, option)}: must be at least 0")


def _show(sample: Sample) -> str:
    lines = [
        f"sample {sample.sample}  rank {sample.rank}  {sample.source}  epoch {sample.epoch}  window {sample.window}"
        f" (from token {sample.first_token})",
        f"  ids        {' '.join(map(str, sample.tokens))} ...",
        f"  documents  {len(sample.documents)} begin"
        + (f" at {', '.join(map(str, sample.documents[:8]))}" if sample.documents else "")
        + (" ..." if len(sample.documents) > 8 else "")
        + (f"; {sample.masked} labels masked" if sample.masked else ""),
    ]
    if sample.text is not None:
        lines.append(f"  text       {json.dumps(sample.text, ensure_ascii=False)}")
    return "\n".join(lines)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        epilog="Any other option, --section.key=value, overrides a key of the config.",
    )
    add = parser.add_argument
    add("--config", required=True, metavar="PATH_OR_NAME", help="a TOML file, or a name in configs/")
    add("--step", type=int, required=True, metavar="N", help="optimizer step, from 1")
    add("--rank", type=int, metavar="R", help="show only the data of this data-parallel rank (all)")
    add("--ranks", type=int, default=1, metavar="K", help="number of data-parallel ranks (%(default)s)")
    add(
        "--tokens",
        type=int,
        default=16,
        metavar="N",
        help="number of ids to show of each sequence (%(default)s)",
    )
    add("--text", type=int, default=64, metavar="N", help="number of ids to show as text (%(default)s)")
    add("--json", action="store_true", help="print one JSON object per sequence")
    return parser


if __name__ == "__main__":
    sys.exit(main())
