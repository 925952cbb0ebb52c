"""Multi-token prediction (DeepSeek-V3, 2412.19437, 2.2): blocks that predict tokens further ahead, one after the other.

Module k = 1, 2, ... takes at token i the hidden state of the previous module (for the first one, the model's after its
final norm) and the embedding of token i + k, and predicts token i + k + 1 with the model's own head:

    hidden_k = norm(block(projection([norm(embedding of i + k), norm(hidden_k-1)])))

in the order of DeepSeek-V3's weights. The modules are blocks after the model's last one, so every transformation
of blocks applies to them. Their losses, averaged and times `loss_coef`, are part of the objective. Forwards without
a gradient leave them out.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from forge.config.model import ModelConfig
from forge.model.loss import IGNORE
from forge.model.norm import norm_of


class Join(nn.Module):
    """The projection of two concatenated vectors per token to one."""

    def __init__(self, dim: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim, 2 * dim))

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        """Both `[batch, seq, dim]` -> `[batch, seq, dim]`."""
        return F.linear(torch.cat([first, second], dim=-1), self.weight)


class Ahead(nn.Module):
    """Adds multi-token prediction to a block. In a class definition, the block's class comes after this base."""

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__(config, layer)
        self.embedding_norm = norm_of(config, config.dim)
        self.hidden_norm = norm_of(config, config.dim)
        self.projection = Join(config.dim)
        self.output_norm = norm_of(config, config.dim)

    def forward(self, x: Tensor, embedded: Tensor, shared: Any) -> Tensor:
        """Combine hidden states and embeddings, both `[batch, seq, dim]`, to `[batch, seq, dim]`.

        x: the hidden states of the previous module.
        """
        joined = self.projection(self.embedding_norm(embedded), self.hidden_norm(x))
        return self.output_norm(super().forward(joined, shared))


def ahead_of(block: type[nn.Module]) -> type[nn.Module]:
    """Return the subclass of `block` that predicts tokens further ahead."""
    return type(f"Ahead{block.__name__}", (Ahead, block), {})


def look_ahead(tokens: Tensor, labels: Tensor, documents: Tensor | None, depth: int) -> Tensor:
    """Return each module's token and label at every position: int64 `[batch, seq, depth, 2]`.

    tokens, labels int64 and documents `[batch, seq]`, whole sequences. A label beyond the end of its document or of the
    sequence is IGNORE.
    """
    modules = []
    for distance in range(1, depth + 1):

        def later(values: Tensor, fill: int, distance: int = distance) -> Tensor:
            return F.pad(values[:, distance:], (0, distance), value=fill)

        label = later(labels, IGNORE)
        if documents is not None:
            label = label.masked_fill(later(documents, -1) != documents, IGNORE)
        modules.append(torch.stack([later(tokens, 0), label], dim=-1))
    return torch.stack(modules, dim=2)


def sums_with_ahead(model: Any, x: Tensor, labels: Tensor, ahead: Tensor, shared: Any) -> Tensor:
    """Return the sums of `FusedLoss`, with the modules' losses added to the objective.

    model: a Transformer; x: its hidden states `[batch, seq, dim]` after the final norm; ahead: from `look_ahead`.
    """
    hidden, targets = [x], [labels]
    for module, layer in enumerate(model.ahead):
        tokens, own = ahead[:, :, module].unbind(-1)
        embedded = model.embedding(tokens)
        hidden.append(model.layers[layer](hidden[-1], embedded, shared.with_labels(own)))
        targets.append(own)
    # One call of the head for all: a parallel engine gathers its weight once.
    return model.output(torch.stack(hidden), torch.stack(targets), _Averaged(model))


def hidden_ahead(model: Any, module: int, x: Tensor, tokens: Tensor, positions: Tensor) -> Tensor:
    """Return the hidden states of module number `module` (0: the first) for some tokens of a text: `[batch, n, dim]`.

    x `[batch, n, dim]`: the hidden states of the previous module; tokens int64 `[batch, n]`: the tokens ahead; positions
    int64 `[batch, n]`.
    """
    shared = model.shared_inputs(x, x.shape[1], None, positions, None)
    return model.layers[model.ahead[module]](x, model.embedding(tokens), shared)


class _Averaged:
    """Replaces the loss function: takes the stacked hidden states and labels of the model and of each module."""

    def __init__(self, model: Any):
        self._loss, self._coefficient = model.loss, model.config.mtp.loss_coef

    def __call__(self, hidden: Tensor, head_weight: Tensor, labels: Tensor) -> Tensor:
        own, *modules = (self._loss(x, head_weight, target) for x, target in zip(hidden, labels, strict=True))
        extra = torch.stack([sums[0] for sums in modules]).mean()
        return torch.cat([own[:1] + self._coefficient * extra, own[1:]])
