"""[[phase]]: a stretch of a run with other values of some keys."""

from __future__ import annotations

from typing import Annotated, Literal

from annotated_types import Ge, Lt, MinLen
from pydantic import Strict

from forge.config.section import Count, ListOf, NonNegativeNumber, Positive, PositiveNumber, Section

Beta = Annotated[float, Ge(0), Lt(1)]
# A smaller value is 0 in float32, and divides 0 by 0 for a gradient of 0.
Epsilon = Annotated[float, Ge(1e-30)]


class Phase(Section):
    """A stretch of the run; phases follow in order.

    Keys that a phase leaves out, and all keys after the last phase, have the values of the other sections.
    """

    until_tokens: Count = 0
    """The phase ends after the step that reaches this number of tokens of the whole run. 0: never, in the last phase."""
    ramp: Literal["none", "linear"] = "none"
    """linear: numbers move from their previous values to the phase's, reached at its end. Batches grow by the
    greatest common divisor of both, weights and windows in sixteenths; seq_len and micro_batch_size change at once."""
    global_batch_size: Positive | None = None
    """Instead of train.global_batch_size."""
    micro_batch_size: Positive | None = None
    """Instead of train.micro_batch_size."""
    seq_len: Positive | None = None
    """Instead of train.seq_len, which it must divide: each sample is cut into parts of this length, all in the same batch."""
    weights: Annotated[ListOf[NonNegativeNumber], MinLen(1)] | None = None
    """Weights of data.sources, one for each."""
    lr: PositiveNumber | None = None
    """Instead of optimizer.lr: the peak that the schedule multiplies."""
    weight_decay: NonNegativeNumber | None = None
    """Instead of optimizer.weight_decay."""
    betas: Annotated[tuple[Beta, Beta], Strict(False)] | None = None
    """Instead of optimizer.betas."""
    eps: Epsilon | None = None
    """Instead of optimizer.eps."""
    ema: Beta | None = None
    """Instead of optimizer.ema, which must be above 0, so that the run keeps a mean from the start."""
    momentum: Beta | None = None
    """Instead of optimizer.muon.momentum."""
    sliding_window: Positive | None = None
    """Instead of model.sliding_window, in the layers that have one."""
    document_mask: bool | None = None
    """Instead of data.document_mask."""
