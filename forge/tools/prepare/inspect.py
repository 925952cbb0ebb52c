"""List the samples read by a step, decoded, to check the data."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from forge.checkpoint import find_checkpoint, read_state
from forge.checkpoint.folders import steps
from forge.checkpoint.loading import TRAINER
from forge.checkpoint.manifest import MANIFEST, Damaged, find_changed, read_manifest
from forge.config import Config, Phases
from forge.data.build import build_dataset
from forge.data.dataset import PackedDataset
from forge.data.loader import mixtures_ahead, part_of, steps_from
from forge.data.tokenizer import Tokenizer
from forge.observe.run_directory import RunDirectory
from forge.run.rollback import read_rollbacks
from forge.runtime.errors import NO_CHECKPOINT, UserError, unreadable
from forge.train.state import Progress, Rollback


@dataclass(frozen=True)
class Sample:
    """One sequence of a step.

    sample: global number of the sample. rank: the data rank that reads the sequence. source: the sample's source. window:
    number of the sample in `source`. epoch: epoch of `source`, from 0. part: in a phase with shorter sequences, the index of
    the sequence in its sample; otherwise None. first_token: index of the sequence's first token in the source.
    tokens: the first ids of the sequence. text: their text; None without a tokenizer. documents: positions in the sequence
    at which documents begin. masked: number of labels ignored at document starts, under `data.document_mask`.
    """

    sample: int
    rank: int
    source: str
    epoch: int
    window: int
    first_token: int
    tokens: list[int]
    text: str | None
    documents: list[int]
    masked: int
    part: int | None = None

    def describe(self) -> str:
        """Return a description of three or four lines for the terminal."""
        starts = ", ".join(map(str, self.documents[:8])) + (" ..." if len(self.documents) > 8 else "")
        lines = [
            f"sample {self.sample}  rank {self.rank}  {self.source}  epoch {self.epoch}  window {self.window}"
            f"{'' if self.part is None else f' part {self.part}'} (from token {self.first_token})",
            f"  ids        {' '.join(map(str, self.tokens))} ...",
            f"  documents  {len(self.documents)} begin"
            + (f" at {starts}" if starts else "")
            + (f"; {self.masked} labels masked" if self.masked else ""),
        ]
        if self.text is not None:
            lines.append(f"  text       {json.dumps(self.text, ensure_ascii=False)}")
        return "\n".join(lines)


def dataset_of_run(config: Config, last: int) -> PackedDataset:
    """Open the dataset of the run described by `config`, with the run's sample order up to step `last`.

    The run need not have reached this step. Its newest checkpoint tells the mixtures and roll-backs so far. Print the
    skipped ranges and the changes of the mixture. Raises UserError if the run has another seed or sequence length than
    `config`, if rollbacks.json cannot be read, or if the checkpoint's state is damaged (exit 77).
    """
    dataset = build_dataset(config)
    directory = RunDirectory(Path(config.run.output_dir) / config.run.name)
    own, resume = steps(directory.checkpoints), config.checkpoint.resume
    progress = Progress(dataset.order)
    if own or resume not in ("auto", "none"):
        path = find_checkpoint(directory.root if own else Path(resume))
        state = _undamaged_state(path)
        for key, here in (("run.seed", config.run.seed), ("train.seq_len", config.train.seq_len)):
            there = state["inputs"][key]
            if there != here:
                raise UserError(
                    f"{key} = {here}: {path} was trained with {there}; set {key} to the run's value, or set "
                    "another run.name to see the data of a new run"
                )
        progress.load(state)
    if known := [Rollback(**one) for one in read_rollbacks(directory)]:
        progress.pass_over([*known, *(one for one in progress.rollbacks if one not in known)])
    ahead = Phases(config).ranges(max(1, last - progress.step), progress.tokens)
    mixtures = mixtures_ahead(dataset.following(progress.order), ahead, progress.next_sample)
    *_, (dataset, _, _) = mixtures  # the last one has the order of all steps
    for first, end in dataset.order.gaps:
        print(f"{directory.root}: samples {first} to {end - 1} are skipped", file=sys.stderr)
    for segment in dataset.order.segments[1:]:
        print(f"{directory.root}: another mixture from sample {segment.start} on", file=sys.stderr)
    return dataset


def _undamaged_state(path: Path) -> dict[str, Any]:
    """Return the trainer's state in the checkpoint `path`. Verify only this file, not the tensors.

    Raises UserError, with exit code 77 if the file or the manifest is damaged.
    """
    try:
        files = read_manifest(path).get("files", {})
        named = TRAINER in files
        problems = find_changed(path, {TRAINER: files[TRAINER]}) if named else [f"{MANIFEST} lacks {TRAINER}"]
    except Damaged as error:
        problems = [str(error)]
    except OSError as error:
        raise unreadable(path, error) from None
    if problems:
        raise UserError(f"checkpoint {path} is damaged: {problems[0]}", NO_CHECKPOINT)
    return read_state(path)


def samples_of_step(
    dataset: PackedDataset,
    tokenizer: Tokenizer | None,
    step: int,
    *,
    global_batch_size: int,
    phases: Phases | None = None,
    rank: int | None = None,
    ranks: int = 1,
    head: int = 16,
    excerpt: int = 64,
) -> Iterator[Sample]:
    """Yield the sequences of step `step` (from 1), by data rank and then in order.

    rank: only the sequences of this data rank; None: of all `ranks`. head: number of first ids to keep. excerpt: number of
    first ids to decode as text. phases: sizes of all steps, including earlier ones; None: every step has
    `global_batch_size` sequences. Raises UserError if the sample order has a source that the dataset lacks.
    """
    tokens_before, first_sample = _begin(dataset, step, global_batch_size, phases)
    sizes = next(
        steps_from(
            dataset,
            phases.at if phases else None,
            global_batch_size=global_batch_size,
            sample=first_sample,
            tokens=tokens_before,
        )
    )
    for reader in range(ranks) if rank is None else (rank,):
        rows = sizes.rows(reader, ranks)
        for sample, part in zip(rows.samples, rows.parts, strict=True):
            name, epoch, window = dataset.locate(sample)
            windows, source = dataset.samples[name], dataset.sources[name]
            tokens, owners = part_of(windows.read(window, documents=True), part, rows.seq_len)
            assert owners is not None
            within = [int(start) for start in np.flatnonzero(np.diff(owners)) + 1]
            first = _token_at(windows.pieces(window), part * rows.seq_len)
            begins_document = first == 0 or bool(source.document_ids(first - 1, 2)[1])
            starts = [0, *within] if begins_document else within
            yield Sample(
                sample=sample,
                rank=reader,
                source=source.name,
                epoch=epoch,
                window=window,
                first_token=first,
                tokens=tokens[:-1][:head].tolist(),
                text=tokenizer.decode(tokens[:-1][:excerpt].tolist()) if tokenizer else None,
                documents=[start for start in starts if start < rows.seq_len],
                masked=len(within) if rows.dataset.document_mask else 0,
                part=part if rows.seq_len < dataset.seq_len else None,
            )


def _begin(
    dataset: PackedDataset, step: int, global_batch_size: int, phases: Phases | None
) -> tuple[int, int]:
    """Return the number of tokens before step `step` (from 1), and the step's first global sample."""
    tokens = phases.tokens_after(step - 1) if phases else (step - 1) * global_batch_size * dataset.seq_len
    return tokens, dataset.order.nth(0, tokens // dataset.seq_len)


def _token_at(pieces: list[tuple[int, int]], place: int) -> int:
    """Return the index in the source of a sample's token at position `place`; for padding, the index of the last token.

    pieces: (first token, number of tokens) of the sample's ranges in the source.
    """
    for first, count in pieces:
        if place < count:
            return first + place
        place -= count
    return first + count - 1


@dataclass(frozen=True)
class Reading:
    """The reads of one source in a range of steps. samples, tokens: numbers read. share: fraction of all samples read.

    epochs_before, epochs_after: number of epochs of the source read before the first and after the last of these steps.
    """

    source: str
    samples: int
    tokens: int
    share: float
    epochs_before: float
    epochs_after: float

    def describe(self) -> str:
        return (
            f"{self.source}  {self.samples:,} samples  {self.tokens:,} tokens  {self.share:.2%}  "
            f"epochs {self.epochs_before:.3f} to {self.epochs_after:.3f}"
        )


def mixture_of_steps(
    dataset: PackedDataset, first: int, last: int, global_batch_size: int, phases: Phases | None = None
) -> list[Reading]:
    """Return the Reading of each source in steps `first` to `last` (from 1, both included), without reading data.

    phases: sizes of all steps, including earlier ones; None: every step has `global_batch_size` sequences. Padding counts as
    tokens.
    """
    order = dataset.order
    (tokens_before, begin), (tokens_after, end) = (
        _begin(dataset, step, global_batch_size, phases) for step in (first, last + 1)
    )
    total = (tokens_after - tokens_before) // dataset.seq_len
    found = []
    for name, before, after in zip(order.sources, order.drawn(begin), order.drawn(end), strict=True):
        # Samples skipped by a rollback do not count as read.
        windows = dataset.windows.get(name)
        label = dataset.labels.get(name, name)
        samples = order.count_between(name, before, after)
        found.append(
            Reading(
                label,
                samples,
                samples * dataset.seq_len,
                samples / total,
                order.count_between(name, 0, before) / windows if windows else 0.0,
                order.count_between(name, 0, after) / windows if windows else 0.0,
            )
        )
    return found
