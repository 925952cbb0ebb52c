"""Convert [model] of forge into config.json of transformers, and back.

An architecture supports a model if the round trip through config.json changes no key of [model].
"""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

from forge.config.model import ModelConfig
from forge.model.attention import attention_factor, score_factor
from forge.model.transformer import window_of
from forge.runtime.errors import UserError
from forge.tools.hf.architectures import KEYS, MUST_BE, Architecture, ConfigJson
from forge.tools.hf.kimi import write_linear
from forge.tools.hf.rope import SCALINGS, read_rope, write_rope
from forge.tools.hf.table import ARCHITECTURES

# Keys of [model] without effect outside of training.
_TRAINING_ONLY = {
    "init_std",
    "moe.aux_loss_coef",
    "moe.z_loss_coef",
    "moe.bias_update_rate",
    "moe.router_noise",
    "moe.capacity_factor",
    "mtp",
    "linear_attention.chunk_size",
}
_SOFT_CAPS = {"attention_soft_cap", "logit_soft_cap"}
_SCALAR = "query_pre_attn_scalar"
_PATTERN = "sliding_window_pattern"
_SLIDING, _FULL, _LINEAR = "sliding_attention", "full_attention", "linear_attention"


def read_model(
    values: dict[str, Any], architecture: Architecture, source: Path | str = "config.json"
) -> dict[str, Any]:
    """Return [model] as a tree of keys, from the config.json `values`. source: the file named in errors.

    Raises UserError (exit 2) for a feature missing in forge. The message names the key of config.json.
    """
    config = ConfigJson(values, architecture, source)
    for key, needed in (MUST_BE | dict(architecture.must_be)).items():
        mapped = key in architecture.keys.values()
        if (
            not mapped
            and (key in config or key in architecture.defaults)
            and config[key] not in (needed, None)
        ):
            raise config.error(key, f"forge supports only {needed!r}")
    model = {ours: config[theirs] for ours, theirs in (KEYS | dict(architecture.keys)).items()}
    for ours, needed in architecture.fixed.items():
        if ours in model and model[ours] != needed:
            raise config.error(
                (KEYS | dict(architecture.keys))[ours],
                f"for {architecture.name} forge supports only {needed!r}",
            )
    model |= architecture.fixed
    if architecture.is_latent:
        del model["n_kv_heads"], model["head_dim"]
        model["mla.q_lora_rank"] = model["mla.q_lora_rank"] or 0
    else:
        model["n_kv_heads"] = model["n_kv_heads"] or model["n_heads"]
        model["head_dim"] = model["head_dim"] or model["dim"] // model["n_heads"]
    if _SCALAR in architecture.defaults and config[_SCALAR] != model["head_dim"]:
        model["attention_scale_dim"] = float(config[_SCALAR])
    if architecture.output_bias:
        model["attention_output_bias"] = model["attention_bias"]
    for key in _SOFT_CAPS & model.keys():
        model[key] = model[key] or 0.0
    model |= read_rope(config)
    model["sliding_window"], model["layer_pattern"] = _read_windows(config, model["n_layers"])
    if architecture.is_hybrid:
        model["layer_pattern"] = _read_linear(config, model["n_layers"])
    if architecture.is_moe:
        model |= _read_moe(config, model)
    for table in ("mla", "moe", "linear_attention"):
        inner = [key for key in model if key.startswith(f"{table}.")]
        if inner:
            model[table] = {key.partition(".")[2]: model.pop(key) for key in inner}
    if architecture.numbered_layers:
        model["linear_attention"]["decay_bound"] = -(config["linear_attn_config.gate_lower_bound"] or 0.0)
    if "linear" not in model["layer_pattern"]:
        model.pop("linear_attention", None)
    return model


