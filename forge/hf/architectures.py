"""The classes of transformers that forge can read and write: their config keys and the names of their tensors, as a table.

`ours` is a key of [model] ("dim", "moe.top_k") or a module of forge; `theirs` one of config.json or transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forge.config.model import MLAConfig
from forge.errors import UserError
from forge.hf.fused import QWEN3_NEXT

# Ours -> theirs in every config.json.
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
# The value of a key that config.json lacks; a key that is neither here nor in `Architecture.defaults` is required.
# None: derived from other keys.
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
    "max_window_layers": 28,
    "layer_types": None,
    "hidden_act": "silu",
    "router_aux_loss_coef": 0.001,
    "mlp_only_layers": None,
    "decoder_sparse_step": 1,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
    "moe_layer_end_index": -1,
    "moe_layer_interval": 1,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "rope_local_base_freq": None,
}
# Names of the same key in newer versions of transformers.
ALIASES = {"num_experts": "num_local_experts"}
# Keys that forge has no equivalent of, with the only value that it can compute; null means the default.
MUST_BE: dict[str, Any] = {
    "hidden_act": "silu",
    "mlp_bias": False,
    "attention_bias": False,
    "use_bias": False,
    "quantization_config": None,
    "rope_interleave": True,
}
# Modules, ours -> theirs; those of a layer are below `layers.N` in forge and `model.layers.N` in transformers.
ENDS = {"embedding": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
LAYER = {
    "attention_norm": "input_layernorm",
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "attention.wq_a": "self_attn.q_a_proj",
    "attention.wq_b": "self_attn.q_b_proj",
    "attention.wkv_a": "self_attn.kv_a_proj_with_mqa",
    "attention.kv_norm": "self_attn.kv_a_layernorm",
    "attention.wkv_b": "self_attn.kv_b_proj",
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
    """Ours -> the value that the class implies; config.json has no key for it."""
    keys: Mapping[str, str] = field(default_factory=dict)
    """Ours -> theirs."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    window_keys: tuple[str, ...] = ()
    """The keys that determine which layers have a sliding window."""
    every_other_kind: int = 0
    """n: where layer_types is missing, every n-th layer is full and all others slide."""
    layer: Mapping[str, str] = field(default_factory=dict)
    """Modules of a layer, ours -> theirs."""
    experts: tuple[str, str, str, str] = ("mlp.experts", "gate_proj", "up_proj", "down_proj")
    """The module that holds experts 0, 1, ..., and the projections of each."""
    router_bias: str | None = None
    """The bias on the choice of experts, `[n_experts]`; all zeros where forge's model has none."""
    router_bias_is_2d: bool = False
    """The router bias has shape `[1, n_experts]`."""
    output_bias: bool = False
    """attention_bias adds a bias to the output projection as well; of zeros where forge's model has none."""
    must_be: Mapping[str, Any] = field(default_factory=dict)
    """Added to MUST_BE; written, unless it is false, which is the default."""
    rope_by_kind: bool = False
    """Layers with a sliding window have rotary frequencies of their own, without scaling."""
    shared_experts_always: bool = False
    """A model without shared experts still has their tensors, with no elements."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Theirs -> a value to write because transformers' default means something else."""
    fused: bool = False
    """Queries and gates are one tensor, and so are several projections of a linear layer (forge/hf/fused.py)."""
    partial_rope: bool = False
    """partial_rotary_factor is model.rope_fraction; in other classes it must be 1."""
    ignored: tuple[str, ...] = ()
    """How names of tensors begin that are left out, as transformers does."""
    interleaved_rope: bool = False
    """RoPE rotates neighbouring elements of a head; forge and the other classes rotate elements half a head apart."""

    @property
    def is_latent(self) -> bool:
        """Whether its attention is multi-head latent attention."""
        return self.fixed.get("attention") == "mla"

    @property
    def is_moe(self) -> bool:
        """Whether it is a mixture of experts."""
        return "moe.n_experts" in self.keys

    def default(self, key: str) -> Any:
        """The value of `key` where config.json lacks it. KeyError if the key is required."""
        return self.defaults[key] if key in self.defaults else DEFAULTS[key]


