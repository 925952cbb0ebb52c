"""The settings of each step: batch size, learning rate, window and other values controlled by [[phase]] tables.

The settings are a pure function of the number of tokens trained before the step.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import gcd
from typing import Any

from forge.config.data import used_sources
from forge.config.schema import Config, OptimizerConfig

# Number of stages in a ramp of source weights or of the window. A stage has a cost: a stage of weights adds a segment
# to the sample order, and a stage of the window recompiles the blocks.
STAGES = 16
# The smallest share of a source in a mixture. It limits blocks of the data order to 10^6 samples, like data.mixture_block,
# because a block is held in memory.
SMALLEST_SHARE = 1e-6
STEPWISE = ("micro_batch_size", "seq_len", "document_mask")
RULES = {"none": 0.0, "sqrt": 0.5, "linear": 1.0}


@dataclass(frozen=True)
class StepPlan:
    """The settings of one step.

    lr: the peak learning rate, after schedule.lr_rule. windows: the number of samples, of train.seq_len tokens each,
    read by the step. weights: one for each source with a weight above 0 in some phase; None: no phase changes the
    weights of [data].
    """

    global_batch_size: int
    micro_batch_size: int
    seq_len: int
    windows: int
    weights: tuple[float, ...] | None
    lr: float
    sliding_window: int
    document_mask: bool
    optimizer: OptimizerConfig

    @property
    def tokens(self) -> int:
        """Return the number of token positions in the step."""
        return self.global_batch_size * self.seq_len

    @property
    def shapes(self) -> list[Any]:
        """Return the settings that the compiled model depends on."""
        return [self.micro_batch_size, self.seq_len, self.sliding_window, self.document_mask]

    def may_compile_after(self, before: StepPlan) -> bool:
        """Return whether a step may take much longer than the step before, which had the settings `before`."""
        return self.shapes != before.shapes or self.tokens > 2 * before.tokens

    @property
    def kind(self) -> list[Any]:
        """Return the settings on which the level of the loss depends, as JSON."""
        return [self.seq_len, list(self.weights or ()), self.sliding_window, self.document_mask]


@dataclass(frozen=True)
class _Span:
    """Values from token `start` up to `end` (None: no end).

    Keys in `ramped` move from their value in `first` to their value in `last`. Every other key has its value in `last`
    throughout the span.
    """

    start: int
    end: int | None
    first: Mapping[str, Any]
    last: Mapping[str, Any]
    ramped: frozenset[str]

    def stage(self, tokens: int, number: int) -> int:
        """Return how many of `number` equal stages of this span are complete after `tokens` tokens of the run."""
        assert self.end is not None
        return (tokens - self.start) * number // (self.end - self.start)

    def share(self, tokens: int, stages: int = 0) -> float:
        """Return the completed fraction of this span once `tokens` tokens of the run are done: 0 to 1.

        stages: round down to a multiple of 1 / stages; 0: do not round.
        """
        assert self.end is not None
        if stages:
            return self.stage(tokens, stages) / stages
        return (tokens - self.start) / (self.end - self.start)

    @property
    def batches(self) -> tuple[int, int]:
        """Return the increment of a ramped batch size (negative for a shrinking batch) and the number of increments."""
        first, last = self.first["global_batch_size"], self.last["global_batch_size"]
        unit = gcd(first, last)
        return (unit if last > first else -unit), abs(last - first) // unit


class Phases:
    """The phases of `config`. The config must pass `check_phases`."""

    def __init__(self, config: Config):
        self._config = config
        base = {
            "global_batch_size": config.train.global_batch_size,
            "micro_batch_size": config.train.micro_batch_size,
            "seq_len": config.train.seq_len,
            "weights": _weights(config),
            "lr": config.optimizer.lr,
            "weight_decay": config.optimizer.weight_decay,
            "betas": config.optimizer.betas,
            "eps": config.optimizer.eps,
            "ema": config.optimizer.ema,
            "momentum": config.optimizer.muon.momentum,
            "sliding_window": config.model.sliding_window,
            "document_mask": config.data.document_mask,
        }
        self._spans: list[_Span] = []
        start, before = 0, base
        for phase in config.phase:
            given = {key: value for key in base if (value := getattr(phase, key)) is not None}
            if phase.weights is not None:
                given["weights"] = tuple(phase.weights[number] for number in used_sources(config))
            ramped = frozenset(given) - set(STEPWISE) if phase.ramp == "linear" else frozenset()
            end = phase.until_tokens or None
            self._spans.append(_Span(start, end, before, base | given, ramped))
            if end is None:
                break
            start, before = end, base | given
        else:
            self._spans.append(_Span(start, None, before, base, frozenset()))
        self._starts = [span.start for span in self._spans]
        # Make the plans of spans without a ramp once, not in every step.
        self._constant = [None if span.ramped else self._plan(span.last) for span in self._spans]

    def at(self, tokens: int) -> StepPlan:
        """Return the plan of the step that begins when the run has trained on `tokens` tokens."""
        number = bisect_right(self._starts, tokens) - 1
        return self._constant[number] or self._plan(self._ramped(self._spans[number], tokens))

    def index_at(self, tokens: int) -> int | None:
        """Return the index in [[phase]] of the phase at `tokens` tokens of the run; None if none is in effect."""
        index = bisect_right(self._starts, tokens) - 1
        return index if index < len(self._config.phase) else None

    def ended_at(self, step: int, tokens: int, began: int | None) -> StepPlan:
        """Return the plan of step number `step`, after which the run has trained on `tokens` tokens; before step 1, its plan.

        began: the number of tokens before the step; None: unknown, in a checkpoint of an older version.
        """
        if began is None:
            began = self.tokens_after(step - 1)
            if began + self.at(began).tokens != tokens:  # the run had other batch sizes before a resume
                began = max(tokens - 1, 0)
        return self.at(began)

    def tokens_after(self, steps: int, tokens: int = 0) -> int:
        """Return the total number of tokens after `steps` further steps, beginning at `tokens`."""
        return tokens + sum(some * plan.tokens for some, plan in self.ranges(steps, tokens))

    def ranges(self, steps: int, tokens: int = 0) -> Iterator[tuple[int, StepPlan]]:
        """Yield (number of steps, plan of the first) for ranges of the next `steps` steps, beginning at `tokens`.

        All steps of a range have the same batch size, sequence length and mixture.
        """
        while steps > 0:
            plan, border = self.at(tokens), self._next_change(tokens)
            some = steps if border is None else min(steps, -(-(border - tokens) // plan.tokens))
            yield some, plan
            tokens, steps = tokens + some * plan.tokens, steps - some

    def steps_to(self, total: int, tokens: int = 0) -> int:
        """Return the number of further steps from `tokens` to at least `total` tokens."""
        steps = 0
        while tokens < total:
            plan, border = self.at(tokens), self._next_change(tokens)
            some = -(-(min(total, border or total) - tokens) // plan.tokens)
            tokens, steps = tokens + some * plan.tokens, steps + some
        return steps

    def sizes(self) -> Iterator[tuple[int, tuple[int, int, int]]]:
        """Yield (number of the phase from 1, (batch size, microbatch size, sequence length)) for each phase.

        A phase with a ramp yields its first and last batch size. A divisor of both divides every batch size of the ramp.
        """
        for number, span in enumerate(self._spans, 1):
            batches = {span.last["global_batch_size"]}
            if "global_batch_size" in span.ramped:
                batches.add(span.first["global_batch_size"])
            for batch in sorted(batches):
                yield number, (batch, span.last["micro_batch_size"], span.last["seq_len"])

    def ramped_batches(self) -> Iterator[tuple[int, int, int]]:
        """Yield (number of the phase from 1, batch size, microbatch size) for every batch size of every ramp."""
        for number, span in enumerate(self._spans, 1):
            if "global_batch_size" in span.ramped:
                unit, increments = span.batches
                for increment in range(increments + 1):
                    batch = span.first["global_batch_size"] + increment * unit
                    yield number, batch, span.last["micro_batch_size"]

    def smallest_shares(self) -> Iterator[tuple[int, float]]:
        """Yield (number of the phase from 1, smallest share above 0 of a source) for each phase with weights of its own."""
        for number, span in enumerate(self._spans[: len(self._config.phase)], 1):
            if self._config.phase[number - 1].weights is None:
                continue
            mixtures = [span.last["weights"]]
            if "weights" in span.ramped:
                first, last = span.first["weights"], span.last["weights"]
                mixtures += [
                    tuple(_between(a, b, stage / STAGES) for a, b in zip(first, last, strict=True))
                    for stage in range(1, STAGES)
                ]
            yield number, min(weight / sum(weights) for weights in mixtures for weight in weights if weight)

    def stretches(self) -> Iterator[tuple[int, StepPlan]]:
        """Yield (first token, plan) of each phase. A phase with a ramp yields two plans: before and after the ramp."""
        for span, constant in zip(self._spans, self._constant, strict=True):
            yield span.start, constant or self._plan(span.first)
            if constant is None:
                yield span.start, self._plan(span.last)

    def _next_change(self, tokens: int) -> int | None:
        """Return the next token count at which tokens per step or the mixture may change; None if there is none."""
        span = self._spans[bisect_right(self._starts, tokens) - 1]
        if span.end is None:
            return None
        length = span.end - span.start
        counts = [STAGES] if "weights" in span.ramped else []
        counts += [span.batches[1]] if "global_batch_size" in span.ramped else []
        # Stage k of n begins at the first token count t with (t - start) * n >= k * length.
        begins = [span.start + -(-(span.stage(tokens, n) + 1) * length // n) for n in counts if n]
        return min([span.end, *begins])

    def _ramped(self, span: _Span, tokens: int) -> dict[str, Any]:
        values = dict(span.last)
        for key in span.ramped:
            first, last = span.first[key], span.last[key]
            if key == "global_batch_size":
                unit, number = span.batches
                values[key] = first + unit * span.stage(tokens, number) if number else last
            elif key == "sliding_window":
                values[key] = round(_between(first, last, span.share(tokens, STAGES)))
            elif isinstance(last, tuple):
                share = span.share(tokens, STAGES if key == "weights" else 0)
                values[key] = tuple(_between(a, b, share) for a, b in zip(first, last, strict=True))
            else:
                values[key] = _between(first, last, span.share(tokens))
        return values

    def _plan(self, values: Mapping[str, Any]) -> StepPlan:
        train, optimizer = self._config.train, self._config.optimizer
        batch, seq_len = values["global_batch_size"], values["seq_len"]
        changed = {key: values[key] for key in ("weight_decay", "betas", "eps", "ema")}
        if values["momentum"] != optimizer.muon.momentum:
            changed["muon"] = optimizer.muon.model_copy(update={"momentum": values["momentum"]})
        if any(getattr(optimizer, key) != value for key, value in changed.items()):
            optimizer = optimizer.model_copy(update=changed)
        growth = (batch / train.global_batch_size) ** RULES[self._config.schedule.lr_rule]
        return StepPlan(
            global_batch_size=batch,
            micro_batch_size=values["micro_batch_size"],
            seq_len=seq_len,
            windows=batch * seq_len // train.seq_len,
            weights=values["weights"],
            lr=values["lr"] * growth,
            sliding_window=values["sliding_window"],
            document_mask=values["document_mask"],
            optimizer=optimizer,
        )


def _weights(config: Config) -> tuple[float, ...] | None:
    """Return the weights in [data] of the sources in `used_sources`; None if no phase changes weights."""
    if not any(phase.weights for phase in config.phase):
        return None
    return tuple(config.data.sources[number].weight for number in used_sources(config))


def _between(first: float, last: float, share: float) -> float:
    return first + (last - first) * share


def with_steps(config: Config, step: int = 0, tokens: int = 0) -> Config:
    """Return `config` with `train.steps` computed from `train.tokens`; unchanged if `train.tokens` is 0.

    step, tokens: the run has made `step` steps on `tokens` tokens, perhaps with other batch sizes than those of `config`.
    """
    if not config.train.tokens:
        return config
    steps = step + Phases(config).steps_to(config.train.tokens, tokens)
    return config.model_copy(update={"train": config.train.model_copy(update={"steps": steps})})


def without_microbatches(phases: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the tables of [[phase]] without micro_batch_size, which parallel.fallbacks may set."""
    return [{key: value for key, value in phase.items() if key != "micro_batch_size"} for phase in phases]


