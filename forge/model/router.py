"""The router of a mixture-of-experts layer: the choice of experts, their weights, and load balancing.

All sums are local and linear in the tokens, so they do not depend on microbatches or layout. Balancing losses enter
backward in the layer that computes them. State changes once per optimizer step, in `update_routers`, never in a
forward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from forge.config.model import MoEConfig
from forge.model.loss import IGNORE
from forge.model.noise import token_noise
from forge.model.norm import promoted
from forge.model.split_product import linear

# As in DeepSeek-V3's code: if all sigmoid scores are 0, the weights are 0.
TINY = 1e-20
# Bins of the histograms of quantile balancing, see `count_required`.
BINS = 1000


class Router(nn.Module):
    """Computes scores, choice and weights of experts. Ties go to the expert of lower index.

    Computations are in the wider of float32 and the compute dtype. With `router_bias` the logits have a learned bias, the
    parameter logit_bias `[n_experts]`.

    State saved in checkpoints; changes once per optimizer step:
        bias             float32 `[n_experts]`: added to the scores for the choice only (balance = bias or quantile)
        previous_counts  int64 `[n_experts]`: tokens per expert in the last step, over all ranks (balance = aux_loss)
    Sums over this process's valid tokens since the last step; forwards without a gradient and recomputation add nothing:
        sums     float64 `[n_experts + 3]`: choices of each expert; balancing loss (1 per token if the load is even) and
                 z-loss, without coefficients; choices beyond an expert's capacity. float64 represents integers exactly
                 up to 2^53. One tensor, so that a forward adds to all of them in one launch
        required int32 `[n_experts, BINS]`: histogram of required biases (balance = quantile)
    `loss_scale`, float64 `[]`, multiplies the gradient of the balancing losses: 1 / (valid tokens of the global batch).
    """

    # `logits` casts the input. Outputs are never cast to the compute dtype of the model.
    casts_in = None

    bias: Tensor
    previous_counts: Tensor
    sums: Tensor
    required: Tensor
    loss_scale: Tensor

    def __init__(self, dim: int, config: MoEConfig, layer: int):
        super().__init__()
        self.config = config
        self.layer = layer
        self.weight = nn.Parameter(torch.empty(config.n_experts, dim))
        self.logit_bias = nn.Parameter(torch.empty(config.n_experts)) if config.router_bias else None
        # The product of `logits`. An extension point: a plan made on a CPU computes the product as on a GPU.
        self.multiply: Callable[[Tensor, Tensor], Tensor] = linear
        # An extension point: sums counts `[batch, n_experts]` over the processes sharing a sequence.
        self.sum_over_sequence: Callable[[Tensor], Tensor] = lambda counts: counts
        for name, value in self._fresh_state().items():
            self.register_buffer(name, value, persistent=name in ("bias", "previous_counts"))

    def forward(self, x: Tensor, labels: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """x `[batch, seq, dim]`, labels int64 `[batch, seq]` -> experts int64 and weights, both `[batch * seq, top_k]`.

        Tokens with label IGNORE are routed but not counted; without labels all tokens are counted. Expert index
        n_experts marks a dropped choice.
        """
        noise = None
        if self.config.router_noise and labels is not None and torch.is_grad_enabled():
            noise = token_noise(labels, self.layer, self.config.n_experts, promoted(self.weight.dtype))
            noise = self.config.router_noise * noise
        experts, weights, sums, required = self.route(x, labels, noise, self.sums)
        if torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1:
            # Add nothing in backward, where recomputation would count a forward again.
            self.sums = sums
            if required is not None:
                self.required.add_(required)
        return experts, weights

    def route(
        self, x: Tensor, labels: Tensor | None, noise: Tensor | None, sums: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Return experts and weights like `forward`, `sums` after this forward, and the values to add to `required`.

        The method changes no state: recomputation runs the same compiled code as forward, and must not count a forward
        twice. noise `[batch, seq, n_experts]` is added to the logits. Without a gradient, `sums` is returned unchanged.
        The last value is None if there is nothing to add.
        """
        config = self.config
        logits, scores = self.score(x, noise)
        # Contiguous, because a compiler then fuses the sum of weights with the counts.
        experts = self.choose(scores.detach()).contiguous()
        weights = _at_experts(scores, experts)
        if config.normalize_top_k and config.top_k > 1:
            weights = weights / (weights.sum(-1, keepdim=True) + TINY)
        weights = weights * config.route_scale
        experts, weights = experts.flatten(0, 1), weights.flatten(0, 1)
        if not torch.is_grad_enabled():
            return experts, weights, sums, None
        valid = torch.ones_like(logits[..., 0], dtype=torch.bool) if labels is None else labels != IGNORE
        chosen = experts.view(*valid.shape, -1)
        weights, counts, losses = self._balance(weights, logits, scores, chosen, valid)
        required = None
        if config.balance == "quantile":
            required = count_required(scores.detach(), chosen, self.bias, valid)
        # Evaluation has returned above without dropping choices, because drops depend on the other rows of the
        # microbatch, padding included.
        dropped = counts.new_zeros(())
        if config.capacity_factor:
            experts, dropped = self._drop(experts, weights.detach(), valid)
        found = [counts, losses, dropped.unsqueeze(0)]
        return experts, weights, sums + torch.cat([value.to(sums.dtype) for value in found]), required

    def score(self, x: Tensor, noise: Tensor | None) -> tuple[Tensor, Tensor]:
        """x `[batch, seq, dim]` -> logits with noise, and scores, both `[batch, seq, n_experts]`."""
        logits = self.logits(x)
        logits = logits.to(promoted(logits.dtype))
        if noise is not None:
            logits = logits + noise
        scores = logits.softmax(-1) if self.config.score_function == "softmax" else logits.sigmoid()
        return logits, scores

    def logits(self, x: Tensor) -> Tensor:
        """x `[batch, seq, dim]` -> `[batch, seq, n_experts]` in the weight's dtype."""
        logits = self.multiply(x, self.weight)
        return logits if self.logit_bias is None else logits + self.logit_bias

    def choose(self, scores: Tensor) -> Tensor:
        """scores `[batch, seq, n_experts]` -> experts int64 `[batch, seq, top_k]`, best first."""
        config = self.config
        if config.biased:
            scores = scores + self.bias
        if config.n_limited_groups < config.n_expert_groups:
            groups = scores.unflatten(-1, (config.n_expert_groups, -1))
            # Group-limited choice: a group's score is the sum of its two best scores (DeepSeek-V3, 2412.19437, 2.1.2)
            # or, with softmax and no bias, its best score (DeepSeek-V2, 2405.04434, 2.2.2).
            n_best = 2 if config.score_function == "sigmoid" or config.biased else 1
            best = _first_indices(groups, min(n_best, groups.shape[-1]))
            chosen = _first_indices(groups.gather(-1, best).sum(-1), config.n_limited_groups)
            open_groups = torch.zeros_like(groups[..., 0], dtype=torch.bool).scatter_(-1, chosen, True)
            # Not 0, because 0 would exceed a negative biased score.
            scores = groups.masked_fill(~open_groups.unsqueeze(-1), -torch.inf).flatten(-2)
        return _first_indices(scores, config.top_k)

    def _balance(
        self, weights: Tensor, logits: Tensor, scores: Tensor, experts: Tensor, valid: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return three results: `weights`, the choices per expert `[n_experts]`, and balancing loss and z-loss, `[2]`.

        In backward, the returned `weights` also add the gradients of the balancing losses.

        weights `[batch * seq, top_k]`, logits and scores `[batch, seq, n_experts]`, experts int64 `[batch, seq, top_k]`,
        valid bool `[batch, seq]`.
        """
        config = self.config
        # Count each sequence separately only if the loss needs this. In int32, because compiled kernels have no atomic
        # additions of int64.
        rows = experts.shape[0] if config.balance == "sequence_aux_loss" else 1
        chosen = valid.unsqueeze(-1).expand_as(experts).reshape(rows, -1).int()
        counts = chosen.new_zeros(rows, config.n_experts)
        counts.scatter_add_(1, experts.reshape(rows, -1), chosen)
        aux = z_loss = logits.new_zeros(())
        if config.balance in ("aux_loss", "sequence_aux_loss"):
            shares = scores / (scores.sum(-1, keepdim=True) + TINY)
            load = self.previous_counts if config.balance == "aux_loss" else self.sum_over_sequence(counts)
            # Sum over experts first: a compiler fuses this sum with the scores.
            of_tokens = (_relative(load, shares.dtype).unsqueeze(-2) * shares).sum(-1)
            aux = of_tokens.masked_fill(~valid, 0.0).sum()
        if config.z_loss_coef:
            z_loss = logits.logsumexp(-1).square().masked_fill(~valid, 0.0).sum()
        loss = config.aux_loss_coef * aux + config.z_loss_coef * z_loss
        if loss.requires_grad:
            weights = _Attach.apply(weights, loss, self.loss_scale)
        counted = counts.sum(0) if rows > 1 else counts[0]
        return weights, counted, torch.stack([aux.detach(), z_loss.detach()])

    def _drop(self, experts: Tensor, weights: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
        """Drop each choice beyond an expert's capacity: replace its expert with n_experts.

        Return the new `experts`, and the number of dropped choices of `valid` tokens.

        experts and weights `[tokens, top_k]`. Choices with the largest weights are kept. The capacity of an expert is
        capacity_factor times an even share of this forward's choices, rounded up.
        """
        n_experts, flat = self.config.n_experts, experts.flatten()
        capacity = -int(-self.config.capacity_factor * flat.numel() // n_experts)
        by_weight = weights.flatten().argsort(descending=True, stable=True)
        grouped, order = flat[by_weight].sort(stable=True)
        begins = torch.searchsorted(grouped, torch.arange(n_experts, device=flat.device))
        rank = torch.arange(flat.numel(), device=flat.device) - begins[grouped]
        over = torch.zeros_like(flat, dtype=torch.bool)
        over[by_weight[order]] = rank >= capacity
        over = over.view_as(experts)
        return experts.masked_fill(over, n_experts), (over & valid.flatten().unsqueeze(-1)).sum()

    @property
    def counts(self) -> Tensor:
        """Return how often each expert was chosen since the last step, before drops, int64 `[n_experts]`."""
        return self.sums[: self.config.n_experts].to(torch.int64)

    @property
    def losses(self) -> Tensor:
        """Return the balancing loss and the z-loss since the last step, float64 `[2]`."""
        return self.sums[self.config.n_experts : -1]

    @property
    def dropped(self) -> Tensor:
        """Return the number of choices dropped since the last step (beyond an expert's capacity), int64 `[]`."""
        return self.sums[-1].to(torch.int64)

    def reset_state(self) -> None:
        """Reset every buffer: no bias, zero counts, a loss scale of 1."""
        for name, value in self._fresh_state().items():
            # On the buffers' device, because the weight may be offloaded, but buffers never are.
            setattr(self, name, value.to(getattr(self, name).device))

    def _fresh_state(self) -> dict[str, Tensor]:
        n_experts, quantile = self.config.n_experts, self.config.balance == "quantile"
        required = {"required": torch.zeros(n_experts, BINS, dtype=torch.int32)} if quantile else {}
        return required | {
            "bias": torch.zeros(n_experts, dtype=torch.float32),
            "previous_counts": torch.zeros(n_experts, dtype=torch.int64),
            "sums": torch.zeros(n_experts + 3, dtype=torch.float64),
            "loss_scale": torch.ones((), dtype=torch.float64),
        }


@torch.no_grad()
def update_routers(
    routers: Sequence[Router], counts: Tensor, skip: Tensor, required: Tensor | None = None
) -> None:
    """Update the state of all routers by one optimizer step, and reset the sums.

    counts: choices of each expert in this step over all ranks, int64 `[routers, n_experts]`. skip: scalar, 1 in a
    skipped step, which only resets the sums. required: for quantile balancing, the histograms of this step over all
    ranks, int32 `[routers, n_experts, BINS]`.

    With balance = bias, an expert's bias increases by bias_update_rate if the expert got less than an even share, and
    decreases if it got more (Wang et al. 2024, "Auxiliary-Loss-Free Load Balancing Strategy for MoE"). Integer
    arithmetic gives the same sign on all ranks.
    """
    if not routers:
        return
    config, skipped = routers[0].config, skip > 0
    if config.balance == "bias":
        direction = (counts.sum(-1, keepdim=True) - config.n_experts * counts).sign()
        moves = config.bias_update_rate * direction.masked_fill(skipped, 0).float()
        torch._foreach_add_([router.bias for router in routers], list(moves.unbind()))
    if required is not None:
        own = [router.bias for router in routers]
        biases = torch.stack(own)
        solved = torch.where(skipped, biases, solve(required, biases, config.top_k))
        torch._foreach_copy_(own, list(solved.unbind()))
        torch._foreach_zero_([router.required for router in routers])
    before = [router.previous_counts for router in routers]
    torch._foreach_copy_(before, list(torch.where(skipped, torch.stack(before), counts).unbind()))
    torch._foreach_zero_([router.sums for router in routers])


# Quantile balancing (Kimi Team 2026, arXiv:2607.24653, 2.3.3 and appendix D): solve for the experts' biases once per step.
#
# A token's cutoff is its (k+1)-th highest biased score, the best score not chosen. The required bias of an expert for
# this token is cutoff - score. With this bias, the expert's biased score equals the cutoff. If an expert's bias is the
# k / n quantile of its required biases over the tokens of a step, then k / n of these tokens choose the expert. This is
# an even share for n experts and k choices per token.
#
# The quantile is read from a histogram of BINS equal bins over [lowest bias - 1, highest bias + 1]. All required biases
# lie in this range, because scores are from 0 to 1. Counts are integers, so their sum does not depend on the order, and
# all ranks get the same solution.


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


def _relative(counts: Tensor, dtype: torch.dtype) -> Tensor:
    """Return each expert's load relative to an even load: n_experts * count / sum of the counts.

    counts `[..., n_experts]`. If the sum is 0, every load is 1.
    """
    total = counts.sum(-1, keepdim=True)
    return torch.where(total > 0, counts.shape[-1] * counts.to(dtype) / total.clamp(min=1), 1.0)


def _first_indices(scores: Tensor, k: int) -> Tensor:
    """Return the indices of the k highest values along the last dim, best first; ties go to the lower index.

    topk does not define the order of ties.
    """
    return scores.argsort(dim=-1, descending=True, stable=True)[..., :k]


def _at_experts(scores: Tensor, experts: Tensor) -> Tensor:
    """Return the scores of the chosen experts, `[..., top_k]`. scores `[..., n_experts]`, experts int64 `[..., top_k]`."""
    return _Pick.apply(scores, experts) if torch.compiler.is_compiling() else scores.gather(-1, experts)


class _Pick(torch.autograd.Function):
    """`gather` along the last dim. Backward does not scatter with additions, so it fuses with other operators.

    The indices of a row must differ.
    """

    @staticmethod
    def forward(ctx: Any, values: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.size = values.shape[-1]
        return values.gather(-1, index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        (index,) = ctx.saved_tensors
        places = torch.arange(ctx.size, device=index.device)
        columns = zip(index.unsqueeze(-1).unbind(-2), grad.unsqueeze(-1).unbind(-2), strict=True)
        parts = [torch.where(column == places, own, 0.0) for column, own in columns]
        return sum(parts[1:], parts[0]), None


class _Attach(torch.autograd.Function):
    """Return `x` unchanged in forward. In backward, give `loss` the gradient `scale`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(scale)
        ctx.dtype = loss.dtype
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (scale,) = ctx.saved_tensors
        return grad, scale.to(ctx.dtype), None
