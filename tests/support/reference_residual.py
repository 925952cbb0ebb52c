"""Attention residuals a second time, token by token, from arXiv:2603.15031, in blocks. Shares no code with forge."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

Half = Callable[[int, Tensor], Tensor]


class DepthStream:
    """The stream of one sequence `[seq, dim]`, and the values that later places may read."""

    def __init__(self, x: Tensor, eps: float):
        self.blocks: list[Tensor] = []
        self.partial: Tensor | None = x
        self.eps = eps

    def begin_block(self) -> None:
        """What the block before has added up is complete."""
        assert self.partial is not None
        self.blocks.append(self.partial)
        self.partial = None

    def add(self, out: Tensor) -> None:
        self.partial = out if self.partial is None else self.partial + out

    def read(self, query: Tensor | None) -> Tensor:
        """The softmax over depth, for each token by itself; None where only one value is there."""
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
    """Send x `[seq, dim]` through the layers: `attention(layer, read)` and `feed_forward(layer, read)` are what they add."""
    stream = DepthStream(x, eps)
    for number, layer in enumerate(layers):
        read = stream.read(parameters.get(f"layers.{layer}.attention_mix.query"))
        if number % block_size == 0:
            stream.begin_block()
        stream.add(attention(layer, read))
        stream.add(feed_forward(layer, stream.read(parameters[f"layers.{layer}.ffn_mix.query"])))
    return stream
