"""The decoder, from tokens to the loss.

Sizes: batch (sequences), seq (tokens per sequence), dim (width of the residual stream), heads, kv_heads, head_dim,
vocab.
"""

from __future__ import annotations

from collections.abc import Callable
from math import sqrt
from typing import Any

import torch
from torch import Tensor, nn

from forge.config.model import ModelConfig
from forge.model.attention import Attention, GroupedAttention, Shared, rope_tables
from forge.model.feed_forward import FeedForward, activation_of, make_feed_forward
from forge.model.flops import matrix_flops
from forge.model.initial import Normal, Uniform, initial_values
from forge.model.linear_attention import LinearAttention
from forge.model.loss import Embedding, FusedLoss, Head
from forge.model.mla import LatentAttention
from forge.model.moe import MoE
from forge.model.mtp import ahead_of, look_ahead, sums_with_ahead
from forge.model.norm import norm_of, promoted
from forge.model.residual import DepthMix, mixed_of
from forge.model.router import Router
from forge.model.sdpa import AttentionMask
from forge.runtime.errors import UserError, did_you_mean
from forge.runtime.imports import load_class


class Block(nn.Module):
    """x + attention(norm(x)), then x + feed_forward(norm(x))."""

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        self.attention_norm = norm_of(config, config.dim)
        self.attention = attention_for(config, layer)
        self.ffn_norm = norm_of(config, config.dim)
        self.feed_forward = _feed_forward(config, layer)

    def forward(self, x: Tensor, shared: Shared) -> Tensor:
        """x `[batch, seq, dim]` -> `[batch, seq, dim]`."""
        return self.feed(*self.attend(x, shared), shared)

    def attend(self, x: Tensor, shared: Shared) -> tuple[Tensor, Tensor]:
        """Apply the attention half: x -> the stream and the input of `ffn_branch`, all `[batch, seq, dim]`.

        This half includes the feed-forward's norm: in a block with experts, only this half is compiled.
        """
        x = x + self.attention_branch(x, shared)
        return x, self.ffn_input(x)

    def feed(self, x: Tensor, read: Tensor, shared: Shared) -> Tensor:
        """Apply the feed-forward half: the results of `attend` -> the new stream, all `[batch, seq, dim]`."""
        return x + self.ffn_branch(read, shared)

    def attention_branch(self, x: Tensor, shared: Shared) -> Tensor:
        """Return the attention half's contribution to the stream: x `[batch, seq, dim]` -> `[batch, seq, dim]`."""
        return self.attention(self.attention_norm(x), shared)

    def ffn_input(self, x: Tensor) -> Tensor:
        """Return the input of `ffn_branch` for the stream x; both `[batch, seq, dim]`."""
        return self.ffn_norm(x)

    def ffn_branch(self, x: Tensor, shared: Shared) -> Tensor:
        """Return the feed-forward half's contribution to the stream: x `[batch, seq, dim]` -> `[batch, seq, dim]`."""
        if isinstance(self.feed_forward, MoE):
            return self.feed_forward(x, shared.labels)
        return self.feed_forward(x)


class PostNormBlock(Block):
    """x + norm(attention(x)), then x + norm(feed_forward(x)), as in OLMo 2 (2501.00656, 3.2)."""

    def attention_branch(self, x: Tensor, shared: Shared) -> Tensor:
        """Return norm(attention(x)): x `[batch, seq, dim]` -> `[batch, seq, dim]`."""
        return self.attention_norm(self.attention(x, shared))

    def ffn_input(self, x: Tensor) -> Tensor:
        """Return x, because the norm comes after the feed-forward."""
        return x

    def ffn_branch(self, x: Tensor, shared: Shared) -> Tensor:
        """Return norm(feed_forward(x)): x `[batch, seq, dim]` -> `[batch, seq, dim]`."""
        return self.ffn_norm(super().ffn_branch(x, shared))


