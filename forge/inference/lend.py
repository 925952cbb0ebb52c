"""Taking a model's seams for one forward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from forge.model import AttentionFunction


@contextmanager
def lent(model: Any, loss: nn.Module, attention: Sequence[AttentionFunction] | None = None) -> Iterator[None]:
    """`model` with this loss, and with these attention functions, one for each layer; its own come back at the end."""
    attentions = [block.attention for block in model.layers.values()] if attention is not None else []
    own_loss, own = model.loss, [each.attend for each in attentions]
    try:
        model.loss = loss
        for each, attend in zip(attentions, attention or (), strict=True):
            each.attend = attend
        yield
    finally:
        model.loss = own_loss
        for each, attend in zip(attentions, own, strict=True):
            each.attend = attend
