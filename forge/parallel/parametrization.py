"""How initial values and learning rates depend on the model's width and depth, by `optimizer.parametrization`.

mup is the maximal update parametrization (Yang et al. 2022, arXiv:2203.03466, table 8). completep extends it to depth
with alpha = 1 (Dey et al. 2025, arXiv:2505.01618, table 1). With m = dim / base_dim and, under completep,
d = n_layers / base_depth:
                                      multiplier   initial std   learning rate   eps
    embedding, final norm             1            1             1               1 / m
    head                              1 / m        1             1               1 / m
    matrices inside blocks, except:   1            m^-1/2        1 / m           1 / (m d)
    last matrix of each branch        1 / d        m^-1/2        1 / m           1 / (m d)
    router, gate of shared experts    1 / m        1             1               1 / (m d)
    queries of attention residuals    1 / m        0             1               1 / (m d)
    vectors inside blocks             1            1             1               1 / (m d)

and queries have the multiplier sqrt(base_head_dim / head_dim), for scores divided by head_dim.

No multiplier is part of the forward. Instead of multiplying a layer's output by c, forge multiplies the initial values
and the learning rate of the layer's last matrix by c, and divides eps by c. Both are equivalent for an optimizer whose
updates do not depend on the scale of gradients. So a model is the same function of its weights under every
parametrization, and export and sampling need no changes. The logits' multiplier is applied to the head or, with tied
embeddings, to the final norm.

An orthogonalised update (Muon) has a fixed spectral norm instead of a fixed size of its elements. This norm should grow
as sqrt(rows / columns) (Yang et al. 2023, arXiv:2310.17813). For a whole matrix this ratio does not change with the
width, so the learning rate's factor is 1.

Weight decay is divided by the factor of the learning rate, so their product is the same at every size. For the base
model's sizes all factors are 1.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import sqrt

from forge.config import Config
from forge.model import Normal, Uniform
from forge.shard import Rates, Shard

# The last weight of each branch, before the branch is added to the stream, by model.norm_position.
BRANCH_ENDS = {
    "pre": re.compile(
        r"layers\.\d+\.(attention\.wo|feed_forward\.((shared\.|experts\.)?w2|from_latent))(\.|_|$)"
    ),
    "post": re.compile(r"layers\.\d+\.(attention|ffn)_norm\."),
    "sandwich": re.compile(r"layers\.\d+\.(attention|ffn)_post_norm\."),
}
PROJECTIONS = BRANCH_ENDS["pre"]
TO_FEW = re.compile(
    r"layers\.\d+\.feed_forward\.(router|shared_gate)\.weight|(layers\.\d+\.(attention_|ffn_))?mix\.query"
)
QUERIES = re.compile(r"layers\.(\d+)\.attention\.(wq|wq_b|q_norm)\.")
VECTORS = re.compile(r"bias$|\.conv\.|\.decay\.|norm\.weight$|sinks\.")


def parametrize(
    starts: Mapping[str, float | Normal | Uniform], shards: Sequence[Shard], config: Config
) -> tuple[dict[str, float | Normal | Uniform], list[Shard]]:
    """Return scaled initial values by parameter name, and `shards` with rates set, for mup and completep.

    starts: initial values under the standard rules.
    """
    scaled, rated = dict(starts), []
    for shard in shards:
        scale, rates = factors(shard, config)
        rated.append(replace(shard, rates=rates))
        start = scaled.get(shard.name)
        if isinstance(start, Normal):
            scaled[shard.name] = replace(start, std=start.std * scale)
        elif isinstance(start, float) and shard.name.endswith("norm.weight"):
            # A norm that multiplies by 1 + weight begins at 0.
            offset = 1.0 if config.model.zero_centered_norms else 0.0
            scaled[shard.name] = (start + offset) * scale - offset
    return scaled, rated


def factors(shard: Shard, config: Config) -> tuple[float, Rates]:
    """Return two results: the factor for the parameter's initial values, and the parameter's `Rates`."""
    name, optimizer, model = shard.name, config.optimizer, config.model
    base, deep = optimizer.mup, optimizer.parametrization == "completep"
    width = model.dim / base.base_dim
    depth = model.n_layers / base.base_depth if deep else 1.0
    multiplier = _multiplier(name, config, width, depth)
    inside = name.startswith("layers.")
    eps = 1 / (width * (depth if inside else 1.0) * multiplier)
    if not inside or len(shard.global_shape) < 2 or VECTORS.search(name) or TO_FEW.match(name):
        return multiplier, Rates(multiplier, multiplier, eps)
    start = multiplier / sqrt(width)
    if deep and PROJECTIONS.match(name):
        # The standard initial values are divided by the square root of the depth; the multiplier replaces this factor.
        start *= sqrt(depth)
    orthogonal = multiplier
    if optimizer.muon.adjust_lr == "match_rms_adamw":
        orthogonal /= sqrt(width)  # match_rms_adamw's factor grows with the square root of the larger side
    if optimizer.muon.split_heads and shard.heads > 1:
        # The rows of a head grow by _head_growth, its columns by width.
        orthogonal *= sqrt(_head_growth(config) / width)
    return start, Rates(multiplier / width, orthogonal, eps)


def _multiplier(name: str, config: Config, width: float, depth: float) -> float:
    """Return the parameter's multiplier: the factor on its layer's output, from the table in the module docstring."""
    model = config.model
    embedding = (
        1 / sqrt(width) if model.scale_embeddings else 1.0
    )  # the model multiplies embeddings by the square root of its width
    if name == "embedding.weight":
        return embedding
    logits = 1 / (width * embedding) if model.tie_embeddings else 1.0
    if name == "head.weight" or TO_FEW.match(name):
        return 1 / width
    if name == "norm.weight" or name.endswith("output_norm.weight"):
        return logits
    if BRANCH_ENDS[model.norm_position].match(name):
        return 1 / depth
    if (found := QUERIES.match(name)) and model.kind_of(int(found[1])) != "linear":
        if model.latent is not None:
            last = "wq_b" if model.latent.q_lora_rank else "wq"
        else:
            last = "q_norm" if model.qk_norm else "wq"
        return 1 / sqrt(_head_growth(config)) if found[2] == last else 1.0
    return 1.0


def _head_growth(config: Config) -> float:
    """Return head_dim / base_head_dim, the size of a head relative to the base model's."""
    base, latent = config.optimizer.mup.base_head_dim, config.model.latent
    size = config.model.head_dim if latent is None else latent.qk_nope_head_dim + latent.qk_rope_head_dim
    return size / base if base else 1.0
