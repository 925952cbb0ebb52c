"""`shrink`: reduce a configuration to the smallest sizes its structure allows, in float64.

Reduced: widths, layers, experts, vocabulary, sequence length and batch. Kept: the kind of model, the ratio of query to
key/value heads, the pattern of sliding windows, tied weights, expert groups and shared experts, dense first layers, even
or odd sizes, the optimizer, modules with a fixed format, the engine, the tensor-parallel plan and every other option. Each
phase becomes one step, or two steps with a ramp. Data are synthetic, because the comparison needs tokens, not text.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from math import ceil, gcd, lcm, sqrt
from typing import Any

from forge.config import Config, Degrees, Phases, check_world, to_toml
from forge.config.explain import Values
from forge.config.float8 import BLOCKS
from forge.config.keys import read_toml
from forge.config.load import examine
from forge.config.model import ModelConfig, MoEConfig
from forge.config.patterns import patterns_of
from forge.config.pipeline import ONE_PER_RANK
from forge.config.problem import raise_all
from forge.config.section import Section
from forge.runtime.errors import UserError
from forge.tools.verify.notes import DEGREES, leaves, notes_on_changes

LAYERS, SEQ_LEN, BATCH = 4, 64, 8
# Suffixes of the keys of widths.
WIDTHS = ("dim", "rank", "size")
# Keys of [precision] with the dtypes of storage and arithmetic.
FORMATS = ("storage", "compute", "reduce")
# The largest threshold of QK-clip. The small model's logits are above it.
QK_CLIP = 0.03


def changed(config: Config, keys: Mapping[str, Any]) -> Config:
    """Return `config` with the values of `keys` (dotted name -> value). Raises UserError if the result is invalid."""
    tree = read_toml(to_toml(config))
    tree["train"].setdefault("steps", config.train.steps)
    for key, value in keys.items():
        *sections, last = key.split(".")
        table = tree
        for section in sections:
            table = table.setdefault(section, {})
        table[last] = value
    result, problems = examine(Values(tree, "the small config"))
    raise_all(problems)
    assert result is not None
    return result


def shrink(config: Config) -> tuple[Config, list[str]]:
    """Return the small configuration for one process, and notes on changes other than sizes, data, formats and layout.

    The small model computes in float64.
    """
    keys = _model(config.model) | _training(config) | _layout(config) | _left_out(config)
    if block := BLOCKS.get(config.precision.float8):
        # Block formats stay: in float64, the order of sums does not change float8 codes. Choose sizes with whole blocks on
        # two ranks.
        keys |= {"precision.float8": config.precision.float8, "train.seq_len": 4 * block}
        keys |= _whole_blocks(config.model, keys, 2 * block)
    keys["phase"] = _phases(config, keys["train.seq_len"])
    keys |= {f"precision.{key}": "float64" for key in FORMATS}
    parts = other_parts(config.model, Fraction(keys["model.dim"], config.model.dim))
    try:
        small = changed(config, parts | keys)
    except UserError:
        # Sizes of subsections may depend on each other. If the scaled sizes are invalid, keep the original ones.
        small = changed(config, keys)
    small = changed(small, _bases(config, small) | patterns_of(config.model, small))
    return small, list(notes_on_changes(config, small))


def rounded_config(config: Config, small: Config) -> Config:
    """Return `small`, which `shrink` made of `config`, computing in the formats of `config`, without float8."""
    formats = {f"precision.{key}": getattr(config.precision, key) for key in FORMATS}
    return changed(small, formats | {"precision.float8": "none", "precision.float8_dispatch": False})


def _bases(config: Config, small: Config) -> dict[str, Any]:
    """Return the base sizes of mup and completep for `small`. Each has the same ratio to the model's size as in `config`.

    Unchanged base sizes would multiply learning rates by base_dim / dim. This would amplify rounding errors.
    """
    if config.optimizer.parametrization == "standard":
        return {}
    pairs = {"base_dim": "dim", "base_depth": "n_layers", "base_head_dim": "head_dim"}
    bases = {key: getattr(config.optimizer.mup, key) for key in pairs}
    ratios = {
        key: Fraction(getattr(small.model, size), getattr(config.model, size)) for key, size in pairs.items()
    }
    return {f"optimizer.mup.{key}": max(1, round(base * ratios[key])) for key, base in bases.items() if base}


def steps_through(small: Config) -> int:
    """Return the number of steps through all phases of a small configuration, plus one step. Return 0 without phases."""
    return Phases(small).steps_to(small.phase[-1].until_tokens) + 1 if small.phase else 0


def one_process(config: Config) -> Config:
    """Return `config` with all degrees 1."""
    return changed(config, {f"parallel.{axis}": 1 for axis in DEGREES})


def for_layout(small: Config, degrees: Degrees) -> Config:
    """Return the small configuration with the degrees `degrees`, and with sizes raised until the degrees divide them.

    Raises UserError if no such sizes exist.
    """
    d, model, moe = degrees, small.model, small.model.moe
    own = model.n_heads if model.latent else model.n_kv_heads
    kv_heads = lcm(own, d.tp * (d.cp if small.parallel.context == "ulysses" else 1))
    one_per_rank = small.pipeline.schedule in ONE_PER_RANK
    microbatches = d.pp * (2 if small.pipeline.schedule == "DualPipeV" else 1)
    halves = 2 if any(phase.seq_len for phase in small.phase) else 1
    keys: dict[str, Any] = {
        **{f"parallel.{axis}": getattr(d, axis) for axis in DEGREES},
        "model.n_kv_heads": kv_heads,
        "model.n_heads": kv_heads * (model.n_heads // own),
        "model.ffn_dim": lcm(model.ffn_dim, d.tp),
        "model.vocab_size": max(model.vocab_size, d.tp * d.tp + 1),  # each tp rank needs at least one row
        "model.n_layers": max(model.n_layers, d.pp * (1 if one_per_rank else 2)),
        "train.seq_len": _multiple(
            small.train.seq_len, halves * lcm(2 * d.cp, d.cp * d.tp) * BLOCKS.get(small.precision.float8, 1)
        ),
        "train.global_batch_size": _multiple(BATCH, small.train.micro_batch_size * d.dp * microbatches),
    }
    keys["phase"] = [
        phase.model_dump(mode="json", exclude_none=True)
        | ({"seq_len": keys["train.seq_len"] // 2} if phase.seq_len else {})
        | (
            {"global_batch_size": _multiple(batch, 2 * d.dp * microbatches)}
            if (batch := phase.global_batch_size)
            else {}
        )
        for phase in small.phase
    ]
    _let_end(keys["phase"], keys["train.global_batch_size"], keys["train.seq_len"])
    if moe is not None:
        keys |= {
            "model.moe.n_experts": lcm(moe.n_experts, d.ep),
            "model.moe.expert_dim": lcm(moe.expert_dim, d.tp),
        }
    if (linear := model.linear_attention) is not None:
        key_heads = lcm(linear.n_key_heads, d.tp)
        keys |= {
            "model.linear_attention.n_key_heads": key_heads,
            "model.linear_attention.n_value_heads": key_heads * (linear.n_value_heads // linear.n_key_heads),
        }
    if block := BLOCKS.get(small.precision.float8):
        current = {f"model.{key}": value for key, value in leaves(model.model_dump(mode="json"))}
        keys |= _whole_blocks(model, current | keys, block * d.tp)
    result = changed(small, keys)
    check_world(result, d.world)
    return result


def _whole_blocks(model: ModelConfig, keys: Mapping[str, Any], unit: int) -> dict[str, Any]:
    """Return sizes of heads and feed-forwards such that tensor parallelism splits no float8 block.

    keys: the current sizes. unit: block size of the float8 format times the number of tp ranks. `unit` divides every
    returned dim that tensor parallelism splits.
    """
    of_head = unit // gcd(unit, keys["model.n_kv_heads"])
    found = {"model.ffn_dim": _multiple(keys["model.ffn_dim"], unit)}
    if model.latent is None:
        found["model.head_dim"] = _multiple(keys.get("model.head_dim", 0) or of_head, of_head)
    else:
        of_head = unit // gcd(unit, keys["model.n_heads"])
        sizes = dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), of_head)
        # Set the whole table, as `_model` does.
        found["model.mla"] = keys.get("model.mla", model.latent.model_dump(mode="json")) | sizes
    if model.moe is not None and model.moe.n_shared_experts:
        found["model.moe.expert_dim"] = _multiple(keys["model.moe.expert_dim"], unit)
    if model.linear_attention is not None:
        of_head = unit // gcd(unit, keys["model.linear_attention.n_key_heads"])
        found |= {f"model.linear_attention.{key}": of_head for key in ("key_head_dim", "value_head_dim")}
    return found


def _model(model: ModelConfig) -> dict[str, Any]:
    own = model.n_heads if model.latent else model.n_kv_heads
    kv_heads = _few(own)
    heads = kv_heads * (model.n_heads // own)
    head_dim = 4 if heads > 2 else 8
    # Keep the ratio of the residual width to the total width of all heads, which may differ from 1.
    dim = _even(Fraction(heads * head_dim * model.dim, model.n_heads * model.head_dim or model.dim))
    keys: dict[str, Any] = {
        "dim": dim,
        "n_heads": heads,
        "n_kv_heads": kv_heads,
        "head_dim": head_dim,
        "ffn_dim": _scaled(model.ffn_dim, Fraction(min(dim, 32), model.dim)),
        "vocab_size": min(model.vocab_size, 64 + model.vocab_size % 8),
        "n_layers": min(model.n_layers, LAYERS),
        "sliding_window_pattern": min(model.sliding_window_pattern, LAYERS),
        "layer_pattern": _kinds(model, LAYERS),
        "residual_block_size": min(model.residual_block_size, LAYERS // 2),
        # Scale up, because narrower products have smaller sums. Otherwise attention would be nearly uniform.
        "init_std": min(0.5, model.init_std * max(1.0, sqrt(model.dim / dim))),
    }
    if model.sliding_window:
        keys["sliding_window"] = min(model.sliding_window, 3 * SEQ_LEN // 8)
    if model.rope_fraction < 1.0:
        keys["rope_fraction"] = 0.5
    if model.latent is not None:
        sizes = {"kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": 4}
        keys["mla"] = {"q_lora_rank": min(model.latent.q_lora_rank, 12), **sizes}
    keys = {f"model.{key}": value for key, value in keys.items()}
    if model.moe is not None:
        keys |= {f"model.moe.{key}": value for key, value in _experts(model, model.moe, dim).items()}
    if (linear := model.linear_attention) is not None:
        key_heads = _few(linear.n_key_heads)
        small = {
            "n_key_heads": key_heads,
            "n_value_heads": key_heads * (linear.n_value_heads // linear.n_key_heads),
            "key_head_dim": 4,
            "value_head_dim": 4 if linear.value_head_dim == linear.key_head_dim else 6,
            "chunk_size": 16,
        }
        keys |= {f"model.linear_attention.{key}": value for key, value in small.items()}
    return keys


def _kinds(model: ModelConfig, layers: int) -> tuple[str, ...]:
    """Return up to `layers` entries of `model.layer_pattern`, with at least one of each kind if `layers` is large enough."""
    kinds = model.layer_pattern
    if len(kinds) <= layers:
        return kinds
    rare = [kind for kind in dict.fromkeys(kinds) if kind not in kinds[:layers]]
    return (*kinds[: layers - len(rare)], *rare)


def other_parts(model: ModelConfig, factor: Fraction) -> dict[str, Any]:
    """Return the widths of the model's subsections, e.g. of `[model.mla]`, multiplied by `factor`."""
    keys: dict[str, Any] = {}
    for name, part in model:
        if isinstance(part, Section) and not isinstance(part, MoEConfig):
            widths = {key: size for key, size in part if key.endswith(WIDTHS) and type(size) is int}
            keys |= {f"model.{name}.{key}": min(size, _scaled(size, factor)) for key, size in widths.items()}
    return keys


