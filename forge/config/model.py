"""[model]: the architecture. Nothing here depends on how the model is distributed."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from annotated_types import Ge, Le
from pydantic import Field, model_validator

from forge.config.section import (
    Count,
    ListOf,
    NonNegativeNumber,
    Positive,
    PositiveNumber,
    PositiveShare,
    Section,
    Text,
    Unused,
    unused_if,
    used_if,
)

LayerKind = Literal["full", "sliding", "nope", "linear"]
WITH_YARN, WITH_LLAMA3 = (used_if("model.rope_scaling.kind", kind) for kind in ("yarn", "llama3"))
WITH_MLA, NOT_WITH_MLA = used_if("model.attention", "mla"), unused_if("model.attention", "mla")
# Without a value of their own these two follow from other keys.
KV_HEADS = Unused(NOT_WITH_MLA.reason, lambda c: c.model.latent and c.model.n_kv_heads != c.model.n_heads)
HEAD_DIM = Unused(
    NOT_WITH_MLA.reason, lambda c: c.model.latent and c.model.head_dim * c.model.n_heads != c.model.dim
)
NO_PATTERN = Unused("model.layer_pattern is set", lambda c: bool(c.model.layer_pattern))
KIMI_DELTA = used_if("model.linear_attention.kind", "kimi_delta")
WITH_WINDOW = unused_if("model.sliding_window", 0)
SLIDING = Unused("model.layer_pattern has no sliding layer", lambda c: "sliding" not in c.model.pattern)
BALANCING_LOSS = Unused(
    "model.moe.balance adds no loss", lambda c: c.model.moe.balance in ("bias", "quantile", "none")
)


class RopeScalingConfig(Section):
    """RoPE scaling for contexts longer than the original training context. Absent: plain RoPE."""

    kind: Literal["linear", "llama3", "yarn"]
    """`linear` divides every frequency; `llama3` scales low ones; `yarn` interpolates by the number of rotations and scales
    attention."""
    factor: PositiveNumber
    """How many times longer the new context is."""
    original_max_position: Annotated[Count, unused_if("model.rope_scaling.kind", "linear")] = 0
    """llama3, yarn: original training context in tokens. Required by both."""
    low_freq_factor: Annotated[PositiveNumber, WITH_LLAMA3] = 1.0
    """llama3: wavelengths longer than original_max_position / low_freq_factor are fully scaled."""
    high_freq_factor: Annotated[PositiveNumber, WITH_LLAMA3] = 4.0
    """llama3: wavelengths shorter than original_max_position / high_freq_factor are not scaled."""
    beta_fast: Annotated[PositiveNumber, WITH_YARN] = 32.0
    """yarn: frequencies with more rotations than this over the original context are not scaled."""
    beta_slow: Annotated[PositiveNumber, WITH_YARN] = 1.0
    """yarn: frequencies with fewer rotations than this over the original context are fully scaled."""
    truncate: Annotated[bool, WITH_YARN] = True
    """yarn: round the first and the last index of the partly scaled frequencies outwards, as its authors do. gpt-oss does
    not."""
    attention_factor: Annotated[PositiveNumber | None, WITH_YARN] = Field(
        default=None, json_schema_extra={"default": "0.1 ln(factor) + 1"}
    )
    """yarn: multiplies the rotary tables, and so attention scores by its square."""
    mscale_all_dim: Annotated[NonNegativeNumber, WITH_MLA, WITH_YARN] = 0.0
    """yarn, with model.attention = mla: multiplies scores by (0.1 mscale_all_dim ln(factor) + 1) squared. 0: by 1."""


class MLAConfig(Section):
    """Multi-head latent attention, with model.attention = mla: keys and values are products of one small vector per token."""

    q_lora_rank: Annotated[Count, WITH_MLA] = 1536
    """Size of the latent vector of queries. 0: queries are projected from the input."""
    kv_lora_rank: Annotated[Positive, WITH_MLA] = 512
    """Size of the latent vector of keys and values."""
    qk_nope_head_dim: Annotated[Positive, WITH_MLA] = 128
    """Elements of a head of queries and keys without positions."""
    qk_rope_head_dim: Annotated[Positive, WITH_MLA] = 64
    """Elements rotated by RoPE in each query head, and in the one key part shared by all heads. Must be even."""
    v_head_dim: Annotated[Positive, WITH_MLA] = 128
    """Size of a head of values."""


class MoEConfig(Section):
    """Mixture of experts in place of the feed-forward, except in the first n_dense_layers. Absent: a dense model."""

    n_experts: Positive
    """Routed experts per layer."""
    top_k: Positive = 2
    """Routed experts per token."""
    n_shared_experts: Count = 0
    """Experts that every token uses, in addition to the routed ones."""
    n_expert_groups: Positive = 1
    """Number of groups of consecutive experts. Must divide n_experts."""
    n_limited_groups: Count = 0
    """Each token chooses its experts from this number of groups with the highest scores. 0: all groups."""
    shared_expert_gate: bool = False
    """Multiply the output of the shared experts by the sigmoid of a projection of their input to one number (Qwen)."""
    expert_dim: Count = 0
    """Hidden size of an expert. 0: model.ffn_dim."""
    latent_dim: Count = 0
    """Width of routed experts' inputs and outputs, and of the rows sent by dispatch. A projection and a norm convert each
    token to it and back. 0: model.dim, without projections."""
    score_function: Literal["softmax", "sigmoid"] = "softmax"
    """Function that turns router logits into scores."""
    normalize_top_k: bool = True
    """Normalize the scores of a token's chosen experts to sum to one. Has no effect with top_k = 1."""
    route_scale: PositiveNumber = 1.0
    """Multiplies the weights of routed experts, after normalization."""
    router_noise: NonNegativeNumber = 0.0
    """Standard deviation of noise added to router logits in training. 0: none. With noise, results depend on the layout."""
    capacity_factor: NonNegativeNumber = 0.0
    """Limit on the tokens per expert in training, as a multiple of an equal share of a process's microbatch. Tokens with the
    smallest weights are dropped, so training depends on the microbatch and on how tp and cp divide it. Evaluation drops
    nothing. 0: no limit."""
    balance: Literal["bias", "quantile", "aux_loss", "sequence_aux_loss", "none"] = "bias"
    """How load is balanced: by a bias on expert selection, which moves by a fixed step (bias) or is solved once per step for
    an even load of its tokens (quantile, Kimi K3), by a loss over the global batch or over each sequence, or not."""
    aux_loss_coef: Annotated[NonNegativeNumber, BALANCING_LOSS] = 0.01
    """aux_loss, sequence_aux_loss: weight of the balancing loss."""
    z_loss_coef: NonNegativeNumber = 0.0
    """Weight of the router z-loss: the mean squared logsumexp of the router logits."""
    bias_update_rate: Annotated[NonNegativeNumber, used_if("model.moe.balance", "bias")] = 0.001
    """bias: change of the selection bias per optimizer step."""
    n_dense_layers: Count = 0
    """Number of first layers with a dense feed-forward."""
    every: Positive = 1
    """n: after the first n_dense_layers, only layers n - 1, 2n - 1, ... have experts, and the others are dense. 1: all do."""
    expert_bias: bool = False
    """Add biases to both projections of routed experts."""
    router_bias: bool = False
    """Add a learned bias to the router's logits."""

    @property
    def biased(self) -> bool:
        """Whether a bias is added to the scores when experts are chosen, to balance their load."""
        return self.balance in ("bias", "quantile")


