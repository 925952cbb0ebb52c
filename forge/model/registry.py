"""Models by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from forge.config.model import ModelConfig
from forge.model.transformer import Transformer
from forge.runtime.errors import UserError, did_you_mean
from forge.runtime.imports import load_class

# A builder takes (config, seq_len, **parts) and returns a module with the methods and attributes of Transformer.
MODELS: dict[str, Callable[..., Any]] = {"transformer": Transformer}


def build_model(config: ModelConfig, seq_len: int, **parts: Any) -> Any:
    """Build the model that `config.kind` names, registered or as `package.module:Class`; `parts` as for Transformer.

    Raises UserError if there is no such model.
    """
    kind = config.kind
    if kind in MODELS:
        return MODELS[kind](config, seq_len, **parts)
    if ":" not in kind:
        raise UserError(
            f'model.kind = "{kind}" is not a model; known: {", ".join(sorted(MODELS))}, '
            f"or an import path package.module:Class{did_you_mean(kind, MODELS)}"
        )
    try:
        builder = load_class(kind)
    except ValueError as error:
        raise UserError(f'model.kind = "{kind}": {error}') from error
    if not issubclass(builder, nn.Module):
        raise UserError(f'model.kind = "{kind}" is not a module class; name a subclass of torch.nn.Module')
    return builder(config, seq_len, **parts)