class SandwichBlock(Block):
    """x + norm(attention(norm(x))), then x + norm(feed_forward(norm(x))), as in Gemma 2 (2408.00118, table 1)."""

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__(config, layer)
        self.attention_post_norm = norm_of(config, config.dim)
        self.ffn_post_norm = norm_of(config, config.dim)

    def attention_branch(self, x: Tensor, shared: Shared) -> Tensor:
        """Return norm(attention(norm(x))): x `[batch, seq, dim]` -> `[batch, seq, dim]`."""
        return self.attention_post_norm(super().attention_branch(x, shared))

    def ffn_branch(self, x: Tensor, shared: Shared) -> Tensor:
        """Return norm(feed_forward(x)): x `[batch, seq, dim]`, already normed, -> `[batch, seq, dim]`."""
        return self.ffn_post_norm(super().ffn_branch(x, shared))


POSITIONS: dict[str, type[nn.Module]] = {"pre": Block, "post": PostNormBlock, "sandwich": SandwichBlock}
# Block classes by (model.residual, model.norm_position).
BLOCKS = {("add", position): block for position, block in POSITIONS.items()} | {
    ("attention", position): mixed_of(block) for position, block in POSITIONS.items()
}
AHEAD_BLOCKS = {kind: ahead_of(block) for kind, block in BLOCKS.items()}


