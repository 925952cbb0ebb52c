"""A second implementation of block attention residuals (arXiv:2603.15031), token by token. Shares no code with forge."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

Half = Callable[[int, Tensor], Tensor]


class DepthStream:
    """The residual stream of one sequence `[seq, dim]`, and the values readable by later layers."""

    def __init__(self, x: Tensor, eps: float):
        self.blocks: list[Tensor] = []
        self.partial: Tensor | None = x
        self.eps = eps

    def begin_block(self) -> None:
        """Close the previous block: its sum is complete."""
        assert self.partial is not None
        self.blocks.append(self.partial)
        self.partial = None

    def add(self, out: Tensor) -> None:
        self.partial = out if self.partial is None else self.partial + out

    def read(self, query: Tensor | None) -> Tensor:
        """Return the mix of values by a softmax over depth, per token. query None: the stream has only one value."""
        values = self.blocks if self.partial is None else [*self.blocks, self.partial]
        if query is None:
            assert len(values) == 1
            return values[0]
        rows = []
        for token in range(len(values[0])):
            exps = []
            for value in values:
                v = value[token]
                length = math.sqrt(len(v)) / torch.sqrt((v * v).sum() + len(v) * self.eps)
                exps.append(torch.exp(sum(a * b for a, b in zip(query, v * length, strict=True))))
            total = sum(exps)
            rows.append(sum(e / total * value[token] for e, value in zip(exps, values, strict=True)))
        return torch.stack(rows)


def through_layers(
    parameters: dict[str, Tensor],
    x: Tensor,
    layers: range,
    block_size: int,
    eps: float,
    attention: Half,
    feed_forward: Half,
) -> DepthStream:
    """Apply the layers to x `[seq, dim]`. attention, feed_forward: functions (layer, read) -> the layer's addend."""
    stream = DepthStream(x, eps)
    for number, layer in enumerate(layers):
        read = stream.read(parameters.get(f"layers.{layer}.attention_mix.query"))
        if number % block_size == 0:
            stream.begin_block()
        stream.add(attention(layer, read))
        stream.add(feed_forward(layer, stream.read(parameters[f"layers.{layer}.ffn_mix.query"])))
    return stream