class MTPConfig(Section):
    """Multi-token prediction: modules after the model that predict tokens further ahead, in training. Absent: none."""

    depth: Positive = 1
    """Number of modules; the k-th predicts the token k places after the next one."""
    loss_coef: PositiveNumber = 0.3
    """Weight of their loss, a mean over the modules."""


class LinearAttentionConfig(Section):
    """The linear-attention layers of model.layer_pattern. Absent: there are none."""

    kind: Literal["gated_delta", "kimi_delta"] = "gated_delta"
    """gated_delta: Gated DeltaNet, one decay per head. kimi_delta: Kimi Delta Attention, one decay per key channel, with
    decays and output gates from low-rank projections."""
    n_key_heads: Positive
    """Number of query and key heads."""
    n_value_heads: Count = 0
    """Number of value heads, each with a state. A multiple of n_key_heads. 0: n_key_heads."""
    key_head_dim: Positive
    """Size of a query or key head."""
    value_head_dim: Count = 0
    """Size of a value head. 0: key_head_dim."""
    full_rank_gate: Annotated[bool, KIMI_DELTA] = False
    """kimi_delta: output gates from one projection (Kimi K3) instead of two through value_head_dim features."""
    decay_bound: Annotated[NonNegativeNumber, KIMI_DELTA] = 0.0
    """kimi_delta: the decay factor of a token comes from a sigmoid and is at least exp(-decay_bound); Kimi K3 has 5. 0: it
    comes from a softplus, without a bound."""
    conv_size: Positive = 4
    """Tokens that the convolution of queries, keys and values spans, including the token itself."""
    chunk_size: Positive = 64
    """Tokens that are computed together; changes speed and memory only."""


