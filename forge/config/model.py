"""[model]: the architecture. No key in this section depends on the distribution over ranks."""

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
# If not set, n_kv_heads and head_dim are derived from other keys.
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
    """`linear` divides all frequencies by the factor. `llama3` scales low frequencies. `yarn` scales each frequency by
    its number of rotations over the original context, and also scales attention scores."""
    factor: PositiveNumber
    """Length of the new context divided by the original training context."""
    original_max_position: Annotated[Count, unused_if("model.rope_scaling.kind", "linear")] = 0
    """llama3, yarn: original training context in tokens. Required for these kinds."""
    low_freq_factor: Annotated[PositiveNumber, WITH_LLAMA3] = 1.0
    """llama3: wavelengths longer than original_max_position / low_freq_factor are fully scaled."""
    high_freq_factor: Annotated[PositiveNumber, WITH_LLAMA3] = 4.0
    """llama3: wavelengths shorter than original_max_position / high_freq_factor are not scaled."""
    beta_fast: Annotated[PositiveNumber, WITH_YARN] = 32.0
    """yarn: frequencies with more rotations than this over the original context are not scaled."""
    beta_slow: Annotated[PositiveNumber, WITH_YARN] = 1.0
    """yarn: frequencies with fewer rotations than this over the original context are fully scaled."""
    truncate: Annotated[bool, WITH_YARN] = True
    """yarn: round the range of partly scaled frequencies outwards to whole indices, as in the YaRN paper. gpt-oss does
    not round."""
    attention_factor: Annotated[PositiveNumber | None, WITH_YARN] = Field(
        default=None, json_schema_extra={"default": "0.1 ln(factor) + 1"}
    )
    """yarn: multiplies the rotary tables, so attention scores are multiplied by the square of this factor."""
    mscale_all_dim: Annotated[NonNegativeNumber, WITH_MLA, WITH_YARN] = 0.0
    """yarn, with model.attention = mla: attention scores are multiplied by (0.1 mscale_all_dim ln(factor) + 1)^2. 0: off."""


class MLAConfig(Section):
    """Multi-head latent attention (model.attention = mla): keys and values are projected from one small latent per token."""

    q_lora_rank: Annotated[Count, WITH_MLA] = 1536
    """Size of the latent for queries. 0: queries are projected directly from the input."""
    kv_lora_rank: Annotated[Positive, WITH_MLA] = 512
    """Size of the latent for keys and values."""
    qk_nope_head_dim: Annotated[Positive, WITH_MLA] = 128
    """Number of elements without RoPE in each query and key head."""
    qk_rope_head_dim: Annotated[Positive, WITH_MLA] = 64
    """Number of elements with RoPE in each query head, and in the key part shared by all heads. Must be even."""
    v_head_dim: Annotated[Positive, WITH_MLA] = 128
    """Size of a value head."""


class MoEConfig(Section):
    """Mixture of experts in place of the feed-forward, except in the first n_dense_layers layers. Absent: a dense model."""

    n_experts: Positive
    """Routed experts per layer."""
    top_k: Positive = 2
    """Routed experts per token."""
    n_shared_experts: Count = 0
    """Shared experts, used by every token in addition to its routed experts."""
    n_expert_groups: Positive = 1
    """Number of groups into which consecutive experts are divided. Must divide n_experts."""
    n_limited_groups: Count = 0
    """Each token chooses its experts only from this number of groups: those with the highest scores. 0: from all groups."""
    shared_expert_gate: bool = False
    """Multiply the output of the shared experts by a gate: the sigmoid of a projection of their input to one number
    (Qwen)."""
    expert_dim: Count = 0
    """Hidden size of an expert. 0: model.ffn_dim."""
    latent_dim: Count = 0
    """Width of the inputs and outputs of routed experts, also when sent between ranks. A projection and a norm map each
    token to this width, and another projection maps it back. 0: model.dim, without projections."""
    score_function: Literal["softmax", "sigmoid"] = "softmax"
    """Function from router logits to scores."""
    normalize_top_k: bool = True
    """Normalize the scores of a token's chosen experts to a sum of 1. No effect with top_k = 1."""
    route_scale: PositiveNumber = 1.0
    """Factor on the routing weights of a token's experts, applied after normalization."""
    router_noise: NonNegativeNumber = 0.0
    """Standard deviation of the noise added to router logits in training. With noise, results depend on the layout. 0:
    no noise."""
    capacity_factor: NonNegativeNumber = 0.0
    """Limit on the tokens per expert in training, as a multiple of the mean number of tokens per expert in a process's
    microbatch. Tokens with the smallest routing weights are dropped, so results depend on micro_batch_size, tp and cp.
    Evaluation drops no tokens. 0: no limit."""
    balance: Literal["bias", "quantile", "aux_loss", "sequence_aux_loss", "none"] = "bias"
    """How expert load is balanced. bias: each expert's selection bias changes by a fixed amount in each step. quantile
    (Kimi K3): each step computes the selection biases that would have given an even load. aux_loss: a loss over the
    global batch. sequence_aux_loss: a loss over each sequence. none: no balancing."""
    aux_loss_coef: Annotated[NonNegativeNumber, BALANCING_LOSS] = 0.01
    """aux_loss, sequence_aux_loss: weight of the balancing loss."""
    z_loss_coef: NonNegativeNumber = 0.0
    """Weight of the router z-loss: the mean squared logsumexp of the router logits."""
    bias_update_rate: Annotated[NonNegativeNumber, used_if("model.moe.balance", "bias")] = 0.001
    """bias: change of the selection bias in each optimizer step."""
    n_dense_layers: Count = 0
    """The first n_dense_layers layers have a dense feed-forward."""
    every: Positive = 1
    """Layer i, counted from 0 over the whole model, has experts if i + 1 is a multiple of this number and i is at least
    n_dense_layers. All other layers are dense."""
    expert_bias: bool = False
    """Add biases to both projections of routed experts."""
    router_bias: bool = False
    """Add a learned bias to the router's logits."""

    @property
    def biased(self) -> bool:
        """Return whether expert selection adds a bias to the scores, for load balancing."""
        return self.balance in ("bias", "quantile")


