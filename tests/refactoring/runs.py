"""The runs of the refactoring table. Together they use all numerical code of forge."""

from __future__ import annotations

from dataclasses import dataclass

# A model with steps of a few milliseconds, on synthetic data.
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
    """One start of the command on `world` ranks, with further options and a fault. code: expected exit code."""

    world: int = 1
    options: tuple[str, ...] = ()
    fault: str = ""
    code: int = 0


@dataclass(frozen=True)
class Run:
    """Phases in the same run directory.

    old: record the run directory after the first phase; the compared checkout also continues from it.
    events: required kinds of events. Without them, the run misses its purpose.
    """

    phases: tuple[Phase, ...]
    options: tuple[str, ...] = ()
    quick: bool = False
    old: bool = False
    events: tuple[str, ...] = ()


RUNS: dict[str, Run] = {}


def run(name: str, world: int, options: str = "", *, quick: bool = False, old: bool = False) -> None:
    """Add a run; `options` are the arguments of train.py without their `--`, separated by spaces.

    old: a signal stops the run halfway, and a second phase continues it.
    """
    phases = (Phase(world, fault="step:3:*:signal", code=75), Phase(world)) if old else (Phase(world),)
    RUNS[name] = Run(phases, split(options), quick, old)


def split(options: str) -> tuple[str, ...]:
    return tuple(f"--{option}" for option in options.split())


BF16 = "precision.compute=bfloat16"
MOE = "model.moe.n_experts=4 model.moe.top_k=2 model.moe.expert_dim=32 metrics.expert_map_interval=2"
PP = "parallel.pp=2 train.micro_batch_size=1"
V = f"{PP} model.n_layers=4"
AOT = "compile.enabled=true compile.backend=aot_eager"
HELD_OUT = 'data.validation=[{name="held",path="synthetic"}] evaluate.interval=2 evaluate.sequences=8'
BUCKETS = f"parallel.bucket_size=3000 {BF16}"
HYBRID = "parallel.dp_replicate=2 parallel.dp_shard=2"

# One process: the model, data, optimizer, and one-process options of memory and speed.
run("dense", 1, "train.z_loss_coef=1e-3 schedule.name=cosine schedule.warmup_steps=2", quick=True)
run("bfloat16", 1, f"{BF16} optimizer.moment_dtype=bfloat16 schedule.name=linear optimizer.betas=[0.8,0.9]")
run("bfloat16 storage", 1, f"{BF16} precision.storage=bfloat16 train.grad_clip_norm=0")
run(
    "every model option",
    1,
    "model.qk_norm=true model.attention_bias=true model.tie_embeddings=true "
    "model.logit_soft_cap=5.0 model.attention_soft_cap=5.0 "
    "model.sliding_window=12 model.sliding_window_pattern=2",
)
run(
    "yarn",
    1,
    'model.rope_scaling={kind="yarn",factor=4.0,original_max_position=16} train.loss_chunk_tokens=16',
)
run(
    "llama3 rope, evaluation",
    1,
    f"{HELD_OUT} data.document_mask=true "
    'model.rope_scaling={kind="llama3",factor=4.0,original_max_position=16}',
)
run(
    "mixture of sources",
    1,
    "data.document_mask=true data.mixture_block=8 data.tokenizer=none data.sources=["
    '{path="synthetic",weight=2.0},{path="{work}/tokens.bin",dtype="uint16",eos_id=0,weight=1.0}]',
)
run("checkpointing, full", 1, "activation_checkpoint.mode=full activation_checkpoint.every=2")
run("checkpointing, selective", 1, f"activation_checkpoint.mode=selective {BF16}")
run("compile", 1, f"{AOT} compile.loss=true {BF16}")
run("float8, rowwise", 1, f"precision.float8=rowwise {BF16}")
run(
    "moe, shared expert, wsd",
    1,
    f"{MOE} model.moe.n_shared_experts=1 schedule.decay_fraction=0.5 schedule.name=wsd",
)
run(
    "moe, aux loss, groups",
    1,
    f"{MOE} model.moe.balance=aux_loss model.moe.n_expert_groups=2 "
    "model.moe.n_limited_groups=1 model.moe.z_loss_coef=0.1 model.moe.score_function=sigmoid",
)
run(
    "moe, sequence loss, capacity",
    1,
    f"{MOE} model.moe.balance=sequence_aux_loss model.moe.capacity_factor=1.0 "
    f"model.moe.router_noise=0.1 model.moe.n_dense_layers=1 {BF16}",
)
run("moe, checkpointing, compile", 1, f"{MOE} {AOT} activation_checkpoint.mode=selective")

# Engines of data parallelism, each with two microbatches per step.
run("fsdp2", 2, BF16, quick=True)
run("fsdp2, deferred", 2, "parallel.defer_gradient_reduction=true parallel.prefetch=0")
run("fsdp2, offload, checkpointing", 2, "parallel.cpu_offload=true activation_checkpoint.mode=full")
run("fsdp2, float8", 2, f"precision.float8=tensorwise {BF16}")
run("fsdp2, compile", 2, f"{AOT} parallel.reshard_after_forward=never")
run("zero1", 2, f"parallel.data_parallel=zero1 {BUCKETS}", quick=True)
run(
    "zero1, no overlap",
    2,
    "parallel.data_parallel=zero1 parallel.overlap_gradients=false "
    "parallel.overlap_parameters=false parallel.check_gradients=finite parallel.bucket_size=0",
)
run("zero2", 2, f"parallel.data_parallel=zero2 {BUCKETS} precision.reduce=bfloat16")
run("ddp", 2, f"parallel.data_parallel=ddp {BUCKETS} {HELD_OUT}")
run("hsdp", 4, f"{HYBRID} parallel.reshard_after_forward=always")
run("zero1, hybrid", 4, f"{HYBRID} parallel.data_parallel=zero1 parallel.shard_optimizer_over=dp {BF16}")

