"""`Architecture`: config keys and tensor names of one model class of transformers. table.py lists the classes.

In tables, the prefix "ours" marks forge's names: keys of [model] ("dim", "moe.top_k") and module names. "theirs" marks
transformers' names: keys of config.json and module names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forge.config.model import ModelConfig
from forge.runtime.errors import UserError
from forge.tools.hf.fused import HFPlace

# Keys, ours -> theirs, of every class.
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
# Values of keys missing in config.json, for every class; None: derived from other keys. Keys without a default, in this
# table or in `Architecture.defaults`, are required.
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
# Key -> its name in newer versions of transformers.
ALIASES = {"num_experts": "num_local_experts"}
# Keys without an equivalent in forge -> the only supported value. null in config.json counts as this value.
MUST_BE: dict[str, Any] = {
    "hidden_act": "silu",
    "mlp_bias": False,
    "attention_bias": False,
    "use_bias": False,
    "quantization_config": None,
    "rope_interleave": True,
}
# Modules, ours -> theirs. In LAYER, names are relative to `layers.N` in forge and `model.layers.N` in transformers.
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
    "embedding_norm": "enorm",
    "hidden_norm": "hnorm",
    "projection": "eh_proj",
    "output_norm": "shared_head.norm",
}


@dataclass(frozen=True)
class Architecture:
    """One model class of transformers. The fields override or extend the tables of this file."""

    name: str
    model_type: str
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Our key -> value implied by the class."""
    keys: Mapping[str, str] = field(default_factory=dict)
    """Keys, ours -> theirs, in addition to KEYS."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Their key -> value if config.json lacks the key. Takes precedence over DEFAULTS."""
    window_keys: tuple[str, ...] = ()
    """Their keys for the choice of sliding-window layers."""
    every_other_kind: int = 0
    """n > 0: if config.json has no layer_types, every n-th layer has full attention, the others a sliding window."""
    layer: Mapping[str, str] = field(default_factory=dict)
    """Modules of a layer, ours -> theirs, in addition to LAYER."""
    experts: tuple[str, str, str, str] = ("mlp.experts", "gate_proj", "up_proj", "down_proj")
    """The module with experts 0, 1, ..., then the gate, up and down projections of an expert."""
    router_bias: str | None = None
    """The tensor with the bias on the choice of experts, `[n_experts]`. Exported as zeros if forge's model has no bias."""
    router_bias_is_2d: bool = False
    """The router bias has shape `[1, n_experts]`."""
    output_bias: bool = False
    """With attention_bias, the output projection has a bias, too. Exported as zeros if forge's model has none."""
    must_be: Mapping[str, Any] = field(default_factory=dict)
    """Their key -> the only supported value, in addition to MUST_BE. Exports leave out a value of False, the default."""
    default_scaling: Mapping[str, Any] | None = None
    """rope_scaling if config.json has none."""
    rope_by_kind: bool = False
    """Sliding-window layers have their own rotary frequencies, without scaling."""
    shared_experts_always: bool = False
    """A model without shared experts still has tensors for them, with a dim of size 0."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Their key -> value written by exports, because transformers' default has another meaning."""
    places: Callable[[ModelConfig, int], dict[str, HFPlace]] | None = None
    """Returns the places of a layer's tensors whose layout differs from that of other classes (forge/tools/hf/fused.py)."""
    predicts_ahead: bool = False
    """The class has the modules of [model.mtp], stored as extra layers after the last layer."""
    partial_rope: bool = False
    """partial_rotary_factor is model.rope_fraction. In other classes the factor must be 1."""
    ignored: tuple[str, ...] = ()
    """Prefixes of tensor names ignored by an import, as by transformers."""
    numbered_layers: bool = False
    """config.json lists the numbers of linear-attention layers and of full-attention layers, which have no RoPE (kimi.py)."""
    prefix: str = ""
    """Prefix of all tensor names. A class with a prefix has a nested config.json (forge/tools/hf/kimi.py)."""
    interleaved_rope: bool = False
    """RoPE pairs neighbouring elements of a head. In forge and in other classes, paired elements are half a head apart."""

    @property
    def is_latent(self) -> bool:
        """Whether the attention is multi-head latent attention."""
        return self.fixed.get("attention") == "mla"

    @property
    def is_hybrid(self) -> bool:
        """Whether the class has linear-attention layers."""
        return "linear_attention.n_key_heads" in self.keys

    @property
    def is_moe(self) -> bool:
        """Whether the class is a mixture of experts."""
        return "moe.n_experts" in self.keys

    def default(self, key: str) -> Any:
        """Return the value of `key` for a config.json that lacks it. Raises KeyError if the key is required."""
        return self.defaults[key] if key in self.defaults else DEFAULTS[key]


class ConfigJson:
    """A config.json in which missing keys have the architecture's defaults. Error messages name the file `source`.

    Reading a missing key without a default raises UserError.
    """

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
        """Return (not raise) a UserError about the value of `key`."""
        return UserError(f"{self.source}: {key} = {self[key]!r}: {why}")
