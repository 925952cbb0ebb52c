"""The classes of transformers that forge can read and write, and the choice of the class for a config.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from forge.config.model import MLAConfig
from forge.runtime.errors import UserError
from forge.tools.hf.architectures import Architecture
from forge.tools.hf.fused import gpt_oss_places, qwen3_next_places
from forge.tools.hf.kimi import k3_places

_QWEN_WINDOWS = ("use_sliding_window", "sliding_window", "layer_types", "max_window_layers")
_EXPERTS = {"moe.top_k": "num_experts_per_tok", "moe.expert_dim": "moe_intermediate_size"}
# Keys of the routing of DeepSeek-V3, shared by several classes.
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

# The order matters: an export takes the first class that can express the model.
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
        defaults=_GEMMA_DEFAULTS
        | {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "sliding_window_pattern": 6},
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
    Architecture(
        "Qwen3NextForCausalLM",
        "qwen3_next",
        fixed={
            "qk_norm": True,
            "zero_centered_norms": True,
            "attention_gate": "element",
            "moe.shared_expert_gate": True,
            "linear_attention.kind": "gated_delta",
        },
        keys=_EXPERTS
        | {
            "linear_attention.n_key_heads": "linear_num_key_heads",
            "linear_attention.n_value_heads": "linear_num_value_heads",
            "linear_attention.key_head_dim": "linear_key_head_dim",
            "linear_attention.value_head_dim": "linear_value_head_dim",
            "linear_attention.conv_size": "linear_conv_kernel_dim",
            "moe.n_experts": "num_experts",
            "moe.normalize_top_k": "norm_topk_prob",
            "moe.aux_loss_coef": "router_aux_loss_coef",
            "moe.n_dense_layers": "mlp_only_layers",
        },
        defaults={
            "num_key_value_heads": 2,
            "head_dim": 256,
            "partial_rotary_factor": 0.25,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 32,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_conv_kernel_dim": 4,
            "num_experts": 512,
            "num_experts_per_tok": 10,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "norm_topk_prob": True,
        },
        layer={
            "feed_forward.shared_gate": "mlp.shared_expert_gate",
            "feed_forward.shared.w1": "mlp.shared_expert.gate_proj",
            "feed_forward.shared.w3": "mlp.shared_expert.up_proj",
            "feed_forward.shared.w2": "mlp.shared_expert.down_proj",
        },
        places=qwen3_next_places,
        partial_rope=True,
        ignored=("mtp.",),
    ),
    Architecture(
        "GptOssForCausalLM",
        "gpt_oss",
        fixed={
            "attention_sinks": True,
            "activation": "clamped_swiglu",
            "moe.normalize_top_k": True,
            "moe.expert_bias": True,
            "moe.router_bias": True,
        },
        keys={
            "attention_bias": "attention_bias",
            "activation_limit": "swiglu_limit",
            "moe.n_experts": "num_local_experts",
            "moe.top_k": "num_experts_per_tok",
            "moe.expert_dim": "intermediate_size",
            "moe.aux_loss_coef": "router_aux_loss_coef",
        },
        defaults={
            "num_key_value_heads": 8,
            "head_dim": 64,
            "rms_norm_eps": 1e-5,
            "rope_theta": 150000.0,
            "attention_bias": True,
            "sliding_window": 128,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
            "swiglu_limit": 7.0,
        },
        window_keys=("sliding_window", "layer_types"),
        every_other_kind=2,
        output_bias=True,
        must_be={"swiglu_alpha": 1.702},
        default_scaling={
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        places=gpt_oss_places,
    ),
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
        predicts_ahead=True,
        router_bias="mlp.gate.e_score_correction_bias",
        shared_experts_always=True,
        partial_rope=True,
    ),
    Architecture(
        "DeepseekV3ForCausalLM",
        "deepseek_v3",
        # In this class, norms of latents have a fixed eps, not read from config.json.
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
        extra={"rope_interleave": True},
        predicts_ahead=True,
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
        ignored=("model.mtp_",),
    ),
    # The text model of Kimi K3; transformers has no class for it.
    Architecture(
        "KimiK3ForConditionalGeneration",
        "kimi_k3",
        fixed={
            "attention": "mla",
            "attention_gate": "element",
            "residual": "attention",
            "activation": "situ",
            "moe.score_function": "sigmoid",
            "linear_attention.kind": "kimi_delta",
            "linear_attention.full_rank_gate": True,
        },
        keys={
            **{f"mla.{key}": key for key in MLAConfig.model_fields},
            "residual_block_size": "attn_res_block_size",
            "activation_limit": "activation_situ_beta",
            "activation_up_limit": "activation_situ_linear_beta",
            "linear_attention.n_key_heads": "linear_attn_config.num_heads",
            "linear_attention.n_value_heads": "linear_attn_config.num_heads",
            "linear_attention.key_head_dim": "linear_attn_config.head_dim",
            "linear_attention.value_head_dim": "linear_attn_config.head_dim",
            "linear_attention.conv_size": "linear_attn_config.short_conv_kernel_size",
            "moe.n_experts": "num_experts",
            "moe.top_k": "num_experts_per_token",
            "moe.expert_dim": "moe_intermediate_size",
            "moe.latent_dim": "routed_expert_hidden_size",
            "moe.n_shared_experts": "num_shared_experts",
            "moe.n_dense_layers": "first_k_dense_replace",
            "moe.n_expert_groups": "num_expert_group",
            "moe.n_limited_groups": "topk_group",
            "moe.normalize_top_k": "moe_renormalize",
            "moe.route_scale": "routed_scaling_factor",
        },
        defaults={
            "hidden_act": "silu",
            "latent_moe_use_norm": False,
            "mla_use_nope": False,
            "mla_use_output_gate": False,
            "moe_router_activation_func": "sigmoid",
            "moe_layer_freq": 1,
            "num_expert_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 1.0,
            "linear_attn_config.gate_lower_bound": None,
            "linear_attn_config.use_full_rank_gate": False,
        },
        must_be={
            "hidden_act": "situ",
            "latent_moe_use_norm": True,
            "mla_use_nope": True,
            "mla_use_output_gate": True,
            "moe_router_activation_func": "sigmoid",
            "moe_layer_freq": 1,
            "linear_attn_config.use_full_rank_gate": True,
        },
        layer={
            "attention.q_norm": "self_attn.q_a_layernorm",
            "attention.wg": "self_attn.g_proj",
            "attention.wa_down": "self_attn.f_a_proj",
            "attention.wa": "self_attn.f_b_proj",
            "attention.wb": "self_attn.b_proj",
            "attention.out_norm": "self_attn.o_norm",
            "feed_forward.router": "block_sparse_moe.gate",
            "feed_forward.to_latent": "block_sparse_moe.routed_expert_down_proj",
            "feed_forward.latent_norm": "block_sparse_moe.routed_expert_norm",
            "feed_forward.from_latent": "block_sparse_moe.routed_expert_up_proj",
            "feed_forward.shared.w1": "block_sparse_moe.shared_experts.gate_proj",
            "feed_forward.shared.w3": "block_sparse_moe.shared_experts.up_proj",
            "feed_forward.shared.w2": "block_sparse_moe.shared_experts.down_proj",
        },
        experts=("block_sparse_moe.experts", "w1", "w3", "w2"),
        router_bias="block_sparse_moe.gate.e_score_correction_bias",
        places=k3_places,
        numbered_layers=True,
        prefix="language_model.",
        ignored=("vision_tower.", "mm_projector."),
    ),
)

# Requested class -> reason for its absence from the table.
NOT_COVERED = {
    "DeepseekV2ForCausalLM": "forge reads other models with latent attention, e.g. DeepseekV3ForCausalLM",
    "GemmaForCausalLM": "forge reads Gemma 2 and Gemma 3",
    "Gemma3ForConditionalGeneration": "it reads images; forge reads Gemma3ForCausalLM, its text model",
    "KimiLinearForCausalLM": "forge can compute its layers, but has no table of its tensor names",
    "Qwen2MoeForCausalLM": "forge has no table of its tensors' names",
    "Phi3ForCausalLM": "its tensors are fused in a layout that forge does not split",
}
BY_NAME = {architecture.name: architecture for architecture in ARCHITECTURES}


def architecture_of(values: dict[str, Any], source: Path | str) -> Architecture:
    """Return the architecture of the config.json `values`. Raises UserError (exit 2) if forge does not support it."""
    names = values.get("architectures") or []
    kind = values.get("model_type")
    name = names[0] if names else f'of model_type "{kind}"'
    for architecture in ARCHITECTURES:
        if architecture.name == name or (not names and architecture.model_type == kind):
            return architecture
    why = NOT_COVERED.get(name, f"forge reads {', '.join(sorted(BY_NAME))}")
    raise UserError(f"{source}: the architecture {name} cannot be read: {why}")