# Tensor, context, expert and pipeline parallelism.
run("tp 2, sequence parallel", 2, "parallel.tp=2 model.qk_norm=true", quick=True)
run(
    "tp 2",
    2,
    "parallel.tp=2 parallel.sequence_parallel=false parallel.loss_parallel=false model.tie_embeddings=true",
)
run("tp 2, zero1", 2, f"parallel.tp=2 parallel.data_parallel=zero1 model.tie_embeddings=true {BF16}")
run("tp 2, moe", 2, f"{MOE} parallel.tp=2 model.moe.n_shared_experts=1 activation_checkpoint.mode=selective")
run("cp 2, allgather", 2, "parallel.cp=2 data.document_mask=true")
run("cp 2, ulysses", 2, f"parallel.cp=2 parallel.context=ulysses {BF16}")
run("cp 2, ring", 2, "parallel.cp=2 parallel.context=ring", quick=True)
run("ep 2", 2, f"{MOE} parallel.ep=2", quick=True)
run(
    "ep 2, zero2", 2, f"{MOE} parallel.ep=2 parallel.data_parallel=zero2 {BUCKETS} model.moe.balance=aux_loss"
)
run("pp 2, 1F1B", 2, f"{PP} model.tie_embeddings=true", quick=True)
run("pp 2, interleaved", 2, f"{V} pipeline.schedule=Interleaved1F1B {HELD_OUT}")
run("pp 2, zero bubble", 2, f"{V} pipeline.schedule=InterleavedZeroBubble {BF16}")
run("pp 2, V", 2, f"{V} {MOE} pipeline.schedule=ZBVZeroBubble model.tie_embeddings=true")

# Combinations of them.
run("tp 2, pp 2", 4, f"{PP} parallel.tp=2 {BF16}")
run("tp 2, cp 2", 4, "parallel.tp=2 parallel.cp=2 parallel.context=ring model.qk_norm=true")
run("tp 2, ep 2, dp 2", 4, f"{MOE} parallel.tp=2 parallel.ep=2")
run("pp 2, ep 2, dp 2, V", 4, f"{V} {MOE} parallel.ep=2 pipeline.schedule=DualPipeV")
run("pp 2, cp 2, zero1", 4, f"{PP} parallel.cp=2 parallel.data_parallel=zero1 {BUCKETS}")

# Stopped halfway by a signal, then continued.
run("fsdp2, continued", 2, f"schedule.name=cosine {HELD_OUT}", quick=True, old=True)
run("moe, ep 2, continued", 2, f"{MOE} parallel.ep=2 {BF16} optimizer.moment_dtype=bfloat16", old=True)
run("zero1, continued", 2, f"parallel.data_parallel=zero1 {BUCKETS}", old=True)
run("pp 2, continued", 2, f"{V} pipeline.schedule=Interleaved1F1B model.tie_embeddings=true", old=True)

# Saved under one layout, continued under another.
RUNS["through layouts"] = Run(
    (
        Phase(2, split("train.steps=2")),
        Phase(2, split("train.steps=3 parallel.tp=2")),
        Phase(2, split(f"train.steps=4 {PP}")),
        Phase(1, split("train.steps=5 parallel.data_parallel=zero1")),
        Phase(4, split("train.steps=6 parallel.dp_replicate=2 parallel.cp=2 parallel.data_parallel=zero2")),
    )
)
RUNS["moe, through layouts"] = Run(
    (
        Phase(2, split("train.steps=2 parallel.ep=2")),
        Phase(2, split(f"train.steps=4 {PP}")),
        Phase(1, split("train.steps=6")),
    ),
    split(MOE),
)
RUNS["weights of another run"] = Run(
    (
        Phase(2, split("run.name=first train.steps=2")),
        Phase(1, split("checkpoint.init={work}/first/checkpoints/step-00000002")),
    )
)

# Failures. Saves are synchronous, so the last checkpoint before the failure is always the same.
SAVES = "checkpoint.interval=2 checkpoint.mode=sync"
RUNS["killed"] = Run((Phase(2, fault="step:4:0", code=-9), Phase(2)), split(f"{SAVES} {MOE}"))
SPIKES = f"{SAVES} train.steps=9 resilience.spike_window=4 resilience.spike_threshold=0.3"
for policy, event in (("skip", "skipped"), ("rollback", "rolled_back")):
    options = f"{SPIKES} resilience.spikes={policy} resilience.max_rollbacks=5"
    RUNS[f"spikes, {policy}"] = Run((Phase(2),), split(options), events=(event,))
RUNS["diverged"] = Run(
    (Phase(2, code=1),),
    split("optimizer.lr=1e30 resilience.max_skipped_steps=2 checkpoint.interval=1 checkpoint.mode=sync"),
    events=("skipped", "rolled_back"),
)