class ModelConfig(Section):
    """The model: a Transformer decoder."""

    kind: Text = "transformer"
    """A registered model, or an import path `package.module:Class`."""
    dim: Annotated[int, Ge(1), Le(2**18)]
    """Width of the residual stream."""
    n_layers: Annotated[int, Ge(1), Le(10_000)]
    """Number of Transformer blocks."""
    n_heads: Positive
    """Number of query heads."""
    n_kv_heads: Annotated[Count, KV_HEADS] = 0
    """Number of key and value heads. Must divide n_heads. 0: n_heads."""
    head_dim: Annotated[Count, HEAD_DIM] = 0
    """Size of a head. Must be even. 0: dim / n_heads."""
    ffn_dim: Positive
    """Hidden size of the dense feed-forward."""
    vocab_size: Annotated[int, Ge(1), Le(10**8)]
    """Rows of the embedding, at least the size of the tokenizer's vocabulary."""
    norm_position: Literal["pre", "post", "sandwich"] = "pre"
    """RMSNorm on the input of attention and feed-forward (pre), on their output before it is added to the stream (post, as
    OLMo 2), or on both (sandwich, as Gemma 2)."""
    residual: Literal["add", "attention"] = "add"
    """add: each half of a block adds to the stream and reads it. attention: it reads a mix over depth, by softmax, of the
    stream and its values at the beginnings of residual blocks, with a learned query (attention residuals, Kimi K3)."""
    residual_block_size: Annotated[Positive, used_if("model.residual", "attention")] = 12
    """attention residuals: layers in a block, within which they add to the stream."""
    norm_eps: PositiveNumber = 1e-5
    """Added to the mean square in RMSNorm."""
    zero_centered_norms: bool = False
    """Norms multiply by 1 + weight, and their weights begin at 0 (Gemma)."""
    activation: Literal["silu", "gelu_tanh", "relu2", "clamped_swiglu", "situ"] = "silu"
    """The feed-forward, dense and of experts. silu, gelu_tanh (GELU by its tanh formula): w2(f(w1 x) * w3 x); clamped_swiglu
    (gpt-oss): the same with gate and up clamped, f(g) = g sigmoid(1.702 g), and 1 added to up; situ (Kimi K3): the same with
    smooth bounds, f(g) = sigmoid(g) limit tanh(g / limit), and up_limit tanh(up / up_limit) in place of up; relu2:
    w2(relu(w1 x)^2), without w3."""
    activation_limit: Annotated[PositiveNumber, used_if("model.activation", "clamped_swiglu", "situ")] = 7.0
    """clamped_swiglu: gate is at most this, and up within plus and minus this. situ: the bound of the gate; Kimi K3 has 4."""
    activation_up_limit: Annotated[PositiveNumber, used_if("model.activation", "situ")] = 25.0
    """situ: the bound of up."""
    ffn_bias: bool = False
    """Add biases to the projections of the dense feed-forward and of shared experts."""
    rope_theta: PositiveNumber = 500000.0
    """Base of the rotary frequencies."""
    rope_fraction: Annotated[PositiveShare, NOT_WITH_MLA] = 1.0
    """Share of each head's elements that RoPE rotates, the first ones. head_dim times it must be an even number."""
    sliding_rope_theta: Annotated[NonNegativeNumber, WITH_WINDOW, SLIDING] = 0.0
    """Base of the rotary frequencies in layers with a sliding window, which rope_scaling then leaves alone. 0: as in other
    layers."""
    tie_embeddings: bool = False
    """Use the embedding matrix as the output projection."""
    scale_embeddings: bool = False
    """Multiply embeddings by sqrt(dim), rounded to the format they are computed in (Gemma)."""
    qk_norm: Annotated[bool, NOT_WITH_MLA] = False
    """Apply RMSNorm to queries and keys before RoPE."""
    qk_norm_over: Annotated[Literal["head", "projection"], unused_if("model.qk_norm", False)] = "head"
    """qk_norm: over each head by itself with one weight for all, or over all heads of a token together (OLMo 2)."""
    attention: Literal["gqa", "mla"] = "gqa"
    """gqa: grouped-query attention, n_kv_heads heads of keys and values. mla: multi-head latent attention, [model.mla]."""
    attention_gate: Literal["none", "head", "element"] = "none"
    """Multiply attention's output by the sigmoid of a projection of its input. head: one number per head; element: one per
    element of a head."""
    attention_sinks: bool = False
    """Add a learned logit per head to the softmax, so that a token may attend to nothing."""
    attention_bias: bool = False
    """Add biases to the query, key and value projections."""
    attention_output_bias: bool = False
    """Add a bias to the output projection of attention."""
    sliding_window: Annotated[Count, SLIDING] = 0
    """Number of tokens that a token attends to, including itself. 0: all previous tokens."""
    layer_pattern: ListOf[LayerKind] = ()
    """Kinds of layers, repeated over the depth: full (attends to the whole context), sliding (to the last sliding_window
    tokens), nope (to the whole context, without positions), linear (see [model.linear_attention]). []: all layers slide, or
    all are full if sliding_window is 0."""
    sliding_window_pattern: Annotated[Count, NO_PATTERN, WITH_WINDOW] = 0
    """With sliding_window and without layer_pattern: every n-th layer attends to the whole context. 0: no layer does."""
    logit_soft_cap: NonNegativeNumber = 0.0
    """Output logits become cap * tanh(logits / cap). 0: off."""
    attention_scale_dim: NonNegativeNumber = 0.0
    """Attention scores are divided by the root of this number. 0: the size of a head (Gemma's 27B models have others)."""
    attention_soft_cap: NonNegativeNumber = 0.0
    """Attention scores become cap * tanh(scores / cap). 0: off."""
    init_std: PositiveNumber = 0.02
    """Standard deviation of initial weights. For wo and w2 it is init_std / sqrt(2 n_layers)."""
    rope_scaling: RopeScalingConfig | None = None
    linear_attention: LinearAttentionConfig | None = None
    mla: MLAConfig | None = None
    moe: MoEConfig | None = None
    mtp: MTPConfig | None = None

    @property
    def embedding_at_both_ends(self) -> bool:
        """Whether the pipeline stage with the head needs the embedding, too."""
        return self.tie_embeddings or self.mtp is not None

    @property
    def rope_dim(self) -> int:
        """How many elements of each head RoPE rotates."""
        mla = self.latent
        return round(self.head_dim * self.rope_fraction) if mla is None else mla.qk_rope_head_dim

    @property
    def latent(self) -> MLAConfig | None:
        """[model.mla], if attention is multi-head latent attention."""
        return self.mla if self.attention == "mla" else None

    @property
    def pattern(self) -> tuple[LayerKind, ...]:
        """The repeating sequence of layer kinds, from whichever keys define it."""
        if self.layer_pattern:
            return self.layer_pattern
        if not self.sliding_window:
            return ("full",)
        sliding: tuple[LayerKind, ...] = ("sliding",)
        every = self.sliding_window_pattern
        return (*sliding * (every - 1), "full") if every else sliding

    @property
    def mtp_depth(self) -> int:
        """Return the number of multi-token prediction modules."""
        return 0 if self.mtp is None else self.mtp.depth

    def streams_into(self, layer: int) -> int:
        """Return the number of tensors that enter the layer: the stream, and earlier saved ones. layer: its global index."""
        saved = -(-layer // self.residual_block_size) if self.residual == "attention" else 0
        return 1 + saved

    def has_experts(self, layer: int) -> bool:
        """Return whether the layer with this global index has a mixture of experts."""
        moe = self.moe
        return moe is not None and layer >= moe.n_dense_layers and (layer + 1) % moe.every == 0

    def kind_of(self, layer: int) -> LayerKind:
        """Return the kind of the layer with this global index."""
        return self.pattern[layer % len(self.pattern)]

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, values: Any) -> Any:
        """Fill in values that follow from other keys.

        A value that would not be an integer stays 0, and checks.py reports it.
        """
        if not isinstance(values, dict):
            return values
        dim, n_heads = values.get("dim"), values.get("n_heads")
        derived: dict[str, Any] = {}
        if type(n_heads) is int and n_heads > 0:
            if _is_zero(values.get("n_kv_heads", 0)):
                derived["n_kv_heads"] = n_heads
            if _is_zero(values.get("head_dim", 0)) and type(dim) is int and dim % n_heads == 0:
                derived["head_dim"] = max(0, dim // n_heads)
        if values.get("attention") == "mla" and values.get("mla") is None:
            derived["mla"] = {}
        moe, ffn_dim = values.get("moe"), values.get("ffn_dim")
        if isinstance(moe, dict):
            groups = moe.get("n_expert_groups", 1)
            fitting = {"expert_dim": ffn_dim, "n_limited_groups": groups}
            zeros = {key: value for key, value in fitting.items() if _is_zero(moe.get(key, 0))}
            derived["moe"] = moe | {
                key: value for key, value in zeros.items() if type(value) is int and value > 0
            }
        linear = values.get("linear_attention")
        if isinstance(linear, dict):
            same = {
                "n_value_heads": linear.get("n_key_heads"),
                "value_head_dim": linear.get("key_head_dim"),
            }
            derived["linear_attention"] = linear | {
                key: value
                for key, value in same.items()
                if _is_zero(linear.get(key, 0)) and type(value) is int
            }
        return values | derived


def _is_zero(value: Any) -> bool:
    return type(value) is int and value == 0
