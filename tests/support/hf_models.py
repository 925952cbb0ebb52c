"""Small transformers models with random weights, forge models with the same weights, and the results of both.

Each function imports `transformers` itself, because the import takes seconds.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from forge.checkpoint import read_config
from forge.checkpoint.loading import TensorReader
from forge.config import Config, parse_toml_text
from forge.model import Transformer
from forge.tools.hf.architectures import Architecture
from forge.tools.hf.table import BY_NAME
from forge.tools.hf.tensors import weights_of

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TQDM_DISABLE"] = "1"

VOCAB = 67
# transformers' plain attention and experts, because its kernels stop at float32.
ROUTER_BIAS = ("e_score_correction_bias", "router.bias")
WRITTEN_OUT = {"attn_implementation": "eager", "experts_implementation": "eager"}
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 4.0,
    "beta_slow": 1.0,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
DEEPSEEK = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 16,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "n_group": 1,
    "topk_group": 1,
}
# sqrt(16) is exact in every dtype. transformers computes no gradient for the padding token's embedding.
GEMMA = {"hidden_size": 16, "sliding_window": 5, "pad_token_id": None}
OLMO = {"pad_token_id": None, "eos_token_id": None}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 12,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 6,
    "v_head_dim": 7,
}
# name -> (class, keys of its config.json). Together the cases set every key in the table of architectures.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama2": ("LlamaForCausalLM", {"num_key_value_heads": 4}),
    "llama3": (
        "LlamaForCausalLM",
        {"tie_word_embeddings": True, "rope_theta": 500000.0, "rope_scaling": LLAMA3, "rms_norm_eps": 1e-5},
    ),
    "llama_yarn": (
        "LlamaForCausalLM",
        {"rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 0.5}, "head_dim": 12},
    ),
    "mistral": ("MistralForCausalLM", {"sliding_window": 5}),
    "mistral_full": (
        "MistralForCausalLM",
        {"sliding_window": None, "rope_scaling": {"rope_type": "linear", "factor": 3.0}},
    ),
    "qwen2": ("Qwen2ForCausalLM", {"tie_word_embeddings": True}),
    "qwen2_some_slide": (
        "Qwen2ForCausalLM",
        {
            "use_sliding_window": True,
            "sliding_window": 4,
            "layer_types": ["sliding_attention"] * 2 + ["full_attention"],
        },
    ),
    "qwen3": ("Qwen3ForCausalLM", {"head_dim": 16, "rope_scaling": YARN | {"attention_factor": 1.3}}),
    "qwen3_slides": (
        "Qwen3ForCausalLM",
        {
            "head_dim": 8,
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 6,
            "max_window_layers": 0,
        },
    ),
    "olmo2": ("Olmo2ForCausalLM", OLMO | {"attention_bias": True}),
    "olmo3": (
        "Olmo3ForCausalLM",
        OLMO | {"num_hidden_layers": 4, "sliding_window": 5, "rope_scaling": YARN, "rope_theta": 500000.0},
    ),
    "olmo3_plain": (
        "Olmo3ForCausalLM",
        OLMO | {"sliding_window": 5, "layer_types": ["full_attention", "sliding_attention", "full_attention"]},
    ),
    "gemma2": ("Gemma2ForCausalLM", GEMMA | {"query_pre_attn_scalar": 16, "head_dim": 16}),
    "gemma2_scaled": ("Gemma2ForCausalLM", GEMMA | {"query_pre_attn_scalar": 20, "head_dim": 8}),
    "gemma3": (
        "Gemma3ForCausalLM",
        GEMMA
        | {
            "head_dim": 8,
            "query_pre_attn_scalar": 8,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            "num_hidden_layers": 2,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "gemma3_local": (
        "Gemma3ForCausalLM",
        GEMMA | {"head_dim": 8, "query_pre_attn_scalar": 8, "final_logit_softcapping": 3.0},
    ),
    "mixtral": (
        "MixtralForCausalLM",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 7, "rope_theta": 1e6},
    ),
    "qwen3_moe": ("Qwen3MoeForCausalLM", EXPERTS | {"norm_topk_prob": True, "head_dim": 16}),
    "qwen3_moe_every_second": (
        "Qwen3MoeForCausalLM",
        EXPERTS | {"decoder_sparse_step": 2, "head_dim": 8, "num_hidden_layers": 4, "mlp_only_layers": []},
    ),
    "qwen3_moe_plain": (
        "Qwen3MoeForCausalLM",
        EXPERTS | {"norm_topk_prob": False, "mlp_only_layers": [0], "head_dim": 8, "tie_word_embeddings": True},
    ),
    "qwen3_next": (
        "Qwen3NextForCausalLM",
        EXPERTS
        | {
            "num_hidden_layers": 2,
            "layer_types": ["linear_attention", "full_attention"],
            "rms_norm_eps": 0.1,  # a smaller eps would show mostly rounding in float32, because the states' outputs are tiny
            "head_dim": 16,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 6,
            "linear_conv_kernel_dim": 3,
            "shared_expert_intermediate_size": 32,
        },
    ),
    "gpt_oss": (
        "GptOssForCausalLM",
        {
            "num_hidden_layers": 4,
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "sliding_window": 5,
            "head_dim": 12,
            "rope_theta": 150000.0,
            "rope_scaling": YARN | {"truncate": False},
            "swiglu_limit": 0.5,
        },
    ),
    "gpt_oss_plain": (
        "GptOssForCausalLM",
        {
            "num_hidden_layers": 2,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "layer_types": ["full_attention", "sliding_attention"],
            "sliding_window": 7,
            "head_dim": 8,
            "attention_bias": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
            "router_aux_loss_coef": 0.0,
        },
    ),
    "dots1": ("Dots1ForCausalLM", DEEPSEEK | {"head_dim": 8, "sliding_window": None}),
    "glm4_moe": (
        "Glm4MoeForCausalLM",
        DEEPSEEK
        | {"n_group": 4, "topk_group": 2, "attention_bias": True, "head_dim": 8, "use_qk_norm": True},
    ),
    "glm4_moe_quarter": ("Glm4MoeForCausalLM", DEEPSEEK | {"partial_rotary_factor": 0.25, "head_dim": 16}),
    "glm4_moe_no_shared": (
        "Glm4MoeForCausalLM",
        DEEPSEEK | {"n_shared_experts": 0, "partial_rotary_factor": 1.0, "use_qk_norm": True, "head_dim": 8},
    ),
    "deepseek_v3": (
        "DeepseekV3ForCausalLM",
        DEEPSEEK
        | LATENT
        | {"n_group": 4, "topk_group": 2, "rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}},
    ),
    "deepseek_v3_direct": (
        "DeepseekV3ForCausalLM",
        DEEPSEEK | LATENT | {"q_lora_rank": None, "attention_bias": True, "rope_scaling": YARN | {"mscale_all_dim": 0.7}},
    ),
    "ernie4_5_moe": (
        "Ernie4_5_MoeForCausalLM",
        {
            "moe_num_experts": 4,
            "moe_k": 2,
            "moe_intermediate_size": 16,
            "moe_num_shared_experts": 2,
            "moe_layer_start_index": 1,
            "tie_word_embeddings": False,
        },
    ),
}  # fmt: skip


@contextlib.contextmanager
def float32_means(dtype: torch.dtype) -> Iterator[None]:
    """For float64, replace torch.float32 in transformers by float64, like forge's promote(float32, compute)."""
    import safetensors.torch  # noqa: F401  its import builds a table of dtypes

    with contextlib.ExitStack() as stack:
        if dtype == torch.float64:
            for name in ("float32", "float"):
                stack.enter_context(mock.patch.object(torch, name, torch.float64))
            stack.enter_context(mock.patch.object(Tensor, "float", Tensor.double))
        yield


