"""The mathematics, on tensors, with the loss: knows no rank, mesh, file or config path."""

from forge.model.attention import Attention, AttentionFunction, Shared, sdpa_attention
from forge.model.embedding import Embedding, Head
from forge.model.experts import Experts
from forge.model.feed_forward import FeedForward
from forge.model.flops import ParameterCounts, flops_per_token, parameter_counts
from forge.model.initial import Normal
from forge.model.loss import IGNORE, FusedLoss
from forge.model.mask import AttentionMask
from forge.model.moe import MoE, feed_forward_for
from forge.model.norm import RMSNorm
from forge.model.registry import MODELS, build_model
from forge.model.router import Router, update_routers
from forge.model.transformer import Block, Transformer

__all__ = [
    "IGNORE",
    "MODELS",
    "Attention",
    "AttentionFunction",
    "AttentionMask",
    "Block",
    "Embedding",
    "Experts",
    "FeedForward",
    "FusedLoss",
    "Head",
    "MoE",
    "Normal",
    "ParameterCounts",
    "RMSNorm",
    "Router",
    "Shared",
    "Transformer",
    "build_model",
    "feed_forward_for",
    "flops_per_token",
    "parameter_counts",
    "sdpa_attention",
    "update_routers",
]