def write_model(model: ModelConfig, architecture: Architecture, seq_len: int) -> dict[str, Any]:
    """Return the keys of config.json for `model`.

    seq_len: longest intended sequence in tokens, for max_position_embeddings.
    """
    flat = _flat(model)
    written: dict[str, Any] = {"architectures": [architecture.name], "model_type": architecture.model_type}
    names = KEYS | dict(architecture.keys)
    written |= {theirs: flat[ours] for ours, theirs in names.items() if ours in flat}
    written |= {"hidden_act": "silu", "attention_dropout": 0.0}
    written |= {key: value for key, value in architecture.must_be.items() if value} | dict(architecture.extra)
    slides = [window_of(model, layer) > 0 for layer in range(model.n_layers)]
    # Classes with layers of both kinds make a mask for a sliding window even if no layer uses it.
    unused = seq_len if architecture.every_other_kind else None
    windows = {
        "use_sliding_window": any(slides),
        "sliding_window": model.sliding_window if any(slides) else unused,
        "layer_types": [_SLIDING if slide else _FULL for slide in slides],
        "max_window_layers": slides.count(False),
    }
    written |= write_rope(model, architecture, seq_len) | {
        key: windows[key] for key in architecture.window_keys
    }
    if architecture.numbered_layers:
        written |= write_linear(model)
    elif architecture.is_hybrid:
        names = {"linear": _LINEAR}
        written["layer_types"] = [names.get(model.kind_of(n), _FULL) for n in range(model.n_layers)]
    if architecture.predicts_ahead:
        written["num_nextn_predict_layers"] = model.mtp_depth
    moe, keys = model.moe, architecture.keys
    written |= {keys[cap]: flat[cap] or None for cap in _SOFT_CAPS & keys.keys()}
    if _SCALAR in architecture.defaults:
        scalar = model.attention_scale_dim or model.head_dim
        written[_SCALAR] = int(scalar) if scalar == int(scalar) else scalar
    if architecture.is_latent:
        written["q_lora_rank"] = written.get("q_lora_rank") or None
    if moe is None:
        return written
    if "shared_expert_intermediate_size" in architecture.defaults:
        written["shared_expert_intermediate_size"] = moe.n_shared_experts * moe.expert_dim
    if "moe.aux_loss_coef" in keys:
        coefficient = moe.aux_loss_coef if moe.balance in ("aux_loss", "sequence_aux_loss") else 0.0
        written[keys["moe.aux_loss_coef"]] = coefficient / moe.top_k
    if keys.get("moe.n_dense_layers") == "mlp_only_layers":
        written |= {"mlp_only_layers": list(range(moe.n_dense_layers)), "decoder_sparse_step": moe.every}
    if "moe.n_expert_groups" in keys and moe.n_limited_groups == moe.n_expert_groups:
        written |= {keys["moe.n_expert_groups"]: 1, keys["moe.n_limited_groups"]: 1}
    return written


def choose_architecture(model: ModelConfig) -> Architecture:
    """Return the first architecture in ARCHITECTURES that can express `model`.

    If none can, raises UserError (exit 2) that lists the keys of `model` not supported by the nearest architecture.
    """
    differences, refused = {}, {}
    for architecture in ARCHITECTURES:
        if architecture.is_moe != (model.moe is not None):
            continue
        try:
            found = _differences(model, architecture)
        except UserError as error:
            # The reading ended at the first difference, so the number of differences is unknown.
            refused[architecture.name] = [str(error).removeprefix("config.json: ")]
            continue
        if not found:
            return architecture
        differences[architecture.name] = found
    differences = differences or refused
    nearest = min(differences, key=lambda name: len(differences[name]))
    raise UserError(
        f"no architecture of transformers computes this model; the nearest, {nearest}, differs in "
        f"{', '.join(differences[nearest])}"
    )


def _differences(model: ModelConfig, architecture: Architecture) -> list[str]:
    """Return a text for each key of `model` that a round trip through `architecture` changes: key, value, changed value.

    Raises UserError if the architecture cannot even be read back.
    """
    moe = model.moe
    if moe is not None and moe.top_k == 1 and architecture.fixed.get("moe.normalize_top_k"):
        return ["model.moe.top_k = 1 (transformers would make every weight 1)"]
    back = ModelConfig.model_validate(read_model(write_model(model, architecture, 1), architecture))
    there, here = _effective(back), _effective(model)
    if architecture.router_bias is not None:
        there["moe.balance"] = here["moe.balance"]  # the exported router bias of zeros has no effect
    if architecture.output_bias and model.attention_bias and not model.attention_output_bias:
        there["attention_output_bias"] = False  # the exported output bias of zeros has no effect
    return [
        f"model.{key} = {here[key]!r} (it would become {there[key]!r})"
        for key in here
        if key in there and here[key] != there[key]
    ]


