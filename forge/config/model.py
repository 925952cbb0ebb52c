"""[model]: the mathematics. Nothing here depends on how the model is distributed."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from forge.config.section import Count, NonNegativeNumber, Positive, PositiveNumber, Section, Text


class RopeScalingConfig(Section):
    """Rotary positions for contexts longer than the model was first trained on; absent: plain RoPE."""

    kind: Literal["llama3", "yarn"]
    """`llama3` rescales low frequencies; `yarn` blends by the number of rotations and scales attention."""
    factor: PositiveNumber
    """How many times longer the context becomes."""
    original_max_position: Positive
    """Context length, in tokens, that the unscaled frequencies were trained on."""
    low_freq_factor: PositiveNumber = 1.0
    """llama3: wavelengths longer than original_max_position / low_freq_factor are scaled in full."""
    high_freq_factor: PositiveNumber = 4.0
    """llama3: wavelengths shorter than original_max_position / high_freq_factor are left alone."""
    beta_fast: PositiveNumber = 32.0
    """yarn: frequencies with more rotations than this over the original context are left alone."""
    beta_slow: PositiveNumber = 1.0
    """yarn: frequencies with fewer rotations than this over the original context are scaled in full."""
    attention_factor: PositiveNumber | None = Field(
        default=None, json_schema_extra={"default": "0.1 ln(factor) + 1"}
    )
    """yarn: factor on the rotary tables, so its square on attention scores."""


class MoEConfig(Section):
    """Mixture of experts: replaces the feed-forward of all but the leading layers; absent: a dense model."""

    n_experts: Positive
    """Routed experts in a layer."""
    top_k: Positive = 2
    """Routed experts that each token visits."""
    n_shared_experts: Count = 0
    """Experts that every token visits, besides the routed ones."""
    n_expert_groups: Positive = 1
    """Groups of consecutive experts, a divisor of n_experts."""
    n_limited_groups: Count = 0
    """Groups among which a token may choose, those with the highest scores. 0: all."""
    expert_dim: Count = 0
    """Hidden size of one expert. 0: model.ffn_dim."""
    score_function: Literal["softmax", "sigmoid"] = "softmax"
    """Turns router logits into scores."""
    normalize_top_k: bool = True
    """Rescale the chosen scores of a token to sum to one; not done with top_k = 1, where all would be one."""
    route_scale: PositiveNumber = 1.0
    """Factor on the weights of routed experts, after normalisation."""
    router_noise: NonNegativeNumber = 0.0
    """Standard deviation of noise on router logits in training. 0: none. With it, splitting sequences changes results."""
    capacity_factor: NonNegativeNumber = 0.0
    """An expert takes at most this many times an even share of a process's microbatch, the choices with the largest
    weights; others are dropped, so layout and microbatch size change results. 0: no limit, nothing is dropped."""
    balance: Literal["bias", "aux_loss", "sequence_aux_loss", "none"] = "bias"
    """How load is evened out: a bias on selection, a loss over the global batch or over each sequence."""
    aux_loss_coef: NonNegativeNumber = 0.01
    """Weight of the balancing loss (aux_loss and sequence_aux_loss)."""
    z_loss_coef: NonNegativeNumber = 0.0
    """Weight of the router's z-loss, the mean squared logsumexp of its logits."""
    bias_update_rate: NonNegativeNumber = 0.001
    """Change of the selection bias in one optimizer step (bias)."""
    n_dense_layers: Count = 0
    """Leading layers that keep a dense feed-forward."""


class ModelConfig(Section):
    """The Transformer: a pre-norm decoder."""

    kind: Text = "transformer"
    """A registered model, or an import path `package.module:Class`."""
    dim: Positive
    """Width of the residual stream."""
    n_layers: Positive
    """Number of blocks."""
    n_heads: Positive
    """Query heads."""
    n_kv_heads: Count = 0
    """Key and value heads, a divisor of n_heads. 0: n_heads."""
    head_dim: Count = 0
    """Size of one head, even. 0: dim / n_heads."""
    ffn_dim: Positive
    """Hidden size of the SwiGLU feed-forward."""
    vocab_size: Positive
    """Rows of the embedding: at least the tokenizer's vocabulary."""
    norm_eps: PositiveNumber = 1e-5
    """Added to the mean square under the root of every RMSNorm."""
    rope_theta: PositiveNumber = 500000.0
    """Base of the rotary frequencies."""
    tie_embeddings: bool = False
    """Use the embedding matrix as the output head."""
    qk_norm: bool = False
    """RMSNorm on queries and keys, per head, before RoPE."""
    attention_bias: bool = False
    """Biases on the query, key and value projections."""
    sliding_window: Count = 0
    """A token sees itself and this many minus one before it. 0: all before it."""
    sliding_window_pattern: Count = 0
    """Every n-th layer sees the whole context in spite of sliding_window. 0: all layers slide."""
    logit_soft_cap: NonNegativeNumber = 0.0
    """Output logits become cap * tanh(logits / cap). 0: off."""
    attention_soft_cap: NonNegativeNumber = 0.0
    """Attention scores become cap * tanh(scores / cap). 0: off."""
    init_std: PositiveNumber = 0.02
    """Standard deviation of initial weights; for wo and w2 it is init_std / sqrt(2 n_layers)."""
    rope_scaling: RopeScalingConfig | None = None
    moe: MoEConfig | None = None

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, values: Any) -> Any:
        """Resolve what follows from other keys. What does not come out even stays 0; checks.py explains."""
        if not isinstance(values, dict):
            return values
        dim, n_heads = values.get("dim"), values.get("n_heads")
        derived: dict[str, Any] = {}
        if type(n_heads) is int and n_heads > 0:
            if _is_zero(values.get("n_kv_heads", 0)):
                derived["n_kv_heads"] = n_heads
            if _is_zero(values.get("head_dim", 0)) and type(dim) is int and dim % n_heads == 0:
                derived["head_dim"] = max(0, dim // n_heads)
        moe, ffn_dim = values.get("moe"), values.get("ffn_dim")
        if isinstance(moe, dict):
            groups = moe.get("n_expert_groups", 1)
            fitting = {"expert_dim": ffn_dim, "n_limited_groups": groups}
            zeros = {key: value for key, value in fitting.items() if _is_zero(moe.get(key, 0))}
            derived["moe"] = moe | {
                key: value for key, value in zeros.items() if type(value) is int and value > 0
            }
        return values | derived


def _is_zero(value: Any) -> bool:
    return type(value) is int and value == 0
