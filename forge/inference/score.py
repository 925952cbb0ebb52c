"""How likely a model takes given texts to be, token by token."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from forge.inference.lend import lent
from forge.model.loss import IGNORE, head_logits


@torch.no_grad()
def token_scores(model: Any, tokens: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probability of each label in nats, float32 or float64, and whether it is the likeliest token: both `[batch, seq]`.

    tokens int64 `[batch, seq]`; labels int64 `[batch, seq]`, each the token after; of IGNORE the log-probability is 0.
    """
    with lent(model, loss=_TokenScores(model.loss.chunk_tokens, model.config.logit_soft_cap)):
        scores = model(tokens, labels)
    return scores[0], scores[1].bool()


class _TokenScores(nn.Module):
    """In place of the loss: two numbers for each token; the logits of only `chunk_tokens` of them exist at once."""

    def __init__(self, chunk_tokens: int, soft_cap: float):
        super().__init__()
        self._chunk_tokens, self._soft_cap = chunk_tokens, soft_cap

    def forward(self, hidden: Tensor, head_weight: Tensor, labels: Tensor) -> Tensor:
        rows, wanted = hidden.flatten(0, 1), labels.flatten()
        parts = []
        for x, label in zip(rows.split(self._chunk_tokens), wanted.split(self._chunk_tokens), strict=True):
            logits = head_logits(x, head_weight, self._soft_cap)
            valid = label != IGNORE
            target = label.masked_fill(~valid, 0)[:, None]
            log_probability = (logits.gather(-1, target) - logits.logsumexp(-1, keepdim=True))[:, 0]
            likeliest = logits.argmax(-1) == label
            parts.append(torch.stack([log_probability.masked_fill(~valid, 0.0), likeliest.to(logits.dtype)]))
        return torch.cat(parts, dim=1).view(2, *labels.shape)
