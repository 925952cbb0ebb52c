"""The notes of a small configuration: the keys whose changes leave a part of the user's configuration unverified."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from forge.config import Config
from forge.config.keys import to_literal
from forge.config.patterns import PATTERNS

DEGREES = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")
# Sections and keys whose changes need no note: sizes, data, formats and layout. The report's heading shows them.
TOLD = ("model", "train", "data", "evaluate", "metrics", "phase", *(f"parallel.{axis}" for axis in DEGREES))
TOLD += (
    "optimizer.mup",
    "parallel.bucket_size",
    "precision.storage",
    "precision.compute",
    "precision.reduce",
)
# Key -> reason for its change. The keys that neither TOLD nor REASONS lists get a note without a reason.
REASONS = {
    "activation_checkpoint.mode": "memory_budget needs the compiler",
    "compile.enabled": "nothing is compiled",
    "compile.loss": "nothing is compiled",
    "compile.optimizer": "nothing is compiled",
    "data.packing": "synthetic text has no packing plan",
    "data.temperature": "the mixture has one source",
    "model.moe.capacity_factor": "the layout decides which tokens are dropped",
    "model.moe.router_noise": "its noise depends on the layout",
    "optimizer.groups": "the small model has fewer layers",
    "optimizer.muon.qk_clip": "the small model has smaller logits",
    "optimizer.no_decay": "the small model has fewer layers",
    "parallel.async_tp": "it needs CUDA",
    "parallel.ep_node_size": "small worlds have no nodes; layouts set it",
    "parallel.reshard_after_forward": "small worlds do not have that many ranks",
    "parallel.symmetric_memory": "it needs CUDA",
    "parallel.tp_plan": "the small model has fewer layers",
    "pipeline.layers_per_stage": "the small model has other layers",
    "pipeline.module_names": "the small model has other layers",
    "pipeline.schedule": "the CSV file is for one number of stages",
    "precision.float8": "its scales depend on the layout",
    "precision.float8_all_gather": "one process has nothing to gather",
    "precision.float8_emulate": "float64 has no kernel",
    "precision.float8_exclude": "the small model has fewer layers",
    "precision.fp32_modules": "the small model has fewer layers",
    "precision.float8_dispatch": "except in float64, the order of sums changes the float8 codes",
}


def notes_on_changes(config: Config, small: Config) -> Iterator[str]:
    """Yield a note for each changed key, and for phases. Keys that TOLD lists and REASONS does not list are left out."""
    before, after = (dict(leaves(one.model_dump(mode="json"))) for one in (config, small))
    for key, value in before.items():
        told = key not in REASONS and any(f"{key}.".startswith(f"{one}.") for one in TOLD)
        if value != after[key] and not told:
            reason = f": {REASONS[key]}" if key in REASONS else ""
            yield f"{key} is {to_literal(after[key])}, not {to_literal(value)}{reason}"
    if config.phase:
        yield "each phase has one step (two with a ramp), and the mixture has one source"


def leaves(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted name, value) of all keys in `table` and in its tables. A table of patterns is one value."""
    for key, value in table.items():
        if isinstance(value, dict) and prefix + key not in PATTERNS:
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value
