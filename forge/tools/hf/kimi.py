"""config.json and tensors of Kimi K3, for which transformers has no class.

Names and shapes follow three sources: copies of config.json of moonshotai/Kimi-K3 (f831ab66), a checkpoint generator
written for vLLM, and a test of lightllm. They were not compared with the weight index of the published checkpoint. The text
model is below `text_config` in config.json, and its tensors begin with `language_model.`. The published experts are packed
in MXFP4 by compressed-tensors (`weight_packed`, `weight_scale`). forge refuses packed experts and reads folders in bfloat16.
"""

from __future__ import annotations

from typing import Any

from forge.config.model import ModelConfig
from forge.tools.hf.fused import HFPlace, Rows

_TEXT, _LINEAR = "text_config", "linear_attn_config"
# Keys beside text_config. All other keys belong to the text model.
_OUTSIDE = ("architectures", "model_type", "torch_dtype", "bos_token_id", "eos_token_id", "pad_token_id")
# Mixes of attention residuals, ours -> theirs. Each has a norm and a projection to one number.
LAYER_MIXES = {"attention_mix": "self_attention_res", "ffn_mix": "mlp_res"}
LAST_MIX = "output_attn_res"


def unnested(values: dict[str, Any]) -> dict[str, Any]:
    """Flatten the config.json `values`.

    Keys of text_config move to the top level. Keys of linear_attn_config become `linear_attn_config.KEY`.
    """
    text = values.get(_TEXT)
    inner = {
        key: value for key, value in (text if isinstance(text, dict) else {}).items() if key not in _OUTSIDE
    }
    linear = inner.pop(_LINEAR, None)
    found = {key: value for key, value in values.items() if key not in (_TEXT, "vision_config")} | inner
    return found | {f"{_LINEAR}.{key}": value for key, value in (linear or {}).items()}


def nested(values: dict[str, Any]) -> dict[str, Any]:
    """Return the nested config.json for the flat keys `values`: the inverse of `unnested`."""
    outside = {key: value for key, value in values.items() if key in _OUTSIDE}
    linear = {key.partition(".")[2]: value for key, value in values.items() if key.startswith(f"{_LINEAR}.")}
    text = {key: value for key, value in values.items() if key not in outside and "." not in key}
    text |= {"architectures": ["KimiLinearForCausalLM"], "model_type": "kimi_linear", _LINEAR: linear}
    return outside | {_TEXT: text}


def write_linear(model: ModelConfig) -> dict[str, Any]:
    """Return the keys of linear_attn_config: linear-attention layers, full-attention layers and gate_lower_bound.

    Layers are numbered from 1. gate_lower_bound is -decay_bound; None if decays have no bound.
    """
    kinds = [model.kind_of(layer) for layer in range(model.n_layers)]
    bound = model.linear_attention.decay_bound if model.linear_attention else 0.0
    return {
        f"{_LINEAR}.kda_layers": [n for n, kind in enumerate(kinds, 1) if kind == "linear"],
        f"{_LINEAR}.full_attn_layers": [n for n, kind in enumerate(kinds, 1) if kind != "linear"],
        f"{_LINEAR}.gate_lower_bound": -bound if bound else None,
    }


def k3_places(model: ModelConfig, layer: int) -> dict[str, HFPlace]:
    """Return a dict from the name of forge's tensor (below `layers.N`) to the tensor's place in Kimi K3, for one layer.

    Tensors with the usual name and layout of transformers are left out. Empty for a layer without linear attention.
    """
    linear = model.linear_attention
    if model.kind_of(layer) != "linear" or linear is None:
        return {}
    keys, values = linear.n_key_heads * linear.key_head_dim, linear.n_value_heads * linear.value_head_dim
    # A_log is padded with zeros to the size of a head.
    heads = max(linear.n_value_heads, linear.key_head_dim)
    a_log = HFPlace("self_attn.A_log", (heads,), Rows(1, 0, linear.n_value_heads))
    convolutions = {
        f"attention.conv.{name}": HFPlace(f"self_attn.{name}_conv1d.weight", (size, 1, linear.conv_size))
        for name, size in (("q", keys), ("k", keys), ("v", values))
    }
    channels = linear.n_value_heads * linear.key_head_dim
    dt_bias = HFPlace("self_attn.dt_bias", (channels,))
    return convolutions | {"attention.decay.a_log": a_log, "attention.decay.dt_bias": dt_bias}
