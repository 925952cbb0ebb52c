"""The runs of the refactoring table: between them they use every part of forge that computes a number."""

from __future__ import annotations

from dataclasses import dataclass

# A model that steps in a few milliseconds, on data without a file.
CONFIG = """
[model]
dim = 32
n_layers = 2
n_heads = 4
n_kv_heads = 2
ffn_dim = 64
vocab_size = 64

[data]
sources = [{ path = "synthetic", weight = 1.0 }]

[train]
steps = 6
seq_len = 32
global_batch_size = 8
micro_batch_size = 2

[optimizer]
lr = 3e-3

[schedule]
name = "constant"

[precision]
compute = "float32"

[metrics]
log_interval = 1
tensorboard = false
"""


@dataclass(frozen=True)
class Phase:
    """One start of the command: on `world` ranks, with more options, with a fault, with the exit code that it must have."""

    world: int = 1
    options: tuple[str, ...] = ()
    fault: str = ""
    code: int = 0


@dataclass(frozen=True)
class Run:
    """Phases in the same run directory.

    `old`: the run directory after the first phase is recorded, and the compared checkout also continues from there.
    """

    phases: tuple[Phase, ...]
    options: tuple[str, ...] = ()
    quick: bool = False
    old: bool = False


RUNS: dict[str, Run] = {}


def run(name: str, world: int, options: str = "", *, quick: bool = False) -> None:
    """Add a run of one phase; `options` is the command line after `--`, split at spaces."""
    RUNS[name] = Run((Phase(world),), split(options), quick)


def split(options: str) -> tuple[str, ...]:
    return tuple(f"--{option}" for option in options.split())


MOE = "model.moe.n_experts=4 model.moe.top_k=2 model.moe.expert_dim=32 metrics.expert_map_interval=2"
PP = "parallel.pp=2 train.micro_batch_size=1"
STOP = "step:3:*:signal"  # the run finishes a step or two, saves, and exits with 75

# One process.
run("dense", 1, "train.z_loss_coef=1e-3 schedule.name=cosine schedule.warmup_steps=2", quick=True)
run("dense, bfloat16", 1, "precision.compute=bfloat16 optimizer.moment_dtype=bfloat16 model.qk_norm=true")
run("moe", 1, f"{MOE} model.moe.n_shared_experts=1 schedule.name=wsd schedule.decay_fraction=0.5")

# Data parallel engines.
BUCKETS = "parallel.bucket_size=3000 precision.compute=bfloat16"
run("fsdp2", 2, "precision.compute=bfloat16", quick=True)
run("zero1", 2, f"parallel.data_parallel=zero1 {BUCKETS}", quick=True)
run("zero2", 2, f"parallel.data_parallel=zero2 {BUCKETS}")
run("ddp", 2, f"parallel.data_parallel=ddp {BUCKETS}")

# Tensor, context, expert and pipeline parallel.
run("tp 2, sequence parallel", 2, "parallel.tp=2 model.qk_norm=true", quick=True)
run("cp 2, ring", 2, "parallel.cp=2 parallel.context=ring", quick=True)
run("ep 2", 2, f"{MOE} parallel.ep=2", quick=True)
run("pp 2, 1F1B", 2, PP, quick=True)

# Stopped halfway by a signal, then continued.
RUNS["fsdp2, stopped and continued"] = Run((Phase(2, fault=STOP, code=75), Phase(2)), quick=True, old=True)
