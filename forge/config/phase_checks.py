"""Checks of the [[phase]] tables at the start of a run, against each other and against the other sections."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from forge.config.phase import Phase
from forge.config.phases import SMALLEST_SHARE, Phases, variants
from forge.config.problem import Problem
from forge.config.schema import Config


def check_phases(config: Config) -> Iterator[Problem]:
    """Yield the problems of the [[phase]] tables."""
    problems = [
        Problem(("phase", index, key), allowed, remedy, tuple(tuple(other.split(".")) for other in others))
        for index, phase in enumerate(config.phase)
        for key, allowed, remedy, *others in _problems(config, phase)
    ]
    ends = [phase.until_tokens for phase in config.phase]
    for index, (before, end) in enumerate(pairwise([0, *ends])):
        if end <= before and not (end == 0 and index + 1 == len(ends)):
            above = f"must be above {before}, the end of the phase before"
            allowed = above if end else "may be 0 in the last phase only"
            yield Problem(("phase", index, "until_tokens"), allowed)
    yield from problems
    for number, share in () if problems else Phases(config).smallest_shares():
        if share < SMALLEST_SHARE:
            made = f"gives a source a share of {share:.1e}, perhaps during the ramp, but the smallest is {SMALLEST_SHARE:g}"
            yield Problem(("phase", number - 1, "weights"), made, "raise the weight, or set it to 0")
    for number, variant in () if problems else variants(config):
        batch, parts = variant.train.global_batch_size, config.train.seq_len // variant.train.seq_len
        if batch % parts:
            equation = f"train.seq_len / seq_len = {config.train.seq_len} / {variant.train.seq_len} = {parts}"
            allowed = f"has global_batch_size = {batch}, which must be a multiple of {equation}"
            others = ("train", "seq_len"), ("train", "global_batch_size")
            yield Problem(("phase", number - 1), allowed, "change global_batch_size or seq_len", others)


def check_ramps(config: Config) -> Iterator[Problem]:
    """Yield a problem for each ramp with steps of another number of microbatches than a CSV schedule has."""
    if not _is_fixed(config) or any(check_phases(config)):
        return
    fixed = config.train.global_batch_size / config.train.micro_batch_size
    ramps = Phases(config).ramped_batches()
    for number in sorted({number for number, batch, micro in ramps if batch / micro != fixed}):
        key, allowed, remedy, other = _changed_microbatches(config, "ramp")
        yield Problem(("phase", number - 1, key), allowed, remedy, (tuple(other.split(".")),))


def _problems(config: Config, phase: Phase) -> Iterator[tuple[str, ...]]:
    """Yield the problems of one phase, each as (key, allowed values, remedy, *other keys involved)."""
    train, sources = config.train, len(config.data.sources)
    if phase.ramp == "linear" and not phase.until_tokens:
        yield "ramp", "needs until_tokens, the end of the ramp", "set until_tokens"
    if train.seq_len % (phase.seq_len or train.seq_len):
        longest = f"must divide train.seq_len = {train.seq_len}, the longest sequence"
        yield "seq_len", longest, "change one of these keys", "train.seq_len"
    if phase.weights is not None and len(phase.weights) != sources:
        many = f"has {len(phase.weights)} weights for {sources} data.sources"
        yield "weights", many, "give one weight for each source", "data.sources"
    elif phase.weights is not None and config.data.temperature:
        changed = (
            f"cannot be set with data.temperature = {config.data.temperature:g}, which changes the weights"
        )
        yield "weights", changed, "set data.temperature = 0", "data.temperature"
    elif phase.weights is not None and not any(phase.weights):
        yield "weights", "has no weight above 0", "set at least one"
    if phase.sliding_window and "sliding" not in config.model.pattern:
        yield (
            "sliding_window",
            "needs a layer with a sliding window",
            "set model.sliding_window",
            "model.sliding_window",
        )
    if phase.momentum is not None and config.optimizer.name != "muon":
        muon = f"is a key of Muon, but optimizer.name = {config.optimizer.name}"
        yield "momentum", muon, "leave it out", "optimizer.name"
    if phase.ema is not None and not config.optimizer.ema:
        yield "ema", "needs a run that keeps a mean of the weights", "set optimizer.ema, too", "optimizer.ema"
    if _is_fixed(config):
        batch = phase.global_batch_size or train.global_batch_size
        micro = phase.micro_batch_size or train.micro_batch_size
        if batch / micro != train.global_batch_size / train.micro_batch_size:
            key = "global_batch_size" if phase.global_batch_size else "micro_batch_size"
            yield _changed_microbatches(config, key)


def _is_fixed(config: Config) -> bool:
    """Return whether the schedule is a CSV file, which has a fixed number of microbatches."""
    return config.pipeline.schedule.endswith(".csv") and config.parallel.pp > 1


def _changed_microbatches(config: Config, key: str) -> tuple[str, str, str, str]:
    """Return the problem of a phase's `key` as (key, allowed values, remedy, other key involved)."""
    made = f"changes the number of microbatches, but {config.pipeline.schedule} is written for a fixed number"
    return key, made, "set pipeline.schedule to a named schedule", "pipeline.schedule"
