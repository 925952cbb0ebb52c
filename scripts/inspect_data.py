"""Show the data of a training step: the sequences with their source and epoch, where documents begin, and the text.

The data are opened as in training. Keys are overridden as for train.py:

    python scripts/inspect_data.py --config debug.toml --step 100 --train.global_batch_size=8

If the run of that name has checkpoints, what it has read and will read is shown: with every mixture that it has had, and
without the samples that it skips since a rollback, assuming the same batch size in all its steps.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # works from a clone, installed or not

from forge.checkpoint import find_checkpoint, read_state
from forge.checkpoint.folders import steps
from forge.config import Config, load_config
from forge.data.build import build_dataset, build_tokenizer
from forge.data.dataset import PackedDataset
from forge.errors import UserError
from forge.observe.run_directory import RunDirectory
from forge.prepare.inspect import Sample, samples_of_step
from forge.train.state import Progress, Rollback
from scripts.options import exit_code_of


def main(arguments: list[str] | None = None) -> int:
    given, overrides = _parser().parse_known_args(arguments)
    return exit_code_of(lambda: _run(given, overrides))


def _run(given: argparse.Namespace, overrides: list[str]) -> None:
    config = load_config(["--config", given.config, *overrides])
    _check(given, config)
    samples = samples_of_step(
        _as_trained(build_dataset(config), config),
        build_tokenizer(config),
        given.step,
        global_batch_size=config.train.global_batch_size,
        rank=given.rank,
        ranks=given.ranks,
        head=given.tokens,
        excerpt=given.text,
    )
    for sample in samples:
        print(json.dumps(asdict(sample)) if given.json else _show(sample), flush=True)


def _as_trained(dataset: PackedDataset, config: Config) -> PackedDataset:
    """Return the dataset in the order of the history that the run of this config has, or would continue."""
    directory = RunDirectory(Path(config.run.output_dir) / config.run.name)
    own, resume = steps(directory.checkpoints), config.checkpoint.resume
    progress = Progress(dataset.order)
    if own or resume not in ("auto", "none"):
        path = find_checkpoint(directory.root if own else Path(resume))
        state = read_state(path)
        for key, here in (("run.seed", config.run.seed), ("train.seq_len", config.train.seq_len)):
            there = state["inputs"][key]
            if there != here:
                raise UserError(
                    f"{key} = {here}: {path} was trained with {there}; set it to that, or another run.name to see the data "
                    "of a new run"
                )
        progress.load(state)
    if directory.rollbacks.exists():
        known = [Rollback.read(one, progress.order) for one in json.loads(directory.rollbacks.read_text())]
        progress.pass_over([*known, *(one for one in progress.rollbacks if one not in known)])
    order = dataset.continuing(progress.order, progress.next_sample)
    for first, end in order.gaps:
        print(f"{directory.root}: samples {first} to {end - 1} are skipped", file=sys.stderr)
    for segment in order.segments[1:]:
        print(f"{directory.root}: another mixture from sample {segment.start} on", file=sys.stderr)
    return dataset.following(order)


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