class ConfigJson:
    """The keys of a config.json with the defaults of its architecture, and errors that name the file."""

    def __init__(self, values: dict[str, Any], architecture: Architecture, source: Path | str):
        self.architecture, self.source = architecture, source
        self._values = values

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def __getitem__(self, key: str) -> Any:
        for name in (key, ALIASES.get(key)):
            if name in self._values:
                return self._values[name]
        try:
            return self.architecture.default(key)
        except KeyError:
            raise UserError(f"{self.source}: lacks {key}, which {self.architecture.name} needs") from None

    def error(self, key: str, why: str) -> UserError:
        """A UserError about the value of `key`."""
        return UserError(f"{self.source}: {key} = {self[key]!r}: {why}")


_QWEN_WINDOWS = ("use_sliding_window", "sliding_window", "layer_types", "max_window_layers")
_EXPERTS = {"moe.top_k": "num_experts_per_tok", "moe.expert_dim": "moe_intermediate_size"}
# DeepSeek-V3's routing over grouped-query attention.
_DEEPSEEK_ROUTING = _EXPERTS | {
    "moe.n_experts": "n_routed_experts",
    "moe.n_shared_experts": "n_shared_experts",
    "moe.n_expert_groups": "n_group",
    "moe.n_limited_groups": "topk_group",
    "moe.route_scale": "routed_scaling_factor",
    "moe.normalize_top_k": "norm_topk_prob",
    "moe.n_dense_layers": "first_k_dense_replace",
    "attention_bias": "attention_bias",
}

_OLMO: dict[str, Any] = {
    "fixed": {"norm_position": "post", "qk_norm": True, "qk_norm_over": "projection"},
    "keys": {"attention_bias": "attention_bias"},
    "layer": {"attention_norm": "post_attention_layernorm", "ffn_norm": "post_feedforward_layernorm"},
    "output_bias": True,
}
_GEMMA_KEYS = {
    "attention_bias": "attention_bias",
    "attention_soft_cap": "attn_logit_softcapping",
    "logit_soft_cap": "final_logit_softcapping",
}
_GEMMA_FIXED = {
    "norm_position": "sandwich",
    "zero_centered_norms": True,
    "activation": "gelu_tanh",
    "scale_embeddings": True,
}
_GEMMA_DEFAULTS = {
    "num_key_value_heads": 4,
    "head_dim": 256,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
}
_GEMMA: dict[str, Any] = {
    "keys": _GEMMA_KEYS,
    "window_keys": ("sliding_window", "layer_types"),
    "layer": {
        "attention_post_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "ffn_post_norm": "post_feedforward_layernorm",
    },
    "output_bias": True,
    "must_be": {
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "use_bidirectional_attention": False,
    },
}