def config_of(config: Config, plan: StepPlan) -> Config:
    """Return `config` without phases, with the keys of `plan` that a forward pass reads."""
    sizes = {"seq_len": plan.seq_len, "micro_batch_size": plan.micro_batch_size}
    sections = {
        "model": config.model.model_copy(update={"sliding_window": plan.sliding_window}),
        "data": config.data.model_copy(update={"document_mask": plan.document_mask}),
        "train": config.train.model_copy(update=sizes),
    }
    return config.model_copy(update=sections | {"phase": ()})


def variants(config: Config) -> Iterator[tuple[int, Config]]:
    """Yield (number, variant) for each phase with new sizes.

    number: the phase's number, from 1. variant: `config` without phases, with the phase's batch size, microbatch size
    and sequence length in [train]. Phases with the sizes of [train] or of an earlier phase are skipped.
    """
    train = config.train
    seen = {(train.global_batch_size, train.micro_batch_size, train.seq_len)}
    for number, sizes in Phases(config).sizes():
        if sizes not in seen and number <= len(config.phase):
            seen.add(sizes)
            keys = zip(("global_batch_size", "micro_batch_size", "seq_len"), sizes, strict=True)
            yield (
                number,
                config.model_copy(update={"train": train.model_copy(update=dict(keys)), "phase": ()}),
            )
