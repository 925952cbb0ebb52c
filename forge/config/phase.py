"""[[phase]]: a part of a run with different values of some keys."""

from __future__ import annotations

from typing import Annotated, Literal

from annotated_types import Ge, Lt, MinLen
from pydantic import Strict

from forge.config.section import Count, ListOf, NonNegativeNumber, Positive, PositiveNumber, Section

Beta = Annotated[float, Ge(0), Lt(1)]
# A smaller epsilon is 0 in float32, and a gradient of 0 would give 0 / 0.
Epsilon = Annotated[float, Ge(1e-30)]


class Phase(Section):
    """A part of the run; phases follow each other in order.

    A phase overrides values of the other sections. A key that a phase omits has its value from the other sections. After
    the last phase, all keys do.
    """

    until_tokens: Count = 0
    """The phase ends after the step that reaches this number of tokens, counted from the start of the run. 0 (only in
    the last phase): the phase does not end."""
    ramp: Literal["none", "linear"] = "none"
    """linear: values change gradually, from the values before the phase to the phase's values at the end of the phase.
    The batch size changes in increments of the greatest common divisor of both sizes. Weights and windows change in 16
    stages. seq_len, micro_batch_size and document_mask change at once."""
    global_batch_size: Positive | None = None
    """Overrides train.global_batch_size."""
    micro_batch_size: Positive | None = None
    """Overrides train.micro_batch_size."""
    seq_len: Positive | None = None
    """Overrides train.seq_len and must divide it. Each sample is cut into parts of this length, all in the same batch."""
    weights: Annotated[ListOf[NonNegativeNumber], MinLen(1)] | None = None
    """Weights of data.sources, one for each source."""
    lr: PositiveNumber | None = None
    """Overrides optimizer.lr, the peak of the schedule."""
    weight_decay: NonNegativeNumber | None = None
    """Overrides optimizer.weight_decay."""
    betas: Annotated[tuple[Beta, Beta], Strict(False)] | None = None
    """Overrides optimizer.betas."""
    eps: Epsilon | None = None
    """Overrides optimizer.eps."""
    ema: Beta | None = None
    """Overrides optimizer.ema. Allowed only if optimizer.ema is above 0, because a run keeps the mean of the weights from
    its start or not at all."""
    momentum: Beta | None = None
    """Overrides optimizer.muon.momentum."""
    sliding_window: Positive | None = None
    """Overrides model.sliding_window in sliding layers."""
    document_mask: bool | None = None
    """Overrides data.document_mask."""
