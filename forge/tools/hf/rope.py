"""Convert rope_theta and [model.rope_scaling] of forge into rope_theta and rope_scaling of config.json, and back."""

from __future__ import annotations

from math import log
from typing import Any

from forge.config.model import ModelConfig
from forge.runtime.errors import UserError
from forge.tools.hf.architectures import Architecture, ConfigJson

# Kind of scaling -> parameter -> default of transformers (None: required). forge uses the same names.
SCALINGS: dict[str, dict[str, float | None]] = {
    "linear": {"factor": None},
    "llama3": {"factor": None, "low_freq_factor": None, "high_freq_factor": None},
    "yarn": {"factor": None, "beta_fast": 32.0, "beta_slow": 1.0},
}
_COMMON = {"rope_type", "type", "rope_theta", "original_max_position_embeddings"}
_YARN_ONLY = {"attention_factor", "mscale", "mscale_all_dim", "truncate"}


def write_rope(model: ModelConfig, architecture: Architecture, seq_len: int) -> dict[str, Any]:
    """Return rope_theta, rope_scaling and max_position_embeddings, in a form understood by every version of transformers."""
    written = _write_scaling(model, architecture, seq_len)
    if architecture.partial_rope:
        written["partial_rotary_factor"] = model.rope_fraction
    if not architecture.rope_by_kind:
        return written
    local = model.sliding_rope_theta or model.rope_theta
    full = (written["rope_scaling"] or {"rope_type": "default"}) | {"rope_theta": model.rope_theta}
    # Newer versions read rope_parameters, older versions the other keys.
    return written | {
        "rope_local_base_freq": local,
        "rope_parameters": {
            "full_attention": full,
            "sliding_attention": {"rope_type": "default", "rope_theta": local},
        },
    }


def _write_scaling(model: ModelConfig, architecture: Architecture, seq_len: int) -> dict[str, Any]:
    scaling = model.rope_scaling
    written: dict[str, Any] = {"rope_theta": model.rope_theta}
    if scaling is None:
        # In a class with a default scaling, null would mean this scaling.
        plain = {"rope_type": "default"} if architecture.default_scaling else None
        return written | {"rope_scaling": plain, "max_position_embeddings": seq_len}
    theirs = {key: getattr(scaling, key) for key in SCALINGS[scaling.kind]}
    theirs["rope_type"] = scaling.kind
    if scaling.kind == "linear":
        return written | {"rope_scaling": theirs, "max_position_embeddings": seq_len}
    theirs["original_max_position_embeddings"] = scaling.original_max_position
    if scaling.kind == "yarn" and not scaling.truncate:
        theirs["truncate"] = False
    if scaling.kind == "yarn" and scaling.attention_factor is not None:
        theirs["attention_factor"] = scaling.attention_factor
    if scaling.kind == "yarn" and model.latent is not None and scaling.mscale_all_dim:
        theirs["mscale_all_dim"] = scaling.mscale_all_dim
    # Some versions of transformers take max_position_embeddings / original_max_position_embeddings as YaRN's factor.
    stretched = round(scaling.factor * scaling.original_max_position)
    longest = stretched if scaling.kind == "yarn" else max(seq_len, stretched)
    return written | {"rope_scaling": theirs, "max_position_embeddings": longest}


def read_rope(config: ConfigJson) -> dict[str, Any]:
    """Return the keys of the position embedding in [model].

    rope_theta: always. rope_scaling: if positions are scaled. sliding_rope_theta: if different from rope_theta.
    rope_fraction: for an architecture with partial_rope.

    Raises UserError (exit 2) for a kind of scaling that forge lacks.
    """
    key = "rope_parameters" if "rope_parameters" in config else "rope_scaling"
    scaling = dict(config[key] or {}) if key in config else {}
    scaling = scaling or dict(config.architecture.default_scaling or {})
    if config.architecture.partial_rope:
        fraction = scaling.get("partial_rotary_factor", config["partial_rotary_factor"])
        return _read_scaling(config, key, scaling) | {"rope_fraction": float(fraction)}
    if not config.architecture.rope_by_kind:
        return _read_scaling(config, key, scaling)
    local: dict[str, Any] = {}
    if "full_attention" in scaling:
        local = scaling.get("sliding_attention") or {}
        scaling = dict(scaling["full_attention"] or {})
    if local.get("rope_type", "default") != "default":
        raise config.error(key, "forge supports RoPE scaling for full-attention layers only")
    read = _read_scaling(config, key, scaling)
    theta = float(local.get("rope_theta") or config["rope_local_base_freq"] or read["rope_theta"])
    if theta != read["rope_theta"] or "rope_scaling" in read:
        read["sliding_rope_theta"] = theta
    return read


def _read_scaling(config: ConfigJson, key: str, scaling: dict[str, Any]) -> dict[str, Any]:
    """Return rope_theta and rope_scaling of [model]. scaling: the RoPE parameters under `key` of config.json."""
    theta = float(scaling.get("rope_theta") or config["rope_theta"])
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    partial = scaling.pop("partial_rotary_factor", config["partial_rotary_factor"])
    if partial != 1.0 and not config.architecture.partial_rope:
        where = f"{config.source}: partial_rotary_factor = {partial!r}"
        raise UserError(f"{where}: for this architecture forge supports only 1.0 (RoPE on the whole head)")
    if kind == "default" and not set(scaling) - _COMMON:
        return {"rope_theta": theta}
    if kind not in SCALINGS:
        raise config.error(key, f"forge supports only the RoPE scalings {', '.join(SCALINGS)}")
    unknown = set(scaling) - set(SCALINGS[kind]) - _COMMON - (_YARN_ONLY if kind == "yarn" else set())
    if unknown:
        raise config.error(key, f"forge's {kind} does not support {', '.join(sorted(unknown))}")
    longest = config["max_position_embeddings"]
    original = scaling.get("original_max_position_embeddings") or longest
    if kind == "yarn" and scaling.get("factor") is None:
        scaling["factor"] = longest / original
    table: dict[str, Any] = {"kind": kind} | ({} if kind == "linear" else {"original_max_position": original})
    for name, default in SCALINGS[kind].items():
        value = default if scaling.get(name) is None else scaling[name]
        if value is None:
            raise config.error(key, f"lacks {name}")
        table[name] = float(value)
    if kind == "yarn" and scaling.get("truncate") is False:
        table["truncate"] = False
    factor = _attention_factor(scaling, table["factor"]) if kind == "yarn" else None
    if factor is not None:
        table["attention_factor"] = factor
    if kind == "yarn" and config.architecture.is_latent and scaling.get("mscale_all_dim"):
        table["mscale_all_dim"] = float(scaling["mscale_all_dim"])
    return {"rope_theta": theta, "rope_scaling": table}


def _attention_factor(scaling: dict[str, Any], factor: float) -> float | None:
    """Return YaRN's attention factor by the rules of transformers; None if it is forge's default, the paper's factor."""
    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])
    own, over_all = scaling.get("mscale"), scaling.get("mscale_all_dim")
    if not own or not over_all:
        return None
    growth = 0.1 * log(factor) if factor > 1 else 0.0
    return (own * growth + 1.0) / (over_all * growth + 1.0)
