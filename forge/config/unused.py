"""Valid keys that the chosen options do not use: no error, but named in one line when a run starts."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from typing import Any

from forge.config.keys import sections
from forge.config.model import MLAConfig
from forge.config.schema import Config, OptimizerConfig

# (keys, what makes them unused, whether it holds). A key is not named while it has its default, which asks for nothing.
RULES: tuple[tuple[str, str, Callable[[Config], bool]], ...] = (
    ("data.validation evaluate.sequences", "evaluate.interval is 0", lambda c: not c.evaluate.interval),
    (
        "evaluate.interval evaluate.sequences",
        "data.validation is empty",
        lambda c: bool(c.evaluate.interval) and not c.data.validation,
    ),
    (
        "evaluate.tasks_interval evaluate.tasks_path evaluate.tasks_limit",
        "evaluate.tasks is empty",
        lambda c: not c.evaluate.tasks,
    ),
    (
        "resilience.drain_stragglers",
        "resilience.straggler_interval is 0",
        lambda c: not c.resilience.straggler_interval,
    ),
    (
        "checkpoint.local_dir checkpoint.peers",
        "checkpoint.local_interval is 0",
        lambda c: not c.checkpoint.local_interval,
    ),
    (
        "evaluate.sample_prompt evaluate.sample_tokens evaluate.sample_temperature",
        "evaluate.sample_interval is 0",
        lambda c: not c.evaluate.sample_interval,
    ),
    (
        "evaluate.sample_interval",
        "there is no tokenizer",
        lambda c: c.data.tokenizer == "none" or _synthetic(c),
    ),
    (
        "data.tokenizer",
        "all data.sources are synthetic",
        lambda c: c.data.tokenizer != "none" and _synthetic(c),
    ),
    (
        "data.cache_dir data.cache_gib",
        "no source is a URL",
        lambda c: not any("://" in stream.path for stream in (*c.data.sources, *c.data.validation)),
    ),
    ("data.at_cap", "no source has max_epochs", lambda c: not any(s.max_epochs for s in c.data.sources)),
    ("data.temperature", "there is one source", lambda c: sum(s.weight > 0 for s in c.data.sources) == 1),
    ("data.mixture_block", "there is one source", lambda c: sum(s.weight > 0 for s in c.data.sources) == 1),
    (
        "model.rope_fraction model.qk_norm",
        "model.attention is mla",
        lambda c: c.model.latent is not None,
    ),
    (
        "model.n_kv_heads",
        "model.attention is mla",
        lambda c: c.model.latent is not None and c.model.n_kv_heads != c.model.n_heads,
    ),
    (
        "model.head_dim",
        "model.attention is mla",
        lambda c: c.model.latent is not None and c.model.head_dim * c.model.n_heads != c.model.dim,
    ),
    (
        " ".join(f"model.mla.{key}" for key in MLAConfig.model_fields),
        "model.attention is not mla",
        lambda c: c.model.latent is None,
    ),
    (
        "model.rope_scaling.mscale_all_dim",
        "model.attention is not mla",
        lambda c: c.model.latent is None,
    ),
    (
        "model.sliding_window_pattern",
        "model.layer_pattern is set",
        lambda c: bool(c.model.layer_pattern),
    ),
    (
        "model.sliding_window_pattern model.sliding_rope_theta",
        "model.sliding_window is 0",
        lambda c: not c.model.sliding_window,
    ),
    (
        "model.sliding_window model.sliding_rope_theta",
        "model.layer_pattern has no sliding layer",
        lambda c: "sliding" not in c.model.pattern,
    ),
    (
        "model.activation_limit",
        "model.activation is not clamped_swiglu",
        lambda c: c.model.activation != "clamped_swiglu",
    ),
    ("model.qk_norm_over", "model.qk_norm is false", lambda c: not c.model.qk_norm),
    (
        "model.rope_scaling.low_freq_factor model.rope_scaling.high_freq_factor",
        "model.rope_scaling.kind is not llama3",
        lambda c: c.model.rope_scaling is not None and c.model.rope_scaling.kind != "llama3",
    ),
    (
        "model.rope_scaling.beta_fast model.rope_scaling.beta_slow model.rope_scaling.attention_factor "
        "model.rope_scaling.mscale_all_dim model.rope_scaling.truncate",
        "model.rope_scaling.kind is not yarn",
        lambda c: c.model.rope_scaling is not None and c.model.rope_scaling.kind != "yarn",
    ),
    (
        "model.rope_scaling.original_max_position",
        "model.rope_scaling.kind is linear",
        lambda c: c.model.rope_scaling is not None and c.model.rope_scaling.kind == "linear",
    ),
    (
        "model.moe.aux_loss_coef",
        "model.moe.balance adds no loss",
        lambda c: c.model.moe is not None and c.model.moe.balance in ("bias", "none"),
    ),
    (
        "model.moe.bias_update_rate",
        "model.moe.balance is not bias",
        lambda c: c.model.moe is not None and c.model.moe.balance != "bias",
    ),
    ("metrics.monitors", "metrics.monitor_interval is 0", lambda c: not c.metrics.monitor_interval),
    (
        "parallel.ep metrics.expert_map_interval",
        "there is no [model.moe]",
        lambda c: c.model.moe is None,
    ),
    (
        "parallel.sequence_parallel parallel.loss_parallel parallel.tp_plan parallel.tp_plan_styles parallel.async_tp",
        "parallel.tp is 1",
        lambda c: c.parallel.tp == 1,
    ),
    ("parallel.context", "parallel.cp is 1", lambda c: c.parallel.cp == 1),
    (
        "pipeline.schedule pipeline.layers_per_stage pipeline.module_names pipeline.round",
        "parallel.pp is 1",
        lambda c: c.parallel.pp == 1,
    ),
    (
        "pipeline.round",
        "pipeline.layers_per_stage is 0",
        lambda c: c.parallel.pp > 1 and not c.pipeline.layers_per_stage,
    ),
    (
        "parallel.reshard_after_forward",
        "parallel.data_parallel is not fsdp2",
        lambda c: c.parallel.data_parallel != "fsdp2",
    ),
    (
        "precision.float8_all_gather precision.float8_exclude",
        "precision.float8 is none",
        lambda c: c.precision.float8 == "none",
    ),
    (
        "activation_checkpoint.modules activation_checkpoint.every",
        "activation_checkpoint.mode is not full or selective",
        lambda c: c.activation_checkpoint.mode not in ("full", "selective"),
    ),
    (
        "activation_checkpoint.memory_budget",
        "activation_checkpoint.mode is not memory_budget",
        lambda c: c.activation_checkpoint.mode != "memory_budget",
    ),
    (
        "compile.backend",
        "nothing is compiled",
        lambda c: not (c.compile.enabled or c.compile.loss or c.compile.optimizer),
    ),
    ("optimizer.no_decay", "optimizer.weight_decay is 0", lambda c: not c.optimizer.weight_decay),
    (
        "optimizer.mup.base_dim optimizer.mup.base_head_dim",
        "optimizer.parametrization is standard",
        lambda c: c.optimizer.parametrization == "standard",
    ),
    (
        "optimizer.mup.base_depth",
        "optimizer.parametrization is not completep",
        lambda c: c.optimizer.parametrization != "completep",
    ),
    ("schedule.unit schedule.lr_rule", "there is no [[phase]]", lambda c: not c.phase),
    ("optimizer.eps", "optimizer.name is lion", lambda c: c.optimizer.name == "lion"),
    (
        "schedule.decay_fraction schedule.decay_shape",
        "schedule.name is not wsd",
        lambda c: c.schedule.name != "wsd",
    ),
    (
        "checkpoint.interval_minutes",
        "checkpoint.interval is set",
        lambda c: c.checkpoint.interval is not None,
    ),
    ("checkpoint.init_changes", "checkpoint.init is empty", lambda c: not c.checkpoint.init),
    ("schedule.min_lr_ratio", "schedule.name is constant", lambda c: c.schedule.name == "constant"),
    ("profile.ranks profile.memory_snapshot", "profile.span is empty", lambda c: not c.profile.span),
    (
        "resilience.straggler_factor",
        "resilience.straggler_interval is 0",
        lambda c: not c.resilience.straggler_interval,
    ),
)


def unused_keys(config: Config, parameters: Iterable[str]) -> list[str]:
    """Return `keys (reason)` for what is set and has no effect. parameters: the names of the model's."""
    changed, found = _changed(config), []
    for keys, reason, holds in RULES:
        named = [key for key in keys.split() if key in changed]
        if named and holds(config):
            found.append(f"{', '.join(named)} ({reason})")
            changed.difference_update(named)
    if "optimizer.no_decay" in changed:
        names, usual = list(parameters), OptimizerConfig.model_fields["no_decay"].default
        globs = [
            glob
            for glob in config.optimizer.no_decay
            if glob not in usual and not any(fnmatchcase(name, glob) for name in names)
        ]
        found += [f'"{glob}" of optimizer.no_decay (matches no parameter)' for glob in globs]
    return found


def _changed(config: Config) -> set[str]:
    """Return the keys of present sections that have another value than their default."""
    changed = set()
    for section, table in sections(type(config)).items():
        value: Any = config
        for part in section.split("."):
            value = getattr(value, part, None)
        fields = table.model_fields if isinstance(value, table) else {}
        changed |= {
            f"{section}.{name}" for name, field in fields.items() if getattr(value, name) != field.default
        }
    return changed


def _synthetic(config: Config) -> bool:
    return all(source.path == "synthetic" for source in config.data.sources if source.weight)