class MTPConfig(Section):
    """Multi-token prediction: extra modules that predict tokens further ahead, only in training. Absent: none."""

    depth: Positive = 1
    """Number of modules. Module k = 1, 2, ... predicts the token k places after the next token."""
    loss_coef: PositiveNumber = 0.3
    """Weight of the multi-token prediction loss, a mean over the modules."""


class LinearAttentionConfig(Section):
    """The linear-attention layers of model.layer_pattern. Absent: no such layers."""

    kind: Literal["gated_delta", "kimi_delta"] = "gated_delta"
    """gated_delta: Gated DeltaNet, with one decay per head. kimi_delta: Kimi Delta Attention, with one decay per key
    channel, and low-rank projections for decays and output gates."""
    n_key_heads: Positive
    """Number of query and key heads."""
    n_value_heads: Count = 0
    """Number of value heads, each with a recurrent state. Must be a multiple of n_key_heads. 0: n_key_heads."""
    key_head_dim: Positive
    """Size of a query or key head."""
    value_head_dim: Count = 0
    """Size of a value head. 0: key_head_dim."""
    full_rank_gate: Annotated[bool, KIMI_DELTA] = False
    """kimi_delta: compute output gates by one full-rank projection (Kimi K3), not by a low-rank pair through
    value_head_dim features."""
    decay_bound: Annotated[NonNegativeNumber, KIMI_DELTA] = 0.0
    """kimi_delta: with a value above 0, compute a token's decay factor by a sigmoid, with the lower bound
    exp(-decay_bound). Kimi K3 uses 5. 0: compute it by a softplus, without a bound."""
    conv_size: Positive = 4
    """Width in tokens of the convolution of queries, keys and values, including the token itself."""
    chunk_size: Positive = 64
    """Number of tokens computed together. Changes only speed and memory."""


