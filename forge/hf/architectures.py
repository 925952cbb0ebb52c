"""The classes of transformers that forge's Transformer can stand for, as a table: their keys, and the names of their tensors.

`ours` is a key of [model] ("dim", "moe.top_k") or a module of forge; `theirs` a key of config.json or a module there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# ours -> theirs in every config.json.
KEYS = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "ffn_dim": "intermediate_size",
    "vocab_size": "vocab_size",
    "norm_eps": "rms_norm_eps",
    "tie_embeddings": "tie_word_embeddings",
    "init_std": "initializer_range",
}
# What a key means where config.json does not have it; what is neither here nor in `Architecture.defaults` must be there.
# None: it follows from other keys.
DEFAULTS: dict[str, Any] = {
    "num_key_value_heads": None,
    "head_dim": None,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "initializer_range": 0.02,
    "attention_bias": False,
    "rope_theta": 10000.0,
    "partial_rotary_factor": 1.0,
    "norm_topk_prob": False,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "layer_types": None,
    "hidden_act": "silu",
}
# The same key under the name that newer versions of transformers write.
ALIASES = {"num_experts": "num_local_experts"}
# Keys that forge has no word for, and the value at which they change nothing.
MUST_BE: dict[str, Any] = {
    "hidden_act": "silu",
    "mlp_bias": False,
    "attention_bias": False,
    "use_bias": False,
    "quantization_config": None,
}
# Modules, ours -> theirs; those of a layer are below `layers.N` here and `model.layers.N` there.
ENDS = {"embedding": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
LAYER = {
    "attention_norm": "input_layernorm",
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w3": "mlp.up_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.router": "mlp.gate",
    "feed_forward.shared.w1": "mlp.shared_experts.gate_proj",
    "feed_forward.shared.w3": "mlp.shared_experts.up_proj",
    "feed_forward.shared.w2": "mlp.shared_experts.down_proj",
}


@dataclass(frozen=True)
class Architecture:
    """One class of transformers, where it differs from the tables above."""

    name: str
    model_type: str
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Ours -> what the class implies, without a word in config.json."""
    keys: Mapping[str, str] = field(default_factory=dict)
    """Ours -> theirs."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    windows: tuple[str, ...] = ()
    """The keys that say which layers have a sliding window."""
    layer: Mapping[str, str] = field(default_factory=dict)
    """Modules of a layer, ours -> theirs."""
    experts: tuple[str, str, str, str] = ("mlp.experts", "gate_proj", "up_proj", "down_proj")
    """The module that holds experts 0, 1, ..., and the projections of each."""
    router_bias: str | None = None
    """Its bias on the choice of experts. Where forge chooses without one it is all zeros."""
    router_bias_axes: int = 1
    """2: it has a leading axis of size 1."""
    bias_of_output: bool = False
    """attention_bias gives the output projection one too, which forge has not: it must be all zeros."""
    shared_experts_always: bool = False
    """It has the tensors of shared experts even where there are none: without elements."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Theirs -> what else is written, so that transformers' default does not hold."""
    interleaved_rope: bool = False
    """RoPE rotates neighbours in a head; forge, like the others, elements half a head apart."""

    @property
    def mixture(self) -> bool:
        """It is a mixture of experts."""
        return "moe.n_experts" in self.keys

    def default(self, key: str) -> Any:
        """What `key` of config.json means when it is absent; KeyError if it has to be there."""
        return self.defaults[key] if key in self.defaults else DEFAULTS[key]


_QWEN_WINDOWS = ("use_sliding_window", "sliding_window", "layer_types", "max_window_layers")
# DeepSeek-V3's routing over grouped-query attention.
_DEEPSEEK_ROUTING = {
    "moe.n_experts": "n_routed_experts",
    "moe.top_k": "num_experts_per_tok",
    "moe.expert_dim": "moe_intermediate_size",
    "moe.n_shared_experts": "n_shared_experts",
    "moe.n_expert_groups": "n_group",
    "moe.n_limited_groups": "topk_group",
    "moe.route_scale": "routed_scaling_factor",
    "moe.normalize_top_k": "norm_topk_prob",
    "moe.n_dense_layers": "first_k_dense_replace",
    "attention_bias": "attention_bias",
}