def their_model(case: str, dtype: torch.dtype = torch.float32, **more: Any) -> Any:
    """Return transformers' model of `case`, with `more` keys and random weights. No weight is a round number."""
    import transformers

    name, keys = CASES[case]
    model_type = BY_NAME[name].model_type
    config = transformers.AutoConfig.for_model(model_type, **SHAPE | keys | more)
    config.architectures = [name]
    model = transformers.AutoModelForCausalLM.from_config(config, **WRITTEN_OUT).to(dtype)
    fill(model)
    return model.eval()


def loaded(folder: Path, allowed: str = "") -> Any:
    """Load `folder` with AutoModelForCausalLM. Assert no missing, unexpected or mismatched tensors.

    allowed: one kind that may occur, e.g. "unexpected_keys".
    """
    import transformers

    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, **WRITTEN_OUT
    )
    kinds = {"missing_keys", "unexpected_keys", "mismatched_keys"} - {allowed}
    assert not any(report[kind] for kind in kinds), report
    return model.eval()


@torch.no_grad()
def fill(model: nn.Module, zeros: tuple[str, ...] = ()) -> None:
    """Fill all parameters with noise, also constants, because ones and zeros would hide a wrong norm, bias or order."""
    generator = torch.Generator().manual_seed(0)
    biases = [pair for pair in model.named_buffers() if pair[0].endswith(ROUTER_BIAS)]
    for name, values in [*model.named_parameters(), *biases]:
        noise = torch.randn(values.shape, generator=generator, dtype=torch.float64)
        if name.endswith(zeros):
            values.zero_()
        elif "norm" in name:
            values.copy_(1.0 + 0.2 * noise)
        elif name.endswith(ROUTER_BIAS):
            values.copy_(0.1 * noise)
        elif name.endswith("router.weight"):
            values.copy_((0.3 * noise).float())  # some transformers classes keep only this precision
        else:
            values.copy_((0.2 if values.ndim == 1 else 0.3) * noise)


