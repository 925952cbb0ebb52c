"""Multi-token prediction (DeepSeek-V3, 2412.19437, 2.2): a chain of blocks, each predicting one token further ahead.

At token i, module k = 1, 2, ... takes the hidden state of module k - 1 (for k = 1, the model's hidden state after its
final norm) and the embedding of token i + k. The module predicts token i + k + 1 with the model's own head:

    hidden_k = norm(block(projection([norm(embedding of i + k), norm(hidden_(k-1))])))

As in DeepSeek-V3's published weights, the embedding is the first half of the projection's input. The modules are blocks
after the model's last block, so every transformation of blocks applies to them. The mean of their losses, times
`loss_coef`, is part of the objective. Forwards without gradients skip the modules.
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
    """A projection of two concatenated vectors per token to one vector."""

    def __init__(self, dim: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim, 2 * dim))

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        """Project the concatenation of `first` and `second` to `dim`. Both and the result are `[batch, seq, dim]`."""
        return F.linear(torch.cat([first, second], dim=-1), self.weight)


class Ahead(nn.Module):
    """A mixin that turns a block into a multi-token prediction module. List it before the block's class among the bases."""

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__(config, layer)
        self.embedding_norm = norm_of(config, config.dim)
        self.hidden_norm = norm_of(config, config.dim)
        self.projection = Join(config.dim)
        self.output_norm = norm_of(config, config.dim)

    def forward(self, x: Tensor, embedded: Tensor, shared: Any) -> Tensor:
        """x, embedded `[batch, seq, dim]` -> hidden states `[batch, seq, dim]`.

        x: the hidden states of the previous module. embedded: embeddings of the tokens ahead.
        """
        joined = self.projection(self.embedding_norm(embedded), self.hidden_norm(x))
        return self.output_norm(super().forward(joined, shared))


def ahead_of(block: type[nn.Module]) -> type[nn.Module]:
    """Return the subclass of `block` for multi-token prediction."""
    return type(f"Ahead{block.__name__}", (Ahead, block), {})


def look_ahead(tokens: Tensor, labels: Tensor, documents: Tensor | None, depth: int) -> Tensor:
    """Return each MTP module's input token and label at every position: int64 `[batch, seq, depth, 2]`.

    tokens, labels (int64) and documents `[batch, seq]` must be whole sequences. A label beyond the end of its document
    or of the sequence is IGNORE.
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
    """Return the sums of `FusedLoss`, with the MTP modules' losses added to the objective.

    model: a Transformer. x: the model's hidden states `[batch, seq, dim]` after the final norm. ahead: from
    `look_ahead`.
    """
    hidden, targets = [x], [labels]
    for module, layer in enumerate(model.ahead):
        tokens, own = ahead[:, :, module].unbind(-1)
        embedded = model.embedding(tokens)
        hidden.append(model.layers[layer](hidden[-1], embedded, shared.with_labels(own)))
        targets.append(own)
    # One call of the head for the model and all modules, so a parallel engine gathers the head's weight once.
    return model.output(torch.stack(hidden), torch.stack(targets), _Averaged(model))


def hidden_ahead(model: Any, module: int, x: Tensor, tokens: Tensor, positions: Tensor) -> Tensor:
    """Run MTP module number `module` (0: the first) for some tokens of a text. Return its hidden states `[batch, n, dim]`.

    x: hidden states of the previous module, `[batch, n, dim]`. tokens: for each position, the token `module` + 1 positions
    later, int64 `[batch, n]`. positions: int64 `[batch, n]`.
    """
    shared = model.shared_inputs(x, x.shape[1], None, positions, None)
    return model.layers[model.ahead[module]](x, model.embedding(tokens), shared)


class _Averaged:
    """The model's loss plus `loss_coef` times the mean loss of the MTP modules. All other sums are the model's own.

    hidden `[1 + modules, batch, seq, dim]`, labels `[1 + modules, batch, seq]`: of the model, then of each MTP module.
    """

    def __init__(self, model: Any):
        self._loss, self._coefficient = model.loss, model.config.mtp.loss_coef

    def __call__(self, hidden: Tensor, head_weight: Tensor, labels: Tensor) -> Tensor:
        own, *modules = (self._loss(x, head_weight, target) for x, target in zip(hidden, labels, strict=True))
        extra = torch.stack([sums[0] for sums in modules]).mean()
        return torch.cat([own[:1] + self._coefficient * extra, own[1:]])