def _effective(model: ModelConfig) -> dict[str, Any]:
    """Return the keys that influence the outputs of a trained model. Values with the same effect become equal."""
    flat = {key: value for key, value in _flat(model).items() if key not in _TRAINING_ONLY}
    scaling = model.rope_scaling
    if scaling is not None:
        numbers = [getattr(scaling, key) for key in SCALINGS[scaling.kind]]
        trained = 0 if scaling.kind == "linear" else scaling.original_max_position
        scores = score_factor(scaling) if model.latent is not None else 1.0
        flat["rope_scaling"] = (
            scaling.kind,
            trained,
            *numbers,
            scaling.truncate,
            attention_factor(scaling),
            scores,
        )
    if model.latent is not None:
        for unused in ("n_kv_heads", "head_dim", "rope_fraction", "qk_norm"):
            del flat[unused]
    flat["layer_pattern"] = [model.kind_of(layer) for layer in range(model.n_layers)]
    del flat["sliding_window_pattern"]
    if "sliding" not in flat["layer_pattern"]:
        flat |= {"sliding_window": 0, "sliding_rope_theta": 0.0}
    if scaling is None and model.sliding_rope_theta == model.rope_theta:
        flat["sliding_rope_theta"] = 0.0
    if model.activation not in ("clamped_swiglu", "situ"):
        del flat["activation_limit"]
    if model.activation != "situ":
        del flat["activation_up_limit"]
    if model.attention_scale_dim == model.head_dim and model.latent is None:
        flat["attention_scale_dim"] = 0.0
    if not model.qk_norm:
        del flat["qk_norm_over"]
    if model.residual == "add":
        del flat["residual_block_size"]
    if model.moe is not None:
        flat["moe.balance"] = "bias" if model.moe.biased else "not bias"
        if model.moe.n_limited_groups == model.moe.n_expert_groups:
            flat["moe.n_expert_groups"] = flat["moe.n_limited_groups"] = 1
        if model.moe.n_dense_layers == 0 and model.moe.every == 1:
            del flat["ffn_dim"]
    return flat


def _flat(model: ModelConfig) -> dict[str, Any]:
    """Return the keys of [model] as a flat dict, from dotted key to value.

    With top_k = 1, moe.normalize_top_k is False: transformers does not normalise the weight of a single expert.
    """
    tables = ("mla", "moe", "linear_attention")
    flat = {key: getattr(model, key) for key in ModelConfig.model_fields if key not in tables}
    if (linear := model.linear_attention) is not None:
        flat |= {f"linear_attention.{key}": getattr(linear, key) for key in type(linear).model_fields}
    if model.latent is not None:
        flat |= {f"mla.{key}": getattr(model.latent, key) for key in type(model.latent).model_fields}
        flat |= {"n_kv_heads": model.n_heads, "head_dim": model.latent.qk_rope_head_dim}
    moe = model.moe
    if moe is not None:
        flat |= {f"moe.{key}": getattr(moe, key) for key in type(moe).model_fields}
        flat["moe.normalize_top_k"] = moe.normalize_top_k and moe.top_k > 1
    return flat


def _read_moe(config: ConfigJson, model: dict[str, Any]) -> dict[str, Any]:
    top_k, normalized = model["moe.top_k"], model.get("moe.normalize_top_k", False)
    if normalized and top_k == 1:
        why = "forge never normalises the weight of a single expert, because it would always be 1"
        raise config.error(config.architecture.keys["moe.top_k"], why)
    dense, every = _read_dense(config, model["n_layers"])
    read = {"moe.normalize_top_k": normalized, "moe.n_dense_layers": dense, "moe.every": every}
    if "shared_expert_intermediate_size" in config.architecture.defaults:
        size, shared = model["moe.expert_dim"], config["shared_expert_intermediate_size"]
        if shared % size:
            why = f"must be a multiple of {size}, because forge's shared experts are as wide as the routed experts"
            raise config.error("shared_expert_intermediate_size", why)
        read["moe.n_shared_experts"] = shared // size
    if "moe.n_shared_experts" in model:
        read["moe.n_shared_experts"] = model["moe.n_shared_experts"] or 0
    if config.architecture.router_bias is not None:
        return read | {"moe.balance": "bias"}
    # For the balancing loss, transformers sums the experts' shares over the top_k choices. forge takes the mean, so an even
    # load gives 1.
    coefficient = (model["moe.aux_loss_coef"] or 0.0) * top_k
    return read | {"moe.balance": "aux_loss" if coefficient else "none", "moe.aux_loss_coef": coefficient}


