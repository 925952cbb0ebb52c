"""Quantile balancing (Kimi Team 2026, arXiv:2607.24653, 2.3.3 and appendix D): solve for the experts' biases once per step.

A token's cutoff is its (k+1)-th highest biased score, the best score not chosen. The required bias of an expert for
this token is cutoff - score. With this bias, the expert's biased score equals the cutoff. If an expert's bias is the
k / n quantile of its required biases over the tokens of a step, then k / n of these tokens choose the expert. This is
an even share for n experts and k choices per token.

The quantile is read from a histogram of BINS equal bins over [lowest bias - 1, highest bias + 1]. All required biases
lie in this range, because scores are from 0 to 1. Counts are integers, so their sum does not depend on the order, and
all ranks get the same solution.
"""

from __future__ import annotations

import torch
from torch import Tensor

BINS = 1000


def count_required(scores: Tensor, experts: Tensor, bias: Tensor, valid: Tensor) -> Tensor:
    """Return the histogram of each expert's required biases in one forward: int32 `[n_experts, BINS]`.

    With the required bias, an expert's biased score would equal the token's (k+1)-th highest. scores
    `[batch, seq, n_experts]`. experts: the choices by scores + bias, int64 `[batch, seq, top_k]`. bias `[n_experts]`.
    valid: the tokens to count, bool `[batch, seq]`.
    """
    cutoff = (scores + bias).scatter(-1, experts, -torch.inf).amax(-1, keepdim=True)
    low, width = _bins(bias.to(scores.dtype))
    bins = ((cutoff - scores - low) / width).floor().clamp(0, BINS - 1).long()
    bins = bins + BINS * torch.arange(bias.numel(), device=bias.device)
    counted = valid.unsqueeze(-1).expand_as(bins).int()
    counts = counted.new_zeros(bias.numel() * BINS)
    return counts.scatter_add(0, bins.flatten(), counted.flatten()).view(-1, BINS)


def solve(counts: Tensor, biases: Tensor, top_k: int) -> Tensor:
    """Return the next biases, float32 `[routers, n_experts]`, with mean 0 in each router.

    A bias is the top_k / n_experts quantile of the expert's required biases, interpolated within its bin. counts:
    histograms of required biases over all ranks, integers `[routers, n_experts, BINS]`. biases: the current biases,
    float32 `[routers, n_experts]`. A router without counted tokens keeps its biases.
    """
    low, width = _bins(biases.double())
    upto = counts.cumsum(-1, dtype=torch.int64)
    tokens = upto[..., -1:]
    target = tokens.double() * top_k / biases.shape[-1]
    index = (upto < target).sum(-1, keepdim=True).clamp(max=BINS - 1)
    inside = counts.gather(-1, index).double()
    before = upto.gather(-1, index).double() - inside
    place = (index + (target - before) / inside.clamp(min=1)).squeeze(-1)
    found = low + place * width
    found = found - found.mean(-1, keepdim=True)
    return torch.where(tokens.squeeze(-1) > 0, found, biases.double()).float()


def _bins(bias: Tensor) -> tuple[Tensor, Tensor]:
    """bias `[..., n_experts]` -> (start of the first bin, width of one bin), both `[..., 1]`."""
    low, high = bias.amin(-1, keepdim=True) - 1, bias.amax(-1, keepdim=True) + 1
    return low, (high - low) / BINS
