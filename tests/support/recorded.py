"""Write an artificial run directory with every kind of line and event read by a report or a diagnosis."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

PARAMETERS = ("attention.wq", "attention.wo", "feed_forward.w1")
LAYERS = 3
CONFIG = """
[model]
dim = 32
n_layers = 3
n_heads = 4
n_kv_heads = 2
ffn_dim = 48
vocab_size = 64
[data]
sources = [{{ path = "synthetic", weight = 1.0 }}]
[train]
steps = {steps}
seq_len = 32
global_batch_size = 8
micro_batch_size = 1
[optimizer]
lr = 0.001
"""
# The part of `train.py --plan --json` read by a report.
PLAN: dict[str, Any] = {
    "memory": dict.fromkeys(("masters", "gradients", "optimizer", "buckets", "other"), 0)
    | {"parameters": 2**26, "activations": 2**25, "peak": 2**28},
    "time": {"step_s": 0.04},
}


def write_lines(path: Path, lines: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def write_run(
    folder: Path,
    *,
    steps: int = 60,
    bad_layer: int | None = None,
    noise: bool = False,
    slow: int | None = None,
) -> Path:
    """Write a run of `steps` steps.

    Layer `bad_layer` has a hundred times the update of the other layers. Source `b` is `noise`. Rank `slow` is a straggler.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lines: list[dict[str, Any]] = []
    for step in range(1, steps + 1):
        loss = 2.0 + 6.0 * math.exp(-step / 20)
        line = {"step": step, "loss": loss, "grad_norm": 1 + 1 / step, "lr": 1e-3, "tokens": 4096 * step}
        line |= {"tokens_per_second": 9e4, "step_time_s": 0.05, "data_time_s": 0.001, "memory_gib": 0.4}
        line |= {"sources": {"a": loss, "b": 8.3 if noise else loss + 0.2}}
        line |= {"positions": [loss + 1 / (1 + part) for part in range(16)]}
        line |= {"expert_load_max": 1.4, "expert_load_min": 0.6, "routers": _routers(step)}
        lines.append(line)
        if step % 10 == 0:
            lines.append({"step": step, "monitors": _monitors(step, bad_layer)})
            lines.append({"step": step, "eval": {"held": loss + 0.1}})
        if step % 30 == 0:
            lines.append({"step": step, "text": {"sample": "def <b>main</b>():\n    return 0"}})
    write_lines(folder / "metrics.jsonl", lines)
    layout = {"pp": 1, "dp_replicate": 1, "dp_shard": 2, "cp": 1, "tp": 1, "ep": 1, "accumulation": 4}
    environment = {"forge": "0.1.0", "python": "3.11.2", "torch": "2.13.0", "device": "CPU"}
    seconds = {"steps": 50.0, "set-up": 3.0, "first step": 1.0, "data": 0.5, "evaluation": 2.0, "save": 1.0}
    happened: list[dict[str, Any]] = [
        {
            "event": "started",
            "world_size": 2,
            "launcher": "torchrun",
            "layout": layout,
            "data_parallel": "zero1",
            "environment": environment,
        },
        {"event": "fresh", "step": 0, "path": None},
        {"event": "memory", "parameters_bytes": 2**26, "gradients_bytes": 2**26, "optimizer_bytes": 2**27},
        {"event": "saved", "step": 20, "seconds": 0.3, "error": None},
        {"event": "skipped", "step": 31, "loss": None, "grad_norm": None, "first_sample": 480},
        {"event": "goodput", "step": steps, "goodput": 0.86, "seconds": seconds},
        {"event": "finished", "step": steps, "reason": "all steps done", "exit_code": 0},
    ]
    if slow is not None:
        late = {"rank": slow, "phase": "forward", "seconds": 0.5, "median_s": 0.2}
        happened[5:5] = [{"event": "straggler", "step": step, **late} for step in (40, 50)]
    write_lines(
        folder / "events.jsonl",
        [{"time": f"2026-01-01T00:{at:02}:00.000+00:00"} | event for at, event in enumerate(happened)],
    )
    status = {
        "state": "finished",
        "step": steps,
        "reason": "all steps done",
        "exit_code": 0,
        "host": "one",
        "pid": 7,
    }
    (folder / "status.json").write_text(json.dumps(status))
    (folder / "config.toml").write_text(CONFIG.format(steps=steps))
    return folder


def _monitors(step: int, bad_layer: int | None) -> dict[str, Any]:
    names = [f"layers.{layer}.{name}.weight" for layer in range(LAYERS) for name in PARAMETERS]
    ratio = {name: 1e-3 * (100 if name.startswith(f"layers.{bad_layer}.") else 1) for name in names}
    layers = {str(layer): {"rms": 1.0 + layer, "max": 9.0 + step / 10} for layer in range(LAYERS)}
    return {
        "activations": layers,
        "attention": {str(layer): {"max_logit": 12.0, "entropy": 3.0} for layer in range(LAYERS)},
        "units": {str(layer): {"dead": 0.01, "saturated": 0.0} for layer in range(LAYERS)},
        "experts": {str(layer): {"score_entropy": 0.9, "load_entropy": 0.97} for layer in (1, 3)},
        "gradients": dict.fromkeys(names, 0.1),
        "weights": dict.fromkeys(names, 0.02),
        "updates": ratio,
    }


def _routers(step: int) -> dict[str, Any]:
    one = {
        "load_max": 1.4 + 1 / step,
        "load_min": 0.6,
        "load_entropy": 0.97,
        "bias_min": 0.0,
        "bias_max": 0.0,
    }
    counts = {"counts": [10, 20, 5, 12]} if step % 20 == 0 else {}
    return {"1": one | counts, "3": one | counts}
