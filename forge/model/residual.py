"""Attention residuals over blocks of layers, as in Kimi K3 (Kimi Team 2026, arXiv:2603.15031).

Attention, feed-forward and the head read a mix over depth in place of the residual stream. Layers l with l % block_size
= 0 begin a block: the current stream is saved, and a new stream starts with the layer's attention. v_1 ... v_n are the
saved streams, and v_(n+1) is the current stream. Each attention, feed-forward and head has a learned query q, and reads

    score_i = q . v_i / sqrt(mean(v_i^2) + eps)        mix = sum over i of softmax(score)_i v_i

The division by the root mean square has no learned gain, because q already contains one. Queries are initialised to 0,
which gives a plain mean. Layer 0 has nothing to mix before its attention. A multi-token prediction module is a block by
itself and begins without saved streams. Every later layer reads all saved streams, so a pipeline stage sends all of them
to the next stage.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from forge.config.model import ModelConfig
from forge.model.attention import Shared
from forge.model.norm import promoted


class DepthMix(nn.Module):
    """The softmax-weighted mean of the saved streams and the current stream, read by one attention, feed-forward or head.

    A learned query `[dim]` gives the scores.
    """

    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.eps = eps
        self.query = nn.Parameter(torch.empty(dim))

    def forward(self, x: Tensor, saved: tuple[Tensor, ...]) -> Tensor:
        """x (the stream) and the saved streams, all `[batch, seq, dim]` -> `[batch, seq, dim]`."""
        return _Mix.apply(self.weight(), self.eps, *saved, x)

    def weight(self) -> Tensor:
        """Return the query as a plain tensor. Tensor parallelism overrides this method: its query is a DTensor."""
        return self.query

    def initial_value(self, name: str) -> float:
        """Return 0: all streams have equal weights (2603.15031, 4)."""
        return 0.0


class Mixed(nn.Module):
    """A mixin that gives a block attention residuals. List it before the block's class among the bases."""

    attention_branch: Any
    ffn_input: Any

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__(config, layer)
        ahead = layer >= config.n_layers
        self.begins_block = ahead or layer % config.residual_block_size == 0
        size = config.dim, config.norm_eps
        self.attention_mix = None if ahead or layer == 0 else DepthMix(*size)
        self.ffn_mix = DepthMix(*size)

    def attend(self, x: Tensor, shared: Shared) -> tuple[Tensor, Tensor]:
        """Apply the attention half: stream x -> the new stream and the input of `ffn_branch`, all `[batch, seq, dim]`.

        The caller must save x (`Shared.with_saved`) if the layer begins a block.
        """
        mix = x if self.attention_mix is None else self.attention_mix(x, shared.saved)
        out = self.attention_branch(mix, shared)
        new, saved = (out, (*shared.saved, x)) if self.begins_block else (x + out, shared.saved)
        return new, self.ffn_input(self.ffn_mix(new, saved))


def mixed_of(block: type[nn.Module]) -> type[nn.Module]:
    """Return the subclass of `block` with attention residuals."""
    return type(f"Mixed{block.__name__}", (Mixed, block), {})


class _Mix(torch.autograd.Function):
    """Autograd function of `DepthMix`.

    Saves for backward: references to the streams, and two numbers per token and stream. Plain autograd would save
    float32 copies of the streams.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, eps: float, *streams: Tensor) -> Tensor:
        exact = promoted(streams[-1].dtype)
        q = query.to(exact)
        scales, scores = [], []
        for stream in streams:
            values = stream.to(exact)
            scale = torch.rsqrt(values.square().mean(-1) + eps)
            scales.append(scale)
            scores.append(values @ q * scale)
        stacked = torch.stack(scores)
        weights = stacked.softmax(0)
        mix = torch.zeros_like(streams[-1], dtype=exact)
        for stream, weight in zip(streams, weights.unbind(), strict=True):
            mix = mix + weight.unsqueeze(-1) * stream.to(exact)
        ctx.save_for_backward(query, torch.stack(scales), stacked, *streams)
        return mix.to(streams[-1].dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        query, scales, scores, *streams = ctx.saved_tensors
        exact = scores.dtype
        q, grad = query.to(exact), grad.to(exact)
        weights = scores.softmax(0)
        slopes = torch.stack([(grad * stream.to(exact)).sum(-1) for stream in streams])
        of_scores = weights * (slopes - (weights * slopes).sum(0))
        of_query, of_streams = torch.zeros_like(q), []
        for index, stream in enumerate(streams):
            values, inner = stream.to(exact), of_scores[index] * scales[index]
            of_query = of_query + (inner.unsqueeze(-1) * values).flatten(0, -2).sum(0)
            # The gradient through the scale: a score decreases as its stream grows.
            along = inner * scores[index] * scales[index] / q.numel()
            of_stream = weights[index].unsqueeze(-1) * grad + inner.unsqueeze(-1) * q
            of_streams.append((of_stream - along.unsqueeze(-1) * values).to(stream.dtype))
        return of_query.to(query.dtype), None, *of_streams
