"""Random runs with random keys outside [model], and the metrics that must be equal under every layout.

A seed gives one run. If the configuration's checks refuse a draw, as they would refuse a user's configuration, the
generator draws again.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from forge.config import Config, parse_toml_text
from forge.config.keys import to_literal
from forge.runtime.errors import UserError
from forge.tools.verify.layouts import Case, at_random
from forge.tools.verify.shrink import changed
from tests.support.equivalence import tiny_config
from tests.support.random_models import draw_model, with_rounded_rows


def write_tokens(folder: Path) -> None:
    """Write raw token files with the vocabulary of `tiny_config`. Token 0 ends a document."""
    generator = np.random.default_rng(0)
    for name, size in (("a", 60_000), ("b", 30_000), ("held-out", 9_000)):
        ids = generator.integers(1, 67, size)
        ids[generator.integers(0, size, size // 30)] = 0
        ids.astype(np.uint16).tofile(folder / f"{name}.bin")


def draw_keys(generator: random.Random, folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Draw keys of a phase and of all sections except [model]: "section.key" -> value. The combination may be invalid."""

    def some(share: float = 0.5) -> bool:
        return generator.random() < share

    choose = generator.choice

    def source(name: str, **more: Any) -> dict[str, Any]:
        return {"path": str(folder / f"{name}.bin"), "dtype": "uint16", "eos_id": 0, "name": name, **more}

    sources = [source("a", weight=1.0), source("b", weight=0.5)][: choose([1, 2, 2])]
    keys: dict[str, Any] = {
        "data.sources": sources,
        "data.tokenizer": "none",
        "data.document_mask": some(),
        "data.mixture_block": choose([4, 16, 1024]),
        "train.steps": 4,
        "train.grad_clip_norm": choose([0.0, 0.5]),
        "train.loss_chunk_tokens": choose([16, 32, 1000]),
        "train.z_loss_coef": choose([0.0, 0.01]),
        "train.gc_interval": choose([0, 1, 100]),
        "optimizer.name": choose(["adamw", "muon", "lion"]),
        "optimizer.lr": 3e-3,
        "optimizer.parametrization": choose(["standard", "standard", "mup", "completep"]),
        "schedule.name": "constant",
        "schedule.warmup_steps": choose([0, 2]),
        "schedule.unit": choose(["steps", "tokens"]),
        "checkpoint.mode": choose(["async", "sync"]),
        "checkpoint.interval": choose([1, 2]),
        "metrics.log_interval": 1,
        "metrics.expert_map_interval": 1,
        "metrics.tensorboard": False,
        "metrics.sources": some(0.4),
        "metrics.monitor_interval": choose([0, 1, 2]),
        "resilience.check_replicas": some(),
    }
    if some(0.3):
        keys["optimizer.ema"] = 0.9
    if keys["optimizer.parametrization"] != "standard":
        keys["optimizer.mup.base_dim"] = 16
    if keys["optimizer.parametrization"] == "completep":
        keys["optimizer.mup.base_depth"] = 1
    if keys["optimizer.name"] == "adamw":
        keys["optimizer.moment_dtype"] = choose(["float32", "bfloat16", "int8"])
    elif keys["optimizer.name"] == "lion":
        keys["optimizer.moment_dtype"] = choose(["float32", "bfloat16"])
    else:
        keys |= {
            "optimizer.muon.orthogonalization": choose(["newton_schulz", "polar_express"]),
            "optimizer.muon.second_moment": choose(["none", "neuron"]),
            "optimizer.muon.cautious_decay": some(),
            "optimizer.muon.split_heads": some(),
            "optimizer.muon.qk_clip": choose([0.0, 0.0, 0.01]),
        }
    if some():
        keys |= {
            "data.validation": [source("held-out")],
            # The first of two starts also ends with an evaluation.
            "evaluate.interval": choose([1, 2]),
            "evaluate.sequences": choose([3, 5, 8]),
        }
    if some(0.3):
        keys["optimizer.groups"] = [
            {"names": ["*.wo.weight", "*.w2*"], "lr_scale": choose([0.0, 0.5])},
            {"names": ["*norm.weight", "*.w2*"], "weight_decay": 0.2},
        ]
    phase: dict[str, Any] = {}
    if some(0.4):
        possible = {
            "seq_len": 40,
            "global_batch_size": choose([4, 16]),
            "lr": 1e-3,
            "document_mask": some(),
            "weights": [0.2, 0.8][: len(sources)],
        }
        phase = {key: value for key, value in possible.items() if some()} | {
            "until_tokens": choose([640, 1280])
        }
    if some(0.25):
        # Layouts must not cut a block, so with these sizes only data, expert and pipeline parallelism are valid.
        keys["precision.float8"] = choose(["blockwise", "mxfp8"])
        keys["precision.float8_experts"] = choose(["auto", False])
    return keys, phase


def draw_run(seed: int, worlds: tuple[int, ...], folder: Path) -> tuple[Config, Case, Case]:
    """Draw a run in one process on the files of `write_tokens`, and two layouts for it. worlds: allowed world sizes."""
    generator = random.Random(seed)
    while True:
        model = draw_model(generator)
        keys, phase = draw_keys(generator, folder)
        with contextlib.suppress(UserError, StopIteration):
            lines = [f"{key} = {to_literal(value)}" for key, value in model.items()]
            tiny = parse_toml_text(tiny_config(model="\n".join(lines)))
            config = changed(tiny, keys | {"phase": [phase] if phase else []})
            config = with_rounded_rows(config, seed)
            layouts = at_random(config, worlds, generator.randrange(2**32))
            return config, next(layouts), next(layouts)


def numbers(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """Flatten lines of metrics.jsonl to "STEP NAME" -> number."""
    found = {}
    for line in lines:
        flat = dict(_flat(line))
        for name, value in flat.items():
            # The relative change of a weight that is 0 up to rounding is meaningless.
            weight = flat.get(name.replace("monitors.updates.", "monitors.weights."))
            if "monitors.updates." not in name or weight is None or weight > 1e-6:
                found[f"{line['step']} {name}"] = value
    return found


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict | list):
        parts = value.items() if isinstance(value, dict) else enumerate(value)
        for key, part in parts:
            yield from _flat(part, f"{name}.{key}" if name else str(key))
    else:
        yield name, value
