"""The mathematics, on tensors, with the loss: knows no rank, mesh, file or config path."""

from forge.model.attention import Attention, AttentionFunction, Shared, sdpa_attention
from forge.model.embedding import Embedding, Head
from forge.model.feed_forward import FeedForward, feed_forward_for
from forge.model.flops import ParameterCounts, flops_per_token, parameter_counts
from forge.model.initial import Normal
from forge.model.loss import IGNORE, FusedLoss
from forge.model.mask import AttentionMask
from forge.model.norm import RMSNorm
from forge.model.registry import MODELS, build_model
from forge.model.transformer import Block, Transformer

__all__ = [
    "IGNORE",
    "MODELS",
    "Attention",
    "AttentionFunction",
    "AttentionMask",
    "Block",
    "Embedding",
    "FeedForward",
    "FusedLoss",
    "Head",
    "Normal",
    "ParameterCounts",
    "RMSNorm",
    "Shared",
    "Transformer",
    "build_model",
    "feed_forward_for",
    "flops_per_token",
    "parameter_counts",
    "sdpa_attention",
]
