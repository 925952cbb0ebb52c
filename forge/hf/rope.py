"""Rotary frequencies: rope_theta and [model.rope_scaling] <-> rope_theta and rope_scaling of config.json."""

from __future__ import annotations

from math import log
from typing import TYPE_CHECKING, Any

from forge.config.model import ModelConfig
from forge.errors import UserError

if TYPE_CHECKING:
    from forge.hf.model_config import Values

# ours -> theirs, and what is meant where theirs is absent (... : it must be there).
_SHARED = {"factor": ("factor", ...)}
_KINDS: dict[str, dict[str, tuple[str, Any]]] = {
    "llama3": _SHARED
    | {"low_freq_factor": ("low_freq_factor", ...), "high_freq_factor": ("high_freq_factor", ...)},
    "yarn": _SHARED | {"beta_fast": ("beta_fast", 32.0), "beta_slow": ("beta_slow", 1.0)},
}
_ALSO_KNOWN = {"rope_type", "type", "rope_theta", "original_max_position_embeddings"}
_YARN_ONLY = {"attention_factor", "mscale", "mscale_all_dim", "truncate"}


def write_rope(model: ModelConfig, seq_len: int) -> dict[str, Any]:
    """rope_theta, rope_scaling and max_position_embeddings, as every version of transformers reads them."""
    scaling = model.rope_scaling
    written: dict[str, Any] = {"rope_theta": model.rope_theta, "rope_scaling": None}
    if scaling is None:
        return written | {"max_position_embeddings": seq_len}
    theirs = {name: getattr(scaling, ours) for ours, (name, _) in _KINDS[scaling.kind].items()}
    theirs |= {
        "rope_type": scaling.kind,
        "original_max_position_embeddings": scaling.original_max_position,
    }
    if scaling.kind == "yarn" and scaling.attention_factor is not None:
        theirs["attention_factor"] = scaling.attention_factor
    # Some versions take this ratio for YaRN's factor.
    stretched = round(scaling.factor * scaling.original_max_position)
    longest = stretched if scaling.kind == "yarn" else max(seq_len, stretched)
    return written | {"rope_scaling": theirs, "max_position_embeddings": longest}


def read_rope(theirs: Values) -> dict[str, Any]:
    """rope_theta and, where positions are scaled, the table rope_scaling. UserError (exit 2) for what forge has not."""
    key = "rope_parameters" if "rope_parameters" in theirs else "rope_scaling"
    scaling = dict(theirs[key] or {}) if key in theirs else {}
    theta = scaling.get("rope_theta") or theirs["rope_theta"]
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    partial = scaling.pop("partial_rotary_factor", theirs["partial_rotary_factor"])
    if partial != 1.0:
        where = f"{theirs.source}: partial_rotary_factor = {partial!r}"
        raise UserError(f"{where}: forge rotates whole heads only, which is 1.0")
    if kind == "default" and not set(scaling) - _ALSO_KNOWN:
        return {"rope_theta": float(theta)}
    if kind not in _KINDS:
        raise theirs.refuse(key, f"of the scalings of RoPE forge has {' and '.join(_KINDS)}")
    unknown = set(scaling) - {name for name, _ in _KINDS[kind].values()} - _ALSO_KNOWN
    unknown -= _YARN_ONLY if kind == "yarn" else set()
    if unknown or not scaling.get("truncate", True):
        raise theirs.refuse(
            key, f"forge's {kind} knows nothing of {', '.join(sorted(unknown)) or 'truncate'}"
        )
    return {"rope_theta": float(theta), "rope_scaling": _table(theirs, key, kind, scaling)}


def _table(theirs: Values, key: str, kind: str, scaling: dict[str, Any]) -> dict[str, Any]:
    longest = theirs["max_position_embeddings"]
    original = scaling.get("original_max_position_embeddings") or longest
    if kind == "yarn" and scaling.get("factor") is None:
        scaling["factor"] = longest / original
    table: dict[str, Any] = {"kind": kind, "original_max_position": original}
    for ours, (name, default) in _KINDS[kind].items():
        value = scaling.get(name)
        if value is None and default is ...:
            raise theirs.refuse(key, f"lacks {name}")
        table[ours] = float(default if value is None else value)
    factor = _attention_factor(scaling, table["factor"]) if kind == "yarn" else None
    return table if factor is None else table | {"attention_factor": factor}


def _attention_factor(scaling: dict[str, Any], factor: float) -> float | None:
    """As transformers resolves it; None: the paper's, which is RopeScalingConfig's default as well."""
    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])
    own, over_all = scaling.get("mscale"), scaling.get("mscale_all_dim")
    if not own or not over_all:
        return None
    growth = 0.1 * log(factor) if factor > 1 else 0.0
    return (own * growth + 1.0) / (over_all * growth + 1.0)
