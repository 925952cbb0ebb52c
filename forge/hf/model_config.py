"""[model] of forge <-> config.json of transformers.

What an architecture cannot say is found by reading back what would be written: keys of [model] that come back with
another value are those that prevent it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from forge.config.model import ModelConfig
from forge.errors import UserError
from forge.hf.architectures import (
    ALIASES,
    ARCHITECTURES,
    BY_NAME,
    BY_TYPE,
    KEYS,
    MUST_BE,
    NOT_COVERED,
    Architecture,
)
from forge.hf.rope import read_rope, write_rope
from forge.model.rope import attention_factor
from forge.model.transformer import window_of

# Keys of [model] that count in training only.
_FREE = {
    "init_std",
    "moe.aux_loss_coef",
    "moe.z_loss_coef",
    "moe.bias_update_rate",
    "moe.router_noise",
    "moe.capacity_factor",
}
_ROPE = {"llama3": ("low_freq_factor", "high_freq_factor"), "yarn": ("beta_fast", "beta_slow")}
_SLIDING, _FULL = "sliding_attention", "full_attention"


class Values:
    """A config.json: its keys with the defaults of its architecture, and complaints that name the file."""

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

    def refuse(self, key: str, why: str) -> UserError:
        return UserError(f"{self.source}: {key} = {self[key]!r}: {why}")


def architecture_of(values: dict[str, Any], source: Path | str) -> Architecture:
    """The architecture that a config.json names. Raises UserError (exit 2) if forge has none such."""
    names = values.get("architectures") or []
    name = names[0] if names else f'of model_type "{values.get("model_type")}"'
    found = BY_NAME.get(name) if names else BY_TYPE.get(str(values.get("model_type")))
    if found is None:
        why = NOT_COVERED.get(name, f"forge reads {', '.join(sorted(BY_NAME))}")
        raise UserError(f"{source}: the architecture {name} cannot be read: {why}")
    return found


def read_model(
    values: dict[str, Any], architecture: Architecture, source: Path | str = "config.json"
) -> dict[str, Any]:
    """[model] as a tree of keys, with tables `rope_scaling` and `moe` where they are needed.

    Raises UserError (exit 2) that names the key of config.json for what forge cannot compute.
    """
    theirs = Values(values, architecture, source)
    for key, needed in MUST_BE.items():
        said = key in architecture.keys.values()
        if not said and (key in theirs or key in architecture.defaults) and theirs[key] != needed:
            raise theirs.refuse(key, f"forge computes with {needed!r} only")
    model = {ours: theirs[key] for ours, key in (KEYS | dict(architecture.keys)).items()}
    model |= architecture.fixed
    model["n_kv_heads"] = model["n_kv_heads"] or model["n_heads"]
    model["head_dim"] = model["head_dim"] or model["dim"] // model["n_heads"]
    model |= read_rope(theirs)
    model["sliding_window"], model["sliding_window_pattern"] = _read_windows(theirs, model["n_layers"])
    if architecture.mixture:
        model |= _read_mixture(theirs, model)
    moe = {key.removeprefix("moe."): model.pop(key) for key in list(model) if key.startswith("moe.")}
    return model | ({"moe": moe} if moe else {})


def write_model(model: ModelConfig, architecture: Architecture, seq_len: int) -> dict[str, Any]:
    """The keys of config.json that describe `model`; `seq_len` is the longest sequence that it is meant for."""
    flat = _flat(model)
    written: dict[str, Any] = {"architectures": [architecture.name], "model_type": architecture.model_type}
    written |= {theirs: flat[ours] for ours, theirs in (KEYS | dict(architecture.keys)).items()}
    written |= {"hidden_act": "silu", "attention_dropout": 0.0} | dict(architecture.extra)
    written |= write_rope(model, seq_len) | _write_windows(model, architecture)
    if model.moe is not None:
        written |= _write_mixture(model, architecture)
    return written


def choose_architecture(model: ModelConfig) -> Architecture:
    """The class of transformers that computes what `model` does. UserError (exit 2) names the keys that prevent it."""
    nearest: tuple[str, list[str]] | None = None
    for architecture in ARCHITECTURES:
        if architecture.mixture == (model.moe is not None):
            prevented = _differences(model, architecture)
            if not prevented:
                return architecture
            if nearest is None or len(prevented) < len(nearest[1]):
                nearest = architecture.name, prevented
    assert nearest is not None
    raise UserError(
        f"no architecture of transformers computes this model; the nearest, {nearest[0]}, is prevented by "
        f"{', '.join(nearest[1])}"
    )


def _differences(model: ModelConfig, architecture: Architecture) -> list[str]:
    """The keys of `model` that would come back from `architecture` with another value, each with both values."""
    try:
        back = ModelConfig.model_validate(read_model(write_model(model, architecture, 1), architecture))
    except UserError:  # the one thing that is written and not read: normalised weights of a single choice
        return ["model.moe.top_k = 1 (it would make every weight 1)"]
    there, here = _meaning(back), _meaning(model)
    if architecture.router_bias is not None:
        there["moe.balance"] = here["moe.balance"]  # a bias of zeros is none
    return [
        f"model.{key} = {here[key]!r} (it would be {there[key]!r})"
        for key in here
        if key in there and here[key] != there[key]
    ]


def _meaning(model: ModelConfig) -> dict[str, Any]:
    """The keys that decide what the trained model computes, with equal values for what is equal."""
    flat = {key: value for key, value in _flat(model).items() if key not in _FREE}
    scaling = model.rope_scaling
    if scaling is not None:
        numbers = [getattr(scaling, key) for key in ("factor", "original_max_position", *_ROPE[scaling.kind])]
        flat["rope_scaling"] = (scaling.kind, *numbers, attention_factor(scaling))
    if not model.sliding_window:
        flat["sliding_window_pattern"] = 0
    if model.moe is not None:
        flat["moe.balance"] = "bias" if model.moe.balance == "bias" else "not bias"
        if model.moe.n_limited_groups == model.moe.n_expert_groups:
            flat["moe.n_expert_groups"] = flat["moe.n_limited_groups"] = 1
        if model.moe.n_dense_layers == 0:
            del flat["ffn_dim"]
    return flat


def _flat(model: ModelConfig) -> dict[str, Any]:
    """Keys below [model], dotted, as transformers understands them: a single choice of expert is never normalised."""
    flat = {key: getattr(model, key) for key in ModelConfig.model_fields if key != "moe"}
    moe = model.moe
    if moe is not None:
        flat |= {f"moe.{key}": getattr(moe, key) for key in type(moe).model_fields}
        flat["moe.normalize_top_k"] = moe.normalize_top_k and moe.top_k > 1
    return flat


def _read_mixture(theirs: Values, model: dict[str, Any]) -> dict[str, Any]:
    top_k, normalized = model["moe.top_k"], model.get("moe.normalize_top_k", False)
    if normalized and top_k == 1:
        why = "weights of a single expert, normalised, would all be 1; forge never does so"
        raise theirs.refuse(theirs.architecture.keys["moe.top_k"], why)
    read = {
        "moe.normalize_top_k": normalized,
        "moe.n_dense_layers": _read_dense_layers(theirs, model["n_layers"]),
    }
    if "moe.n_shared_experts" in model:
        read["moe.n_shared_experts"] = model["moe.n_shared_experts"] or 0
    if theirs.architecture.router_bias is not None:
        return read | {"moe.balance": "bias"}
    # Their balancing loss sums the shares of all top_k choices, ours is 1 when the load is even.
    coefficient = (model["moe.aux_loss_coef"] or 0.0) * top_k
    return read | {"moe.balance": "aux_loss" if coefficient else "none", "moe.aux_loss_coef": coefficient}


def _write_mixture(model: ModelConfig, architecture: Architecture) -> dict[str, Any]:
    moe, keys = model.moe, architecture.keys
    assert moe is not None
    written: dict[str, Any] = {}
    if "moe.aux_loss_coef" in keys:
        coefficient = moe.aux_loss_coef if moe.balance in ("aux_loss", "sequence_aux_loss") else 0.0
        written[keys["moe.aux_loss_coef"]] = coefficient / moe.top_k
    if keys.get("moe.n_dense_layers") == "mlp_only_layers":
        written["mlp_only_layers"] = list(range(moe.n_dense_layers))
    if "moe.n_expert_groups" in keys and moe.n_limited_groups == moe.n_expert_groups:
        written |= {keys["moe.n_expert_groups"]: 1, keys["moe.n_limited_groups"]: 1}
    return written


def _read_dense_layers(theirs: Values, n_layers: int) -> int:
    """How many leading layers have no experts; every layer after them must have some."""
    key = theirs.architecture.keys.get("moe.n_dense_layers")
    if key is None:
        return 0
    why = "layers without experts can only be the first ones"
    if key == "mlp_only_layers":
        named, step = theirs[key] or [], theirs["decoder_sparse_step"]
        dense = [layer for layer in range(n_layers) if layer in named or (layer + 1) % step]
        if dense != list(range(len(dense))):
            raise theirs.refuse("decoder_sparse_step" if step != 1 else key, why)
        return len(dense)
    if key == "moe_layer_start_index":
        if theirs["moe_layer_end_index"] not in (-1, n_layers - 1):
            raise theirs.refuse("moe_layer_end_index", why)
        if theirs["moe_layer_interval"] != 1:
            raise theirs.refuse("moe_layer_interval", why)
    return theirs[key] or 0


def _write_windows(model: ModelConfig, architecture: Architecture) -> dict[str, Any]:
    slides = [window_of(model, layer) > 0 for layer in range(model.n_layers)]
    words = {
        "use_sliding_window": any(slides),
        "sliding_window": model.sliding_window if any(slides) else None,
        "layer_types": [_SLIDING if slide else _FULL for slide in slides],
        "max_window_layers": slides.count(False),
    }
    return {key: words[key] for key in architecture.windows}


def _read_windows(theirs: Values, n_layers: int) -> tuple[int, int]:
    """sliding_window and sliding_window_pattern."""
    keys = theirs.architecture.windows
    if not keys or ("use_sliding_window" in keys and not theirs["use_sliding_window"]):
        return 0, 0
    window = theirs["sliding_window"]
    if not window or "layer_types" not in keys:
        return window or 0, 0
    types = theirs["layer_types"]
    if types is None:
        key, first = "max_window_layers", theirs["max_window_layers"]
        slides = [layer >= first for layer in range(n_layers)]
    else:
        key, slides = "layer_types", [kind == _SLIDING for kind in types]
        if len(types) != n_layers or not set(types) <= {_SLIDING, _FULL}:
            raise theirs.refuse(key, f"needed: {n_layers} times {_SLIDING} or {_FULL}")
    if not any(slides):
        return 0, 0
    if all(slides):
        return window, 0
    for pattern in range(2, n_layers + 1):
        if slides == [(layer + 1) % pattern != 0 for layer in range(n_layers)]:
            return window, pattern
    raise theirs.refuse(key, "forge slides in all layers, or in all but every n-th")
