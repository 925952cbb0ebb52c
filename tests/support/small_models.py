"""Small models with known parameters."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from forge.config.model import ModelConfig
from forge.model import IGNORE, Normal, Transformer, build_model

VOCAB = 23


def small_config(**changes: Any) -> ModelConfig:
    """Return a configuration of two layers with grouped heads and no options."""
    plain: dict[str, Any] = {
        "dim": 24,
        "n_layers": 2,
        "n_heads": 4,
        "n_kv_heads": 2,
        "head_dim": 6,
        "ffn_dim": 20,
        "vocab_size": VOCAB,
        "rope_theta": 100.0,
        "init_std": 0.3,
    }
    return ModelConfig.model_validate(plain | changes)


def on_meta(config: ModelConfig, seq_len: int = 12) -> Transformer:
    """Return the model of `config` on the meta device."""
    with torch.device("meta"):
        return build_model(config, seq_len)


class Wider(Transformer):
    """A custom model with learned positions. Its last layer has a mixer of three matrices, one of them unused."""

    def __init__(self, config: ModelConfig, seq_len: int, **part: Any):
        super().__init__(config, seq_len, **part)
        self.positions = Positions(seq_len, config.dim)
        for layer, block in self.layers.items():
            if int(layer) == config.n_layers - 1:
                block.mixer = Mixer(config.dim)


class Positions(nn.Embedding):
    initial_value = staticmethod(lambda name: Normal(0.02))


class Mixer(nn.Module):
    initial_value = staticmethod(lambda name: Normal(0.02))

    def __init__(self, dim: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3, dim, dim))
        self.idle_parameters = dim * dim
        self.scan = Scan(dim)


class Scan(nn.Module):
    """A module that reports its own FLOPs."""

    initial_value = staticmethod(lambda name: 0.5)

    def __init__(self, dim: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(2, dim, dim))

    def flops_per_token(self, seq_len: int) -> float:
        return 6 * self.weight[0].numel() + 1000 * seq_len


def small_model(
    config: ModelConfig, seq_len: int = 12, dtype: torch.dtype = torch.float64, **parts: Any
) -> Transformer:
    """Return a part of the model of `config`. A parameter's values depend only on its name."""
    model = Transformer(config, seq_len, **parts).to(dtype)
    fill(model)
    model.reset_buffers(dtype)
    return model


@torch.no_grad()
def fill(model: Transformer) -> None:
    """Initialise, and add noise to constants, because ones and zeros would hide a missing norm or bias."""
    values = model.initial_values()
    for name, parameter in model.named_parameters():
        start = values[name]
        mean, std = (start, 0.2) if isinstance(start, float) else (0.0, getattr(start, "std", 0.5))
        generator = torch.Generator().manual_seed(sum(map(ord, name)))
        parameter.copy_(mean + std * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))


def batch(sequences: int = 2, seq: int = 12, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return tokens and labels `[sequences, seq]`, some labels ignored."""
    generator = torch.Generator().manual_seed(seed)
    text = torch.randint(VOCAB, (sequences, seq + 1), generator=generator)
    labels = text[:, 1:].clone()
    labels[0, 3] = labels[-1, -1] = IGNORE
    return text[:, :-1], labels


def gradients(model: nn.Module) -> dict[str, Tensor]:
    found = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, f"{name} has no gradient"
        found[name] = parameter.grad
    return found
