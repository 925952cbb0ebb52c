"""Log-probabilities of given tokens. The forward runs with a scoring module in place of the model's loss."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from forge.model import AttentionFunction
from forge.model.loss import IGNORE, head_logits


@contextmanager
def replaced(
    model: Any, loss: nn.Module, attend: Sequence[AttentionFunction] | None = None
) -> Iterator[None]:
    """In the body, replace the loss of `model`. If `attend` is given, also replace each layer's attention function."""
    attentions = [block.attention for block in model.layers.values()] if attend is not None else []
    own_loss, own = model.loss, [attention.attend for attention in attentions]
    try:
        model.loss = loss
        for attention, function in zip(attentions, attend or (), strict=True):
            attention.attend = function
        yield
    finally:
        model.loss = own_loss
        for attention, function in zip(attentions, own, strict=True):
            attention.attend = function


@torch.no_grad()
def token_scores(model: Any, tokens: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the log-probability of each label, and a mask of the labels that are the likeliest token; both `[batch, seq]`.

    tokens, labels: int64 `[batch, seq]`; labels are the next tokens. Log-probabilities are in nats; for the label IGNORE
    they are 0. Their dtype is the wider of float32 and the compute dtype. The mask is bool.
    """
    with replaced(model, _TokenScores(model.loss.chunk_tokens, model.config.logit_soft_cap)):
        scores = model(tokens, labels)
    return scores[0], scores[1].bool()


class _TokenScores(nn.Module):
    """A replacement of the loss. Computes the logits of `chunk_tokens` tokens at a time."""

    def __init__(self, chunk_tokens: int, soft_cap: float):
        super().__init__()
        self._chunk_tokens, self._soft_cap = chunk_tokens, soft_cap

    def forward(self, hidden: Tensor, head_weight: Tensor, labels: Tensor) -> Tensor:
        """Return `[2, batch, seq]`: the log-probability of each label, and 1 if the label is the likeliest token, else 0.

        hidden `[batch, seq, dim]`, head_weight `[vocab, dim]`, labels int64 `[batch, seq]`.
        """
        rows, wanted = hidden.flatten(0, 1), labels.flatten()
        parts = []
        for x, label in zip(rows.split(self._chunk_tokens), wanted.split(self._chunk_tokens), strict=True):
            logits = head_logits(x, head_weight, self._soft_cap)  # [chunk, vocab]
            valid = label != IGNORE
            target = label.masked_fill(~valid, 0)[:, None]
            log_probability = (logits.gather(-1, target) - logits.logsumexp(-1, keepdim=True))[:, 0]
            likeliest = logits.argmax(-1) == label
            parts.append(torch.stack([log_probability.masked_fill(~valid, 0.0), likeliest.to(logits.dtype)]))
        return torch.cat(parts, dim=1).view(2, *labels.shape)