def _experts(model: ModelConfig, moe: MoEConfig, dim: int) -> dict[str, Any]:
    groups, factor = _few(moe.n_expert_groups), Fraction(min(dim, 32), model.dim)
    n_experts = moe.n_experts if moe.n_experts <= 8 else groups * _few(moe.n_experts // groups)
    while n_experts < 8 and moe.n_experts % (2 * n_experts) == 0:
        n_experts *= 2
    limited = groups
    if moe.n_limited_groups < moe.n_expert_groups:
        limited = max(1, min(groups - 1, moe.n_limited_groups * groups // moe.n_expert_groups))
    return {
        "n_experts": n_experts,
        "n_expert_groups": groups,
        "n_limited_groups": limited,
        "top_k": min(moe.top_k, max(1, n_experts // 2), limited * n_experts // groups),
        "n_shared_experts": min(moe.n_shared_experts, 2),
        "expert_dim": _scaled(moe.expert_dim, factor),
        "latent_dim": _scaled(moe.latent_dim, factor) if moe.latent_dim else 0,
        "every": min(moe.every, 2),
        "n_dense_layers": min(moe.n_dense_layers, 1 if moe.n_dense_layers < model.n_layers else LAYERS),
        "capacity_factor": 0.0,
        "router_noise": 0.0,
    }


def _training(config: Config) -> dict[str, Any]:
    muon = config.optimizer.muon
    return {
        "optimizer.muon.qk_clip": min(muon.qk_clip, QK_CLIP),
        "train.seq_len": SEQ_LEN,
        "train.global_batch_size": BATCH,
        "train.micro_batch_size": 2,
        "train.loss_chunk_tokens": min(config.train.loss_chunk_tokens, 48),  # some chunks end within a row
        "train.tokens": 0,
        "data.sources": [{"path": "synthetic"}],
        "data.packing": "stream",
        "data.temperature": 0.0,
        # 10 held-out sequences: not a multiple of the microbatches of several ranks.
        "data.validation": [{"name": "held out", "path": "synthetic"}],
        "evaluate.interval": 1,
        "evaluate.sequences": 10,
        "data.tokenizer": "none",
    }


def _phases(config: Config, seq_len: int) -> list[dict[str, Any]]:
    """Return the phases with batch sizes and lengths scaled to the small configuration.

    If a phase's value equals the value outside of phases, it becomes the small configuration's value. A lower value becomes
    half of the small value, a higher value twice the small value. A phase's sequence length is never higher, because it
    must divide train.seq_len.
    """
    found = []
    for phase in config.phase:
        table = phase.model_dump(mode="json", exclude_none=True, exclude={"weights"})
        for key, there, small in (
            ("global_batch_size", config.train.global_batch_size, (BATCH // 2, BATCH, 2 * BATCH)),
            ("seq_len", config.train.seq_len, (seq_len // 2, seq_len, seq_len)),
            ("sliding_window", config.model.sliding_window, (seq_len // 8, seq_len // 4, seq_len // 2)),
        ):
            if key in table:
                table[key] = small[(table[key] >= there) + (table[key] > there)]
        table["micro_batch_size"] = 1 if table.get("global_batch_size") == BATCH // 2 else 2
        found.append(table)
    _let_end(found, BATCH, seq_len)
    return found


def _let_end(phases: list[dict[str, Any]], batch: int, seq_len: int) -> None:
    """Set `until_tokens` of each phase, in place, so that the phase has one step, or two with a ramp.

    batch, seq_len: for phases that do not set these sizes.
    """
    tokens, before = 0, batch
    for phase in phases:
        rows, length = phase.get("global_batch_size", batch), phase.get("seq_len", seq_len)
        tokens += (2 * before if phase["ramp"] == "linear" else rows) * length
        phase["until_tokens"], before = tokens, rows


def _layout(config: Config) -> dict[str, Any]:
    keys: dict[str, Any] = {f"parallel.{axis}": 1 for axis in DEGREES}
    keys |= {"parallel.async_tp": False, "parallel.symmetric_memory": False, "parallel.ep_node_size": "auto"}
    if config.parallel.bucket_size == "auto":
        keys["parallel.bucket_size"] = 3000  # small enough for several buckets
    if isinstance(config.parallel.reshard_after_forward, int):
        keys["parallel.reshard_after_forward"] = "always"
    chosen = config.pipeline
    if chosen.layers_per_stage or chosen.schedule.endswith(".csv"):
        keys |= {"pipeline.module_names": [], "pipeline.layers_per_stage": 0}
    if chosen.schedule.endswith(".csv"):
        keys["pipeline.schedule"] = "1F1B"
    return keys


def _left_out(config: Config) -> dict[str, Any]:
    """Return overrides that turn off features that need a compiler, package or kernel, or depend on the layout."""
    keys: dict[str, Any] = {"precision.float8": "none"}
    keys |= {"compile.enabled": False, "compile.loss": False, "compile.optimizer": False}
    if config.activation_checkpoint.mode == "memory_budget":
        keys["activation_checkpoint.mode"] = "full"
    if config.precision.float8_all_gather is True:
        keys["precision.float8_all_gather"] = "auto"
    if config.precision.float8_emulate is False:
        keys["precision.float8_emulate"] = "auto"
    return keys | {
        "evaluate.sample_interval": 0,
        "evaluate.tasks": [],
        "metrics.wandb": "",
        "metrics.mlflow": "",
    }


def _multiple(least: int, unit: int) -> int:
    """Return `least` rounded up to a multiple of `unit`."""
    return -(-least // unit) * unit


def _few(number: int) -> int:
    """Return 4 if it divides `number`, otherwise the smallest divisor above 1. For `number` 1, return 1."""
    if number % 4 == 0:
        return 4
    return next((n for n in range(2, number + 1) if number % n == 0), 1)


def _scaled(size: int, factor: Fraction) -> int:
    """Return `size` times `factor`, rounded up, at least 8.

    `gcd(result, 8)` equals `gcd(size, 8)`.
    """
    unit = gcd(size, 8)
    units = max(8 // unit, ceil(size * factor / unit))
    return unit * (units + (unit < 8 and units % 2 == 0))


def _even(size: Fraction) -> int:
    """Return `size` rounded to a multiple of 4, at least 8."""
    return max(8, round(size / 4) * 4)
