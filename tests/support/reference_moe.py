"""A second implementation of the mixture of experts: token by token, in Python. Shares no code with forge."""

from __future__ import annotations

import torch
from torch import Tensor

from forge.config.model import ModelConfig, MoEConfig

Parameters = dict[str, Tensor]


class Mixture:
    """The routers' state by layer, and their running sums over sequences."""

    def __init__(self, config: MoEConfig, bias: dict[int, list[float]], previous: dict[int, list[int]]):
        self.config, self.bias, self.previous = config, bias, previous
        self.required: dict[int, list[list[float]]] = {layer: [] for layer in bias}
        self.counts = {layer: [0] * config.n_experts for layer in bias}
        self.aux = {layer: torch.zeros((), dtype=torch.float64) for layer in bias}
        self.z_loss = {layer: torch.zeros((), dtype=torch.float64) for layer in bias}

    @property
    def loss(self) -> Tensor:
        """Return the routers' loss, a term of the objective."""
        balanced = self.config.aux_loss_coef * sum(self.aux.values())
        return balanced + self.config.z_loss_coef * sum(self.z_loss.values())

    def feed_forward(
        self, own: Parameters, layer: int, x: Tensor, counts: list[bool], model: ModelConfig
    ) -> Tensor:
        """Compute one whole sequence x `[seq, dim]`. counts: mask of the tokens that count in the routers' sums."""
        config = self.config
        here = [0] * config.n_experts
        shares = torch.zeros(config.n_experts, dtype=torch.float64)
        rows = []
        for token, valid in zip(x, counts, strict=True):
            logits = own["feed_forward.router.weight"] @ token
            if config.router_bias:
                logits = logits + own["feed_forward.router.logit_bias"]
            scores = logits.exp() / logits.exp().sum()
            if config.score_function == "sigmoid":
                scores = 1 / (1 + (-logits).exp())
            chosen = choose(config, scores.tolist(), self.bias[layer])
            total = sum(scores[e] for e in chosen) if config.normalize_top_k and config.top_k > 1 else 1.0
            given = token
            if config.latent_dim:
                given = own["feed_forward.to_latent.weight"] @ token
            row = torch.zeros_like(given)
            for e in chosen:
                output = _expert(own, e, given, model)
                row = row + config.route_scale * scores[e] / total * output
            if config.latent_dim:
                factor = own["feed_forward.latent_norm.weight"] + (1 if model.zero_centered_norms else 0)
                length = torch.sqrt(sum(number**2 for number in row) / len(row) + model.norm_eps)
                row = own["feed_forward.from_latent.weight"] @ (row / length * factor)
            if config.n_shared_experts:
                row = row + feed_forward(own, "feed_forward.shared", token, model)
            rows.append(row)
            if valid:
                left = [e for e in range(config.n_experts) if e not in chosen]
                if left:
                    cutoff = max(scores[e].item() + self.bias[layer][e] for e in left)
                    self.required[layer].append([cutoff - score.item() for score in scores])
                for e in chosen:
                    here[e] += 1
                shares = shares + scores / scores.sum()
                if config.z_loss_coef:
                    self.z_loss[layer] = self.z_loss[layer] + logits.exp().sum().log() ** 2
        load = here if config.balance == "sequence_aux_loss" else self.previous[layer]
        if config.balance in ("aux_loss", "sequence_aux_loss"):
            even = sum(load) / config.n_experts
            relative = [count / even if even else 1.0 for count in load]
            self.aux[layer] = self.aux[layer] + sum(f * p for f, p in zip(relative, shares, strict=True))
        self.counts[layer] = [before + now for before, now in zip(self.counts[layer], here, strict=True)]
        return torch.stack(rows)


def choose(config: MoEConfig, scores: list[float], bias: list[float]) -> list[int]:
    """Return one token's experts, the best first. Of equal experts, the lower index is first."""
    biased = config.balance in ("bias", "quantile")
    if biased:
        scores = [score + b for score, b in zip(scores, bias, strict=True)]
    size = config.n_experts // config.n_expert_groups
    groups = [list(range(g * size, (g + 1) * size)) for g in range(config.n_expert_groups)]

    def worth(group: list[int]) -> float:
        best = sorted((scores[e] for e in group), reverse=True)
        return sum(best[:2]) if biased or config.score_function == "sigmoid" else best[0]

    groups = sorted(groups, key=lambda group: -worth(group))[: config.n_limited_groups]
    return sorted((e for group in groups for e in group), key=lambda e: (-scores[e], e))[: config.top_k]


def solved(required: list[list[float]], bias: list[float], top_k: int, bins: int = 1000) -> list[float]:
    """Solve quantile balancing: for each expert, return a bias from the histogram of the biases required by its tokens."""
    low, high = min(bias) - 1, max(bias) + 1
    width, found = (high - low) / bins, []
    for e in range(len(bias)):
        counts = [0] * bins
        for token in required:
            counts[min(bins - 1, max(0, int((token[e] - low) // width)))] += 1
        wanted, below, index = len(required) * top_k / len(bias), 0, 0
        while below + counts[index] < wanted:
            below += counts[index]
            index += 1
        found.append(low + width * (index + (wanted - below) / counts[index]))
    return [value - sum(found) / len(found) for value in found]


def _expert(own: Parameters, number: int, x: Tensor, config: ModelConfig) -> Tensor:
    """Apply one routed expert to one token `[dim]`."""
    into = own["feed_forward.experts.w13"][number] @ x
    if config.moe is not None and config.moe.expert_bias:
        into = into + own["feed_forward.experts.w13_bias"][number]
    hidden = (
        activated(into, None, config) if config.activation == "relu2" else activated(*into.chunk(2), config)
    )
    out = own["feed_forward.experts.w2"][number] @ hidden
    return out + own["feed_forward.experts.w2_bias"][number] if "feed_forward.experts.w2_bias" in own else out


def feed_forward(own: Parameters, path: str, x: Tensor, config: ModelConfig) -> Tensor:
    """Apply a dense feed-forward to x `[..., dim]`."""

    def linear(name: str, x: Tensor) -> Tensor:
        out = x @ own[f"{path}.{name}.weight"].T
        return out + own[f"{path}.{name}.bias"] if config.ffn_bias else out

    up = None if config.activation == "relu2" else linear("w3", x)
    return linear("w2", activated(linear("w1", x), up, config))


def activated(gate: Tensor, up: Tensor | None, config: ModelConfig) -> Tensor:
    if up is None:
        return torch.where(gate > 0, gate * gate, 0.0)
    if config.activation == "gelu_tanh":
        return gate / 2 * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3))) * up
    if config.activation == "situ":
        gate_limit, up_limit = config.activation_limit, config.activation_up_limit
        bounded = gate_limit * torch.tanh(gate / gate_limit) / (1 + torch.exp(-gate))
        return bounded * up_limit * torch.tanh(up / up_limit)
    if config.activation == "clamped_swiglu":
        limit = config.activation_limit
        gate = torch.where(gate > limit, limit, gate)
        up = torch.where(up.abs() > limit, limit * up.sign(), up)
        return gate / (1 + torch.exp(-1.702 * gate)) * (up + 1)
    return gate * torch.sigmoid(gate) * up