class Transformer(nn.Module):
    """The model of `config` for sequences of up to `seq_len` tokens, or a part of the model, e.g. a pipeline stage.

    layers: global indices of the part's layers; None: all. Parameters are named by global index, so names do not depend
    on the part. embed: the part starts from tokens. head: the part ends in the loss. A part with a tied head but
    without the embedding has a copy of the embedding's weight under the same name.

    The model is built on the current default device with uninitialised parameters: fill them according to
    `initial_values`, then call `reset_buffers`. `loss` is a FusedLoss without a z-loss until the caller replaces it.
    Extension points for parallel code: `Attention.attend`, `MoE.dispatch`, `MoE.rounding`, `loss`.
    """

    rope_cos: Tensor
    rope_sin: Tensor

    def __init__(
        self,
        config: ModelConfig,
        seq_len: int,
        layers: range | None = None,
        embed: bool = True,
        head: bool = True,
    ):
        super().__init__()
        self.config = config
        self.seq_len = seq_len
        self.embeds = embed
        indices = range(config.n_layers) if layers is None else layers
        ends = config.vocab_size, config.dim
        scale = sqrt(config.dim) if config.scale_embeddings else 1.0
        both_ends = head and config.embedding_at_both_ends
        self.embedding = Embedding(*ends, scale) if embed or both_ends else None
        kind = config.residual, config.norm_position
        block, ahead_block = BLOCKS[kind], AHEAD_BLOCKS[kind]
        self.layers = nn.ModuleDict({str(layer): block(config, layer) for layer in indices})
        self.trunk = list(self.layers)
        self.ahead = [str(config.n_layers + module) for module in range(config.mtp_depth if head else 0)]
        self.layers.update({layer: ahead_block(config, int(layer)) for layer in self.ahead})
        self.mixes = config.residual == "attention"
        self.mix = DepthMix(config.dim, config.norm_eps) if head and self.mixes else None
        self.norm = norm_of(config, config.dim) if head else None
        self.head = Head(*ends) if head and not config.tie_embeddings else None
        self.loss: nn.Module = FusedLoss(soft_cap=config.logit_soft_cap)
        for name in ("rope_cos", "rope_sin"):
            self.register_buffer(name, torch.empty(0), persistent=False)
        self.reset_buffers(torch.get_default_dtype())

    def forward(
        self,
        x: Tensor,
        labels: Tensor | None = None,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        ahead: Tensor | None = None,
    ) -> Tensor:
        """Run the model on `[batch, seq]` tokens. The first dimension of every tensor argument is the batch.

        x: tokens int64 `[batch, seq]`, or hidden states `[batch, seq, dim]` if another part has the embedding. With
            attention residuals, hidden states are `[1 + saved, batch, seq, dim]`: the stream, then the saved streams.
        labels: int64 `[batch, seq]`, IGNORE for positions without a target. With experts, parts without a head need
            labels too, because ignored tokens do not count in load balancing.
        positions: int64 `[batch, seq]`, below `seq_len`, used only by RoPE; None: 0, 1, ...
        documents: int `[batch, seq]`; a token attends only to its own document; None: one document.
        ahead: int64 `[batch, seq, depth, 2]`, from `forge.model.mtp.look_ahead`. Required for multi-token prediction if
            x is not tokens, or not a whole sequence.

        Without a head, return hidden states in the shape given for x. With a head and labels, return the three sums of
        `FusedLoss`. With a head and no labels, return logits `[batch, seq, vocab]` in the wider of float32 and the
        compute dtype.
        Raises ValueError if the sequence is longer than the model's `seq_len`.
        """
        saved: list[Tensor] = []
        if self.mixes and not self.embeds:
            x, *saved = x.unbind()
        # Under sequence parallelism, the blocks' input is only this process's part of the sequence.
        seq = x.shape[1] if positions is None else positions.shape[1]
        tokens = x
        if self.embeds:
            assert self.embedding is not None
            x = self.embedding(x)
        shared = self.shared_inputs(x, seq, labels, positions, documents)
        here = shared.with_saved(*saved) if saved else shared
        for layer in self.trunk:
            block, before = self.layers[layer], x
            x = block(x, here)
            if self.mixes and block.begins_block:
                here = here.with_saved(before)
        if self.norm is None:
            return torch.stack([x, *here.saved]) if self.mixes else x
        x = self.norm(x if self.mix is None else self.mix(x, here.saved))
        if self.ahead and labels is not None and torch.is_grad_enabled():
            if ahead is None:
                ahead = look_ahead(tokens, labels, documents, len(self.ahead))
            return sums_with_ahead(self, x, labels, ahead, shared)
        return self.output(x, labels, self.loss)

    def output(self, x: Tensor, labels: Tensor | None, loss: Any) -> Tensor:
        """Return `loss(x, head weight, labels)` for hidden states x after the final norm; see `Head.forward`."""
        if self.head is not None:
            return self.head(x, labels, loss)
        assert self.embedding is not None
        return self.embedding.output(x, labels, loss)

    def shared_inputs(
        self,
        x: Tensor,
        seq: int,
        labels: Tensor | None,
        positions: Tensor | None,
        documents: Tensor | None,
    ) -> Shared:
        """Build the inputs shared by all blocks. x: the first block's input. seq: number of tokens visible to attention."""
        if seq > self.seq_len:
            raise ValueError(
                f"a sequence has {seq} tokens, but the model was built for sequences of at most {self.seq_len} tokens"
            )
        chosen = slice(seq) if positions is None else positions
        # Masks use only the shape, dtype and device of x.
        like_x = x.new_empty(()).expand(x.shape[0], seq, x.shape[-1])
        masks: dict[int, AttentionMask] = {}
        for block in self.layers.values():
            attention: Any = block.attention
            if attention.window not in masks:
                cap, sinks = self.config.attention_soft_cap, self.config.attention_sinks
                rule = AttentionMask(attention.window, documents, cap, sinks=sinks)
                masks[attention.window] = attention.attend.prepare(rule, like_x)
        cos, sin = (tables[:, chosen].unsqueeze(-2) for tables in (self.rope_cos, self.rope_sin))
        return Shared(cos, sin, masks, labels)

    @property
    def is_whole(self) -> bool:
        """Return whether this part is the whole model."""
        return self.embeds and self.norm is not None and len(self.trunk) == self.config.n_layers

    @property
    def routers(self) -> dict[int, Router]:
        """Return the routers of this part by global layer index. Empty in a dense model."""
        feed_forwards = {int(layer): block.feed_forward for layer, block in self.layers.items()}
        return {layer: moe.router for layer, moe in feed_forwards.items() if isinstance(moe, MoE)}

    def set_loss_scale(self, scale: Tensor) -> None:
        """Set the scale of the balancing losses for later forwards. scale: a scalar, 1 / (valid tokens of the step)."""
        scales = [router.loss_scale for router in self.routers.values()]
        if scales:
            torch._foreach_copy_(scales, [scale.to(torch.float64)] * len(scales))

    def flops_per_token(self, seq_len: int) -> float:
        """Return this part's FLOPs of forward and backward per token, counted like `forge.model.flops_per_token`."""
        tied = self.embedding is not None and self.norm is not None and self.head is None
        product = 6 * self.config.vocab_size * self.config.dim
        return matrix_flops(self, seq_len) + product * (tied + len(self.ahead))

    def heads(self) -> dict[str, int]:
        """Return the number of heads of each query, key and value projection, by parameter name.

        The rows of these parameters are grouped by head.
        """
        attentions: dict[str, Any] = {layer: block.attention for layer, block in self.layers.items()}
        return {
            f"layers.{layer}.attention.{leaf}.weight": number
            for layer, attention in attentions.items()
            for leaf, number in attention.heads.items()
        }

    def initial_values(self) -> dict[str, float | Normal | Uniform]:
        """Return the initial value of each parameter of this part, by name.

        A parameter present in several parts (a tied weight) has the same initial value in each part.
        """
        return initial_values(self, self.config)

    def reset_buffers(self, dtype: torch.dtype) -> None:
        """Reset every buffer for computing in `dtype`: RoPE tables, in the wider of float32 and `dtype`, and router state."""
        device = self.rope_cos.device
        cos, sin = rope_tables(self.config, self.seq_len)
        # Rounded once from float64, because a float32 table converted to float64 would keep float32's errors.
        self.rope_cos = cos.to(device=device, dtype=promoted(dtype))
        self.rope_sin = sin.to(device=device, dtype=promoted(dtype))
        for router in self.routers.values():
            router.reset_state()


