"""What the kinds of `model.layer_pattern` mean for a layer: its attention, its window, its rotation."""

from __future__ import annotations

from forge.config.model import ModelConfig
from forge.model.attention import Attention, GroupedAttention
from forge.model.linear_attention import LinearAttention
from forge.model.mla import LatentAttention


def attention_for(config: ModelConfig, layer: int) -> Attention | LinearAttention:
    """Build what mixes the tokens in the block with this global index; a kind of layer that does it otherwise goes here."""
    if config.kind_of(layer) == "linear":
        return LinearAttention(config)
    kind = GroupedAttention if config.latent is None else LatentAttention
    return kind(config, window_of(config, layer), rotation_of(config, layer))


def window_of(config: ModelConfig, layer: int) -> int:
    """Return the sliding window of the layer with this global index, 0 for the whole context."""
    return config.sliding_window if config.kind_of(layer) == "sliding" else 0


def rotation_of(config: ModelConfig, layer: int) -> int | None:
    """Return which of the tables of `forge.model.rope.rope_tables` rotates this layer; None: it has no positions."""
    kind = config.kind_of(layer)
    if kind == "nope":
        return None
    return 1 if kind == "sliding" and config.sliding_rope_theta else 0