class ModelConfig(Section):
    """The model: a Transformer decoder."""

    kind: Text = "transformer"
    """Name of a registered model, or an import path `package.module:Class`."""
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
    """Number of rows of the embedding; at least the size of the tokenizer's vocabulary."""
    norm_position: Literal["pre", "post", "sandwich"] = "pre"
    """Position of RMSNorm. pre: on the inputs of attention and feed-forward. post (OLMo 2): on their outputs, before
    these are added to the residual stream. sandwich (Gemma 2): on both."""
    residual: Literal["add", "attention"] = "add"
    """Input of attention and feed-forward. add: the residual stream. attention (attention residuals, Kimi K3): a
    softmax-weighted mean of the embeddings, the final streams of earlier residual blocks and the current stream, with
    scores from a learned query."""
    residual_block_size: Annotated[Positive, used_if("model.residual", "attention")] = 12
    """attention: number of layers in a residual block. Each block begins a new residual stream."""
    norm_eps: PositiveNumber = 1e-5
    """Epsilon of RMSNorm, added to the mean square."""
    zero_centered_norms: bool = False
    """Norms multiply by 1 + weight, with weights initialised to 0 (Gemma)."""
    activation: Literal["silu", "gelu_tanh", "relu2", "clamped_swiglu", "situ"] = "silu"
    """Formula of the dense feed-forward and of experts, with gate g = w1 x and up u = w3 x. silu, gelu_tanh (GELU by
    its tanh formula): w2(f(g) * u). clamped_swiglu (gpt-oss): w2(f(g) * (u + 1)) with clamped g and u, and f(g) = g
    sigmoid(1.702 g). situ (Kimi K3): w2(f(g) * h(u)) with the smooth bounds f(g) = sigmoid(g) limit tanh(g / limit) and
    h(u) = up_limit tanh(u / up_limit). relu2: w2(relu(g)^2), without w3."""
    activation_limit: Annotated[PositiveNumber, used_if("model.activation", "clamped_swiglu", "situ")] = 7.0
    """clamped_swiglu: upper limit of the gate, and limit of the absolute value of up. situ: bound of the gate; 4 in
    Kimi K3."""
    activation_up_limit: Annotated[PositiveNumber, used_if("model.activation", "situ")] = 25.0
    """situ: bound of up."""
    ffn_bias: bool = False
    """Add biases to the projections of the dense feed-forward and of shared experts."""
    rope_theta: PositiveNumber = 500000.0
    """Base of the RoPE frequencies."""
    rope_fraction: Annotated[PositiveShare, NOT_WITH_MLA] = 1.0
    """Fraction of each head's elements rotated by RoPE, beginning with the first element. head_dim * rope_fraction must
    be even."""
    sliding_rope_theta: Annotated[NonNegativeNumber, WITH_WINDOW, SLIDING] = 0.0
    """Base of the RoPE frequencies in layers with a sliding window; rope_scaling then does not apply to them. 0: same
    as in other layers."""
    tie_embeddings: bool = False
    """Use the embedding matrix as the output head."""
    scale_embeddings: bool = False
    """Multiply embeddings by sqrt(dim), rounded to their compute format (Gemma)."""
    qk_norm: Annotated[bool, NOT_WITH_MLA] = False
    """Apply RMSNorm to queries and keys before RoPE."""
    qk_norm_over: Annotated[Literal["head", "projection"], unused_if("model.qk_norm", False)] = "head"
    """Extent of qk_norm. head: normalise each head separately, with one weight shared by all heads. projection:
    normalise all heads of a token together (OLMo 2)."""
    attention: Literal["gqa", "mla"] = "gqa"
    """gqa: grouped-query attention with n_kv_heads key/value heads. mla: multi-head latent attention, see [model.mla]."""
    attention_gate: Literal["none", "head", "element"] = "none"
    """Multiply attention's output by a gate: the sigmoid of a projection of attention's input. head: one number per
    head. element: one number per element of a head. none: no gate."""
    attention_sinks: bool = False
    """Add a learned logit per head to the softmax (attention sink), so a token may attend to nothing."""
    attention_bias: bool = False
    """Add biases to the query, key and value projections."""
    attention_output_bias: bool = False
    """Add a bias to the output projection of attention."""
    sliding_window: Annotated[Count, SLIDING] = 0
    """Number of tokens visible to a token, including itself. 0: all previous tokens."""
    layer_pattern: ListOf[LayerKind] = ()
    """Kinds of layers, repeated over the depth. full: attention to the whole context. sliding: attention to the last
    sliding_window tokens. nope: attention to the whole context, without RoPE. linear: linear attention, see
    [model.linear_attention]. []: all layers are sliding, or full if sliding_window is 0."""
    sliding_window_pattern: Annotated[int, Ge(0), Le(10_000), NO_PATTERN, WITH_WINDOW] = 0
    """With sliding_window and without layer_pattern: every n-th layer is full. 0: all layers are sliding."""
    logit_soft_cap: NonNegativeNumber = 0.0
    """Output logits become cap * tanh(logits / cap). 0: off."""
    attention_scale_dim: NonNegativeNumber = 0.0
    """Attention scores are divided by the square root of this number. 0: the size of a head. Gemma's 27B models use
    another number."""
    attention_soft_cap: NonNegativeNumber = 0.0
    """Attention scores become cap * tanh(scores / cap). 0: off."""
    init_std: PositiveNumber = 0.02
    """Standard deviation of initial weights; init_std / sqrt(2 n_layers) for wo and w2."""
    rope_scaling: RopeScalingConfig | None = None
    linear_attention: LinearAttentionConfig | None = None
    mla: MLAConfig | None = None
    moe: MoEConfig | None = None
    mtp: MTPConfig | None = None

    @property
    def embedding_at_both_ends(self) -> bool:
        """Return whether the pipeline stage with the head also needs the embedding."""
        return self.tie_embeddings or self.mtp is not None

    @property
    def rope_dim(self) -> int:
        """Return the number of elements of each head rotated by RoPE."""
        mla = self.latent
        return round(self.head_dim * self.rope_fraction) if mla is None else mla.qk_rope_head_dim

    @property
    def latent(self) -> MLAConfig | None:
        """Return [model.mla] for multi-head latent attention, otherwise None."""
        return self.mla if self.attention == "mla" else None

    @property
    def pattern(self) -> tuple[LayerKind, ...]:
        """Return the repeating sequence of layer kinds, from layer_pattern or from the sliding-window keys."""
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
        """Return the number of tensors entering layer `layer` (global index).

        These are the residual stream and, with attention residuals, the streams saved by earlier layers.
        """
        saved = -(-layer // self.residual_block_size) if self.residual == "attention" else 0
        return 1 + saved

    def has_experts(self, layer: int) -> bool:
        """Return whether layer `layer` (global index) has a mixture of experts."""
        moe = self.moe
        return moe is not None and layer >= moe.n_dense_layers and (layer + 1) % moe.every == 0

    def kind_of(self, layer: int) -> LayerKind:
        """Return the kind of layer `layer` (global index)."""
        return self.pattern[layer % len(self.pattern)]

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, values: Any) -> Any:
        """Fill in values derived from other keys.

        A derived value that would not be an integer stays 0; checks.py then reports the key.
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
