"""A mixture of experts in place of a block's feed-forward."""

from __future__ import annotations

from torch import Tensor, nn

from forge.config.model import ModelConfig
from forge.model.dispatch import Dispatcher, LocalDispatcher
from forge.model.experts import Experts
from forge.model.feed_forward import FeedForward
from forge.model.router import Router


class MoE(nn.Module):
    """Each token goes through the experts that the router chooses for it, and through the shared experts, if any.

    Shared experts are one feed-forward as wide as all of them: the same function, in larger products.
    `dispatch` is an extension point: expert parallelism replaces it and leaves the rest.
    """

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        moe = config.moe
        assert moe is not None
        self.router = Router(config.dim, moe, layer)
        self.experts = Experts(moe.n_experts, config.dim, moe.expert_dim)
        weights = sum(weight.numel() for weight in self.experts.parameters())
        # Of the experts that a token is not routed to.
        self.idle_parameters = weights // moe.n_experts * (moe.n_experts - moe.top_k)
        shared_dim = moe.n_shared_experts * moe.expert_dim
        self.shared = FeedForward(config.dim, shared_dim) if shared_dim else None
        self.dispatch: Dispatcher = LocalDispatcher(moe.n_experts, drops=moe.capacity_factor > 0)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        """x `[batch, seq, dim]`, labels int64 `[batch, seq]` (IGNORE: not balanced) -> `[batch, seq, dim]`."""
        routed = self.routed(x, labels)
        return routed if self.shared is None else routed + self.shared(x)

    def routed(self, x: Tensor, labels: Tensor | None) -> Tensor:
        """Return the output of the chosen experts; shapes as in `forward`."""
        experts, weights = self.router(x, labels)
        return self.dispatch(x.flatten(0, 1), experts, weights, self.experts).view_as(x)


def feed_forward_for(config: ModelConfig, layer: int) -> FeedForward | MoE:
    """Build the feed-forward of the block with this global index."""
    if config.moe is None or layer < config.moe.n_dense_layers:
        return FeedForward(config.dim, config.ffn_dim)
    return MoE(config, layer)
