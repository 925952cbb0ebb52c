"""The mathematics of the model and its loss, on tensors. This package does not depend on ranks, meshes or files."""

from forge.model.attention import Attention, AttentionFunction, GroupedAttention, HeadIndices, Sinks
from forge.model.experts import Experts
from forge.model.feed_forward import FeedForward
from forge.model.flops import ParameterCounts, flops_per_token, parameter_counts
from forge.model.initial import Normal, Uniform
from forge.model.linear_attention import Decay, LinearAttention, Recurrence, ShortConvolution
from forge.model.loss import IGNORE, Embedding, FusedLoss, Head
from forge.model.mla import LatentAttention
from forge.model.moe import MoE, SharedGate
from forge.model.norm import RMSNorm
from forge.model.router import Router, update_routers
from forge.model.sdpa import AttentionMask, sdpa_attention
from forge.model.transformer import Transformer, build_model

__all__ = [
    "IGNORE",
    "Attention",
    "AttentionFunction",
    "AttentionMask",
    "Decay",
    "Embedding",
    "Experts",
    "FeedForward",
    "FusedLoss",
    "GroupedAttention",
    "Head",
    "HeadIndices",
    "LatentAttention",
    "LinearAttention",
    "MoE",
    "Normal",
    "ParameterCounts",
    "RMSNorm",
    "Recurrence",
    "Router",
    "SharedGate",
    "ShortConvolution",
    "Sinks",
    "Transformer",
    "Uniform",
    "build_model",
    "flops_per_token",
    "parameter_counts",
    "sdpa_attention",
    "update_routers",
]