# Export takes the first class that can represent the model.
ARCHITECTURES = (
    Architecture("LlamaForCausalLM", "llama"),
    Architecture(
        "MistralForCausalLM", "mistral", defaults={"num_key_value_heads": 8}, window_keys=("sliding_window",)
    ),
    Architecture(
        "Qwen2ForCausalLM",
        "qwen2",
        fixed={"attention_bias": True},
        defaults={"num_key_value_heads": 32},
        window_keys=_QWEN_WINDOWS,
    ),
    Architecture(
        "Qwen3ForCausalLM",
        "qwen3",
        fixed={"qk_norm": True},
        keys={"attention_bias": "attention_bias"},
        defaults={"num_key_value_heads": 32, "head_dim": 128},
        window_keys=_QWEN_WINDOWS,
        output_bias=True,
    ),
    Architecture("Olmo2ForCausalLM", "olmo2", defaults={"rms_norm_eps": 1e-5}, **_OLMO),
    Architecture(
        "Olmo3ForCausalLM",
        "olmo3",
        defaults={"rms_norm_eps": 1e-5, "rope_theta": 500000.0},
        window_keys=("sliding_window", "layer_types"),
        every_other_kind=4,
        rope_by_kind=True,
        **_OLMO,
    ),
    Architecture(
        "Gemma2ForCausalLM",
        "gemma2",
        fixed=_GEMMA_FIXED,
        defaults=_GEMMA_DEFAULTS | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        every_other_kind=2,
        **_GEMMA,
    ),
    Architecture(
        "Gemma3ForCausalLM",
        "gemma3_text",
        fixed=_GEMMA_FIXED | {"qk_norm": True},
        defaults=_GEMMA_DEFAULTS | {"rope_theta": 1e6, "rope_local_base_freq": 1e4},
        every_other_kind=6,
        rope_by_kind=True,
        **_GEMMA,
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
        },
        window_keys=("sliding_window",),
        layer={"feed_forward.router": "block_sparse_moe.gate"},
        experts=("block_sparse_moe.experts", "w1", "w3", "w2"),
    ),
    Architecture(
        "Qwen3MoeForCausalLM",
        "qwen3_moe",
        fixed={"qk_norm": True},
        keys=_EXPERTS
        | {
            "attention_bias": "attention_bias",
            "moe.n_experts": "num_experts",
            "moe.normalize_top_k": "norm_topk_prob",
            "moe.aux_loss_coef": "router_aux_loss_coef",
            "moe.n_dense_layers": "mlp_only_layers",
        },
        defaults={
            "num_key_value_heads": 4,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
        },
        window_keys=("use_sliding_window", "sliding_window"),
        output_bias=True,
    ),
    Architecture("Qwen3NextForCausalLM", "qwen3_next", **QWEN3_NEXT),
    Architecture(
        "Dots1ForCausalLM",
        "dots1",
        fixed={"qk_norm": True, "moe.score_function": "sigmoid"},
        keys=_DEEPSEEK_ROUTING,
        defaults={"num_key_value_heads": 32, "first_k_dense_replace": 0, "max_window_layers": 62},
        window_keys=("sliding_window", "layer_types", "max_window_layers"),
        router_bias="mlp.gate.e_score_correction_bias",
        output_bias=True,
        shared_experts_always=True,
    ),
    Architecture(
        "Glm4MoeForCausalLM",
        "glm4_moe",
        fixed={"moe.score_function": "sigmoid"},
        keys=_DEEPSEEK_ROUTING | {"qk_norm": "use_qk_norm"},
        defaults={
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "partial_rotary_factor": 0.5,
            "n_routed_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 1408,
            "n_shared_experts": 1,
            "norm_topk_prob": True,
            "first_k_dense_replace": 1,
            "use_qk_norm": False,
        },
        extra={"partial_rotary_factor": 1.0, "num_nextn_predict_layers": 0},
        router_bias="mlp.gate.e_score_correction_bias",
        shared_experts_always=True,
    ),
    Architecture(
        "DeepseekV3ForCausalLM",
        "deepseek_v3",
        # The norms of latents have this eps, whatever config.json says.
        fixed={"attention": "mla", "moe.score_function": "sigmoid", "norm_eps": 1e-6},
        keys=_DEEPSEEK_ROUTING | {f"mla.{key}": key for key in MLAConfig.model_fields},
        defaults={
            "num_key_value_heads": 128,
            "n_routed_experts": 256,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 2048,
            "n_shared_experts": 1,
            "norm_topk_prob": True,
            "first_k_dense_replace": 3,
            "routed_scaling_factor": 2.5,
            "n_group": 8,
            "topk_group": 4,
            "q_lora_rank": 1536,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "rope_interleave": True,
        },
        layer={"attention.q_norm": "self_attn.q_a_layernorm"},
        extra={"rope_interleave": True, "num_nextn_predict_layers": 0},
        router_bias="mlp.gate.e_score_correction_bias",
        output_bias=True,
        shared_experts_always=True,
        interleaved_rope=True,
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
            "moe.every": "moe_layer_interval",
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
        },
        extra={"moe_layer_end_index": -1},
        router_bias="mlp.moe_statics.e_score_correction_bias",
        router_bias_is_2d=True,
        interleaved_rope=True,
    ),
)

# Why classes that users ask for are not in the table.
NOT_COVERED = {
    "DeepseekV2ForCausalLM": "of the models with latent attention forge reads DeepseekV3ForCausalLM",
    "GemmaForCausalLM": "forge reads Gemma 2 and Gemma 3",
    "Gemma3ForConditionalGeneration": "it reads images; forge reads Gemma3ForCausalLM, its text model",
    "Qwen2MoeForCausalLM": "forge has no table of its tensors' names",
    "GptOssForCausalLM": "its experts' tensors, interleaved and in MXFP4, are in a layout that forge does not read",
    "Phi3ForCausalLM": "its tensors are fused in a layout that forge does not split",
}
BY_NAME = {architecture.name: architecture for architecture in ARCHITECTURES}


def architecture_of(values: dict[str, Any], source: Path | str) -> Architecture:
    """Return the architecture that a config.json names. Raises UserError (exit 2) if forge does not read it."""
    names = values.get("architectures") or []
    kind = values.get("model_type")
    name = names[0] if names else f'of model_type "{kind}"'
    for architecture in ARCHITECTURES:
        if architecture.name == name or (not names and architecture.model_type == kind):
            return architecture
    why = NOT_COVERED.get(name, f"forge reads {', '.join(sorted(BY_NAME))}")
    raise UserError(f"{source}: the architecture {name} cannot be read: {why}")
