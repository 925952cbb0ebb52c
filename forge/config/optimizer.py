"""Tables of single optimizers within [optimizer]."""

from __future__ import annotations

from typing import Annotated, Literal

from annotated_types import Ge, Le, Lt, MinLen
from pydantic import Field

from forge.config.section import Count, ListOf, NonNegativeNumber, Section, Text, unused_if, used_if


class MuonConfig(Section):
    """muon: matrices inside blocks are updated by Muon.

    All other parameters (embedding, head, norms, biases, routers, convolutions) are updated by adamw with the keys of
    [optimizer].
    """

    lr: NonNegativeNumber = Field(default=0.0, json_schema_extra={"default": "optimizer.lr"})
    """Peak learning rate of the matrices, with the same schedule. 0: optimizer.lr."""
    momentum: Annotated[float, Ge(0), Lt(1)] = 0.95
    """Decay rate of the mean of gradients."""
    nesterov: bool = True
    """Orthogonalize a mean of the gradient and the momentum, instead of the momentum."""
    ns_steps: Annotated[int, Ge(1), Le(99)] = 5
    """Steps of the orthogonalization."""
    orthogonalization: Literal["newton_schulz", "polar_express"] = "newton_schulz"
    """Polynomials of the steps: newton_schulz takes the same one in each, polar_express the best one for each."""
    adjust_lr: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    """Factor of the learning rate by the shape of a matrix. match_rms_adamw: 0.2 sqrt(max(rows, columns)), so that
    updates are as large as adamw's and its learning rate fits; original: sqrt(max(1, rows / columns))."""
    second_moment: Literal["none", "neuron"] = "none"
    """neuron: divide each row of an update by the root of its second moment, a mean with the decay rate betas[1]
    (NorMuon)."""
    cautious_decay: bool = False
    """Decay only weights that the update makes smaller."""
    split_heads: bool = False
    """Take the projections to queries, keys and values as one matrix per head."""
    qk_clip: NonNegativeNumber = 0.0
    """Limit of attention logits. If a head's largest logit in a step exceeds it, the head's projections are scaled after
    the update, so that this logit would equal the limit (MuonClip, with 100). 0: off."""


class GroupConfig(Section):
    """[[optimizer.groups]]: parameters with a learning rate or a weight decay of their own."""

    names: Annotated[ListOf[Text], MinLen(1)]
    """Glob patterns of parameter names; each must match at least one. If several groups match a parameter, the last one's
    values apply."""
    lr_scale: NonNegativeNumber | None = None
    """Factor of the learning rate, with the same schedule. 0: these parameters keep their values. Absent: that of an earlier
    group, or 1."""
    weight_decay: NonNegativeNumber | None = None
    """Replaces optimizer.weight_decay, even for a match of optimizer.no_decay. Absent: the value of an earlier group,
    or else of optimizer.weight_decay and no_decay."""


class MupConfig(Section):
    """The base model of mup and completep: the model for which the learning rate was tuned.

    For a model of the base sizes, both equal standard.
    """

    base_dim: Annotated[Count, unused_if("optimizer.parametrization", "standard")] = 0
    """model.dim of the base model. All sizes inside a block are taken to grow in proportion to it."""
    base_depth: Annotated[Count, used_if("optimizer.parametrization", "completep")] = 0
    """completep: model.n_layers of the base model."""
    base_head_dim: Annotated[Count, unused_if("optimizer.parametrization", "standard")] = 0
    """model.head_dim of the base model (with mla: elements of a head of queries). 0: as in this model; a wider model has more
    heads."""