def _read_dense(config: ConfigJson, n_layers: int) -> tuple[int, int]:
    """Return the values of moe.n_dense_layers and moe.every that give the same layers with experts as `config`.

    Raises UserError if no such values exist.
    """
    key = config.architecture.keys.get("moe.n_dense_layers")
    if key == "mlp_only_layers":
        without, step = config[key] or [], config["decoder_sparse_step"]
        experts = [layer not in without and (layer + 1) % step == 0 for layer in range(n_layers)]
        for every, dense in product(range(1, n_layers + 1), range(n_layers + 1)):
            if experts == [layer >= dense and (layer + 1) % every == 0 for layer in range(n_layers)]:
                return dense, every
        why = (
            f"forge needs experts in every n-th layer from some layer on, which this list and decoder_sparse_step = {step} "
            "do not give"
        )
        raise config.error(key, why)
    every = 1
    if key == "moe_layer_start_index":
        every = config["moe_layer_interval"]
        if config["moe_layer_end_index"] not in (-1, n_layers - 1):
            raise config.error(
                "moe_layer_end_index",
                f"needed: -1 or {n_layers - 1}, because in forge only the first layers can be without experts",
            )
    return (config[key] or 0) if key else 0, every


def _read_windows(config: ConfigJson, n_layers: int) -> tuple[int, list[str]]:
    """Return sliding_window (0: none) and layer_pattern (empty: all layers are of one kind)."""
    keys = config.architecture.window_keys
    if not keys or ("use_sliding_window" in keys and not config["use_sliding_window"]):
        return 0, []
    window = config["sliding_window"]
    if not window or "layer_types" not in keys:
        return window or 0, []
    types = config["layer_types"]
    every = config.architecture.every_other_kind
    if _PATTERN in config.architecture.defaults:
        every = config[_PATTERN]
        if not isinstance(every, int) or every < 1:
            raise config.error(_PATTERN, "needed: an integer of at least 1")
    if types is None and every:
        slides = [(layer + 1) % every != 0 for layer in range(n_layers)]
    elif types is None:
        slides = [layer >= config["max_window_layers"] for layer in range(n_layers)]
    else:
        slides = [kind == _SLIDING for kind in types]
        if len(types) != n_layers or not set(types) <= {_SLIDING, _FULL}:
            raise config.error(
                "layer_types", f"needed: a list of {n_layers} entries, each {_SLIDING} or {_FULL}"
            )
    if not any(slides):
        return 0, []
    return window, [] if all(slides) else _shortest(["sliding" if slide else "full" for slide in slides])


def _read_linear(config: ConfigJson, n_layers: int) -> list[str]:
    """Return layer_pattern for a class with linear-attention layers. Raises UserError for an invalid list of layers."""
    if config.architecture.numbered_layers:
        key = "linear_attn_config.kda_layers"
        linear, full = config[key], config["linear_attn_config.full_attn_layers"]
        if sorted([*linear, *full]) != list(range(1, n_layers + 1)):
            raise config.error(
                key, f"this list and full_attn_layers must together name each layer from 1 to {n_layers} once"
            )
        return _shortest(["linear" if layer in linear else "nope" for layer in range(1, n_layers + 1)])
    types = config["layer_types"]
    key = "full_attention_interval"
    every = config[key] if key in config else 4  # noqa: SIM401
    if types is None:
        return _shortest(["full" if (layer + 1) % every == 0 else "linear" for layer in range(n_layers)])
    if len(types) != n_layers or not set(types) <= {_LINEAR, _FULL}:
        raise config.error("layer_types", f"needed: a list of {n_layers} entries, each {_LINEAR} or {_FULL}")
    return _shortest(["linear" if kind == _LINEAR else "full" for kind in types])


def _shortest(kinds: list[str]) -> list[str]:
    """Return the shortest pattern that gives `kinds` when repeated."""
    sizes = range(1, len(kinds) + 1)
    return next(kinds[:n] for n in sizes if all(kinds[i] == kinds[i % n] for i in range(len(kinds))))
