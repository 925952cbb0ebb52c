"""Tables within [optimizer]."""

from __future__ import annotations

from typing import Annotated, Literal

from annotated_types import Ge, Le, Lt, MinLen
from pydantic import Field

from forge.config.section import Count, ListOf, NonNegativeNumber, Section, Text, unused_if, used_if


class MuonConfig(Section):
    """optimizer.name = muon: Muon updates the matrices inside blocks.

    AdamW, with the keys of [optimizer], updates all other parameters: embedding, head, norms, biases, routers,
    convolutions.
    """

    lr: NonNegativeNumber = Field(default=0.0, json_schema_extra={"default": "optimizer.lr"})
    """Peak learning rate of the matrices, with the same schedule as optimizer.lr. 0: optimizer.lr."""
    momentum: Annotated[float, Ge(0), Lt(1)] = 0.95
    """Decay rate of the momentum, an exponential mean of the gradients."""
    nesterov: bool = True
    """Orthogonalize a weighted mean of gradient and momentum (Nesterov) instead of the momentum alone."""
    ns_steps: Annotated[int, Ge(1), Le(99)] = 5
    """Number of iterations of the orthogonalization."""
    orthogonalization: Literal["newton_schulz", "polar_express"] = "newton_schulz"
    """Polynomials of the orthogonalization. newton_schulz: the same polynomial in each iteration. polar_express: the
    optimal polynomial for each iteration."""
    adjust_lr: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    """Factor on the learning rate of a matrix, by its shape. match_rms_adamw: 0.2 sqrt(max(rows, columns)). Updates are
    then as large as AdamW's, so AdamW's learning rate can be used. original: sqrt(max(1, rows / columns))."""
    second_moment: Literal["none", "neuron"] = "none"
    """neuron (NorMuon): divide each row of an update by the square root of the row's second moment, an exponential mean
    with decay rate betas[1]."""
    cautious_decay: bool = False
    """Apply weight decay only to weights that the update moves towards zero."""
    split_heads: bool = False
    """Treat the query, key and value projections as one matrix per head."""
    qk_clip: NonNegativeNumber = 0.0
    """QK-clip: limit of attention logits. If a head's largest logit in a step exceeds the limit, the head's query and
    key projections are scaled after the update, such that this logit would equal the limit (MuonClip uses 100). 0: off."""


class GroupConfig(Section):
    """[[optimizer.groups]]: parameters with a separate learning rate or weight decay."""

    names: Annotated[ListOf[Text], MinLen(1)]
    """Glob patterns of parameter names; each must match at least one parameter. If several groups match a parameter,
    the values of the last group apply."""
    lr_scale: NonNegativeNumber | None = None
    """Factor of the scheduled learning rate. 0: these parameters are frozen. Absent: the value of an earlier group, or 1."""
    weight_decay: NonNegativeNumber | None = None
    """Replaces optimizer.weight_decay, even for parameters in optimizer.no_decay. Absent: the value of an earlier
    group, otherwise as given by optimizer.weight_decay and optimizer.no_decay."""


class MupConfig(Section):
    """The base model of mup and completep: the model for which the learning rate was tuned.

    At the base model's sizes, both parametrizations equal standard.
    """

    base_dim: Annotated[Count, unused_if("optimizer.parametrization", "standard")] = 0
    """model.dim of the base model. All sizes inside a block are assumed to be proportional to model.dim."""
    base_depth: Annotated[Count, used_if("optimizer.parametrization", "completep")] = 0
    """completep: model.n_layers of the base model."""
    base_head_dim: Annotated[Count, unused_if("optimizer.parametrization", "standard")] = 0
    """model.head_dim of the base model (with mla: the size of a query head). 0: the head size of this model, so a wider
    model has more heads."""
