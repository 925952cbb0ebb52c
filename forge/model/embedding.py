"""Both ends of the model: tokens to hidden states, and hidden states to the loss or to logits."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Embedding(nn.Module):
    """One vector per token, times `scale`. In a model with tied embeddings it is also the output head."""

    def __init__(self, vocab_size: int, dim: int, scale: float = 1.0):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, dim))
        self.scale = scale

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens int64 `[batch, seq]` -> `[batch, seq, dim]`."""
        return self.scaled(F.embedding(tokens, self.weight))

    def scaled(self, x: Tensor) -> Tensor:
        """Return x * scale, with the scale rounded to the dtype of x, as in transformers."""
        return x if self.scale == 1.0 else x * torch.full((), self.scale, dtype=x.dtype, device=x.device)

    def flops_per_token(self, seq_len: int) -> float:
        """Return 0, because a look-up has no products. The model counts the product of a tied head."""
        return 0.0

    def output(self, hidden: Tensor, labels: Tensor | None, loss: nn.Module) -> Tensor:
        """Compute `Head.forward` with the embedding's weight.

        Module hooks do not run. Under FSDP the weight must therefore belong to the root's unit.
        """
        # Cast explicitly to the weight's compute dtype, because no hook does.
        return loss(hidden.to(self.weight.dtype), self.weight, labels)


class Head(nn.Module):
    """The output matrix.

    Its forward includes the loss, because data-parallel engines gather the weight only for the forward.
    """

    # Losses and logits are never rounded to the compute dtype.
    exact_output = True

    def __init__(self, vocab_size: int, dim: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, dim))

    def forward(self, hidden: Tensor, labels: Tensor | None, loss: nn.Module) -> Tensor:
        """hidden `[batch, seq, dim]` -> loss(hidden, weight, labels); logits if labels is None."""
        return loss(hidden, self.weight, labels)