def _feed_forward(config: ModelConfig, layer: int) -> FeedForward | MoE:
    """Build the feed-forward of block `layer` (global index)."""
    if config.has_experts(layer):
        return MoE(config, layer)
    return make_feed_forward(config.dim, config.ffn_dim, activation_of(config), config.ffn_bias)


def attention_for(config: ModelConfig, layer: int) -> Attention | LinearAttention:
    """Build the attention or linear attention of block `layer` (global index). Add new kinds of layers in this function."""
    if config.kind_of(layer) == "linear":
        return LinearAttention(config)
    kind = GroupedAttention if config.latent is None else LatentAttention
    return kind(config, window_of(config, layer), rotation_of(config, layer))


def window_of(config: ModelConfig, layer: int) -> int:
    """Return the sliding window of layer `layer` (global index); 0: the whole context."""
    return config.sliding_window if config.kind_of(layer) == "sliding" else 0


def rotation_of(config: ModelConfig, layer: int) -> int | None:
    """Return the layer's index into the tables of `forge.model.attention.rope_tables`; None: a layer without RoPE."""
    kind = config.kind_of(layer)
    if kind == "nope":
        return None
    return 1 if kind == "sliding" and config.sliding_rope_theta else 0


# A builder takes (config, seq_len, **parts) and returns a module with the methods and attributes of Transformer.
MODELS: dict[str, Callable[..., Any]] = {"transformer": Transformer}


def build_model(config: ModelConfig, seq_len: int, **parts: Any) -> Any:
    """Build the model of `config.kind`, a registered name or `package.module:Class`. parts: arguments of `Transformer`.

    Raises UserError for an unknown model, or if [model.mtp] is set and the model does not support it.
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
    model = builder(config, seq_len, **parts)
    if config.mtp is not None and not hasattr(model, "ahead"):
        raise UserError(
            f'[model.mtp] adds modules after the last block. A model of model.kind = "{kind}" cannot hold them: it lacks the '
            "attribute `ahead` of forge.model.Transformer. Leave out [model.mtp]"
        )
    return model
