"""A small model on the CPU with activation checkpointing, and the operators of its step."""

from __future__ import annotations

from collections import Counter

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from forge.config import Config, parse_toml_text
from forge.model import Transformer
from forge.parallel.blocks import apply_blocks
from forge.parallel.build import build_meta_model
from tests.support.building import layout_without_ranks
from tests.support.equivalence import tiny_config

LAYERS = 3


def build(section: str) -> Transformer:
    """Return a small model on the CPU with the recomputation of `section`."""
    return built(parse_toml_text(tiny_config() + f"[activation_checkpoint]\n{section}\n"))


def built(config: Config) -> Transformer:
    model = build_meta_model(config)
    apply_blocks(model, layout_without_ranks(config))
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.02)
    model.reset_buffers(torch.float64)
    return model


def run(model: Transformer) -> None:
    tokens = torch.arange(80).view(1, 80) % 67
    model(tokens, tokens)[0].backward()


class Operators(TorchDispatchMode):
    """Count operators by name, without overload."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[str(func).rpartition(".")[0]] += 1
        return func(*args, **(kwargs or {}))


def operators(model: Transformer) -> Counter:
    with Operators() as seen:
        run(model)
    return seen.counts