def our_config(checkpoint: Path) -> Config:
    return parse_toml_text(read_config(checkpoint))


def our_model(checkpoint: Path, dtype: torch.dtype = torch.float32) -> Transformer:
    """Return forge's model with the weights of a checkpoint, in one process."""
    config = our_config(checkpoint)
    model = Transformer(config.model, config.train.seq_len).to(dtype)
    model.reset_buffers(dtype)
    reader = TensorReader(checkpoint)
    model.load_state_dict({name: reader.read(f"model.{name}") for name in model.state_dict()})
    return model


def tokens(sequences: int = 2, seq: int = 24) -> Tensor:
    return torch.randint(VOCAB, (sequences, seq), generator=torch.Generator().manual_seed(1))


def their_results(model: Any) -> tuple[Tensor, float, dict[str, Tensor]]:
    """Return logits, loss and the gradient of every parameter."""
    text = tokens()
    labels = text.clone()
    labels[0, 3] = -100
    model.zero_grad()
    out = model(input_ids=text, labels=labels)
    out.loss.backward()
    return out.logits.detach(), out.loss.item(), {n: p.grad for n, p in model.named_parameters()}


def our_results(model: Transformer) -> tuple[Tensor, float, dict[str, Tensor]]:
    text = tokens()
    labels = torch.full_like(text, -100)
    labels[:, :-1] = text[:, 1:]
    labels[0, 2] = -100
    model.zero_grad()
    valid = (labels >= 0).sum()
    model.set_loss_scale(torch.tensor(0.0))  # balancing losses are the trainer's, not the model's
    loss = model(text, labels)[0] / valid
    loss.backward()
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    with torch.no_grad():
        return model(text), loss.item(), grads


def as_ours(model: Transformer, architecture: Architecture, theirs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Convert tensors with transformers' module names to forge's parameters."""
    ours = {}
    fused = {"w13": "mlp.experts.gate_up_proj", "w2": "mlp.experts.down_proj"}
    parameters = dict(model.named_parameters())
    for weight in weights_of(model.config, architecture):
        if weight.ours not in parameters:
            continue
        path, _, leaf = weight.ours.rpartition(".")
        if len(weight.theirs) > 1:
            ours[weight.ours] = theirs[f"model.layers.{path.split('.')[1]}.{fused[leaf]}"]
        else:
            (name,) = weight.theirs
            ours[weight.ours] = weight.joined(theirs[name.replace("block_sparse_moe", "mlp")].clone())
    return ours
