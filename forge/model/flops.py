"""Count parameters and floating-point operations per token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from forge.config.model import ModelConfig
from forge.model.transformer import Transformer, window_of


@dataclass(frozen=True)
class ParameterCounts:
    """Number of parameters by module. A tied head has none; routers and experts count as feed_forward."""

    embedding: int
    attention: int
    feed_forward: int
    norms: int
    head: int
    # Elements of the matrices that one token is multiplied with: without norms, biases, the embedding look-up, and the
    # experts that the token is not routed to.
    matmul: int
    # Parameters of the experts that a token is not routed to.
    idle: int

    @property
    def total(self) -> int:
        return self.embedding + self.attention + self.feed_forward + self.norms + self.head

    @property
    def active(self) -> int:
        """Number of parameters that one token uses, including the whole embedding."""
        return self.total - self.idle


def parameter_counts(config: ModelConfig, **part: Any) -> ParameterCounts:
    """Count the parameters of the model, built on the meta device; QK-norm weights are among the norms.

    `part`: Transformer's arguments for a part of the model.
    """
    with torch.device("meta"):
        model = Transformer(config, seq_len=1, **part)
    counts = dict.fromkeys(("embedding", "attention", "feed_forward", "norms", "head"), 0)
    matmul = idle = 0
    for name, parameter in model.named_parameters():
        path = name.split(".")
        place = path[2] if path[0] == "layers" else path[0]
        counts["norms" if path[-2].endswith("norm") else place] += parameter.numel()
        if parameter.ndim >= 2 and (name != "embedding.weight" or config.tie_embeddings):
            matmul += parameter.numel()
        if config.moe is not None and ".experts." in name:
            idle += parameter.numel() // config.moe.n_experts * (config.moe.n_experts - config.moe.top_k)
    return ParameterCounts(**counts, matmul=matmul - idle, idle=idle)


def flops_per_token(config: ModelConfig, seq_len: int) -> float:
    """Return the floating-point operations of forward and backward per token, for matrix products only.

    6 * (matrix elements, head included, embedding look-up not) + sum over layers of 12 * n_heads * head_dim *
    keys: a multiply and an add, forward and twice that backward; attention has two products, with `keys` the
    mean number of keys that a token sees: (seq_len + 1) / 2 causally, fewer in a window. Document masks are not
    subtracted, and recomputation is not added.
    """
    attention = sum(
        12 * config.n_heads * config.head_dim * mean_keys(seq_len, window_of(config, layer))
        for layer in range(config.n_layers)
    )
    return 6 * parameter_counts(config).matmul + attention


def mean_keys(seq_len: int, window: int) -> float:
    """Return the mean over a sequence of min(i + 1, window), the keys that token i sees; window 0: no limit."""
    reach = min(window or seq_len, seq_len)
    return (reach * (reach + 1) / 2 + (seq_len - reach) * reach) / seq_len