# Where several can say the same, the first is taken.
ARCHITECTURES = (
    Architecture("LlamaForCausalLM", "llama"),
    Architecture(
        "MistralForCausalLM", "mistral", defaults={"num_key_value_heads": 8}, windows=("sliding_window",)
    ),
    Architecture(
        "Qwen2ForCausalLM",
        "qwen2",
        fixed={"attention_bias": True},
        defaults={"num_key_value_heads": 32, "max_window_layers": 28},
        windows=_QWEN_WINDOWS,
    ),
    Architecture(
        "Qwen3ForCausalLM",
        "qwen3",
        fixed={"qk_norm": True},
        keys={"attention_bias": "attention_bias"},
        defaults={"num_key_value_heads": 32, "head_dim": 128, "max_window_layers": 28},
        windows=_QWEN_WINDOWS,
        bias_of_output=True,
    ),
    Architecture(
        "MixtralForCausalLM",
        "mixtral",
        fixed={"moe.normalize_top_k": True},
        keys={
            "moe.n_experts": "num_local_experts",
            "moe.top_k": "num_experts_per_tok",
            "moe.expert_dim": "intermediate_size",
            "moe.aux_loss_coef": "router_aux_loss_coef",
        },
        defaults={
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "sliding_window": None,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "router_aux_loss_coef": 0.001,
        },
        windows=("sliding_window",),
        layer={"feed_forward.router": "block_sparse_moe.gate"},
        experts=("block_sparse_moe.experts", "w1", "w3", "w2"),
    ),
    Architecture(
        "Qwen3MoeForCausalLM",
        "qwen3_moe",
        fixed={"qk_norm": True},
        keys={
            "attention_bias": "attention_bias",
            "moe.n_experts": "num_experts",
            "moe.top_k": "num_experts_per_tok",
            "moe.expert_dim": "moe_intermediate_size",
            "moe.normalize_top_k": "norm_topk_prob",
            "moe.aux_loss_coef": "router_aux_loss_coef",
            "moe.n_dense_layers": "mlp_only_layers",
        },
        defaults={
            "num_key_value_heads": 4,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "router_aux_loss_coef": 0.001,
            "mlp_only_layers": None,
            "decoder_sparse_step": 1,
        },
        windows=("use_sliding_window", "sliding_window"),
        extra={"decoder_sparse_step": 1},
        bias_of_output=True,
    ),
    Architecture(
        "Dots1ForCausalLM",
        "dots1",
        fixed={"qk_norm": True, "moe.score_function": "sigmoid"},
        keys=_DEEPSEEK_ROUTING,
        defaults={
            "num_key_value_heads": 32,
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 1.0,
            "first_k_dense_replace": 0,
            "max_window_layers": 62,
        },
        windows=("sliding_window", "layer_types", "max_window_layers"),
        router_bias="mlp.gate.e_score_correction_bias",
        bias_of_output=True,
        shared_experts_always=True,
    ),
    Architecture(
        "Glm4MoeForCausalLM",
        "glm4_moe",
        fixed={"moe.score_function": "sigmoid"},
        keys={**_DEEPSEEK_ROUTING, "qk_norm": "use_qk_norm"},
        defaults={
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "partial_rotary_factor": 0.5,
            "n_routed_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 1408,
            "n_shared_experts": 1,
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 1.0,
            "norm_topk_prob": True,
            "first_k_dense_replace": 1,
            "use_qk_norm": False,
        },
        extra={"partial_rotary_factor": 1.0, "num_nextn_predict_layers": 0},
        router_bias="mlp.gate.e_score_correction_bias",
        shared_experts_always=True,
    ),
    Architecture(
        "Ernie4_5_MoeForCausalLM",
        "ernie4_5_moe",
        fixed={"moe.normalize_top_k": True},
        keys={
            "moe.n_experts": "moe_num_experts",
            "moe.top_k": "moe_k",
            "moe.expert_dim": "moe_intermediate_size",
            "moe.n_shared_experts": "moe_num_shared_experts",
            "moe.n_dense_layers": "moe_layer_start_index",
        },
        defaults={
            "num_key_value_heads": 4,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "tie_word_embeddings": True,
            "moe_num_experts": 64,
            "moe_k": 6,
            "moe_intermediate_size": 1536,
            "moe_num_shared_experts": 2,
            "moe_layer_start_index": 1,
            "moe_layer_end_index": -1,
            "moe_layer_interval": 1,
        },
        extra={"moe_layer_end_index": -1, "moe_layer_interval": 1},
        router_bias="mlp.moe_statics.e_score_correction_bias",
        router_bias_axes=2,
        interleaved_rope=True,
    ),
)
BY_NAME = {architecture.name: architecture for architecture in ARCHITECTURES}
BY_TYPE = {architecture.model_type: architecture for architecture in ARCHITECTURES}

# Why classes that people ask for are not in the table.
NOT_COVERED = {
    "DeepseekV2ForCausalLM": "its attention is multi-head latent attention, which forge does not have",
    "DeepseekV3ForCausalLM": "its attention is multi-head latent attention, which forge does not have",
    "GemmaForCausalLM": "it scales embeddings, and its feed-forward is not SwiGLU",
    "Gemma2ForCausalLM": "it has norms after each half of a block, and its feed-forward is not SwiGLU",
    "Gemma3ForCausalLM": "it has norms after each half of a block, and its feed-forward is not SwiGLU",
    "Qwen2MoeForCausalLM": "its shared expert has a gate of its own",
    "GptOssForCausalLM": "its experts have biases and its attention has sinks",
    "Phi3ForCausalLM": "its tensors are fused in ways that are not known here",
}
