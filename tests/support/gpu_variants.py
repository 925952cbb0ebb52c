"""Runs for the simulated GPU: one variant for each feature, engine and axis."""

from __future__ import annotations

from pathlib import Path

from forge.checkpoint.folders import step_name
from tests.support import runs
from tests.support.gpus import ON_THE_CPU

# A model whose sizes every kernel accepts.
BASE = [
    *runs.BASE,
    "--model.dim=64",
    "--model.ffn_dim=128",
    "--model.vocab_size=256",
    "--precision.compute=bfloat16",
    "--train.seq_len=128",
    "--train.steps=4",
    "--checkpoint.interval=0",
    '--train.hooks=["tests.simulated_gpu.counting:Counting"]',
]
MOE = ["--model.moe.n_experts=8", "--model.moe.top_k=2", "--model.moe.expert_dim=64"]
MLA = [
    "--model.attention=mla",
    "--model.mla.q_lora_rank=32",
    "--model.mla.kv_lora_rank=32",
    "--model.mla.qk_nope_head_dim=16",
    "--model.mla.qk_rope_head_dim=16",
    "--model.mla.v_head_dim=16",
]
LINEAR = [
    '--model.layer_pattern=["linear","full"]',
    "--model.linear_attention.n_key_heads=2",
    "--model.linear_attention.n_value_heads=4",
    "--model.linear_attention.key_head_dim=16",
    "--model.linear_attention.value_head_dim=16",
]
RESIDUALS = ["--model.residual=attention", "--model.residual_block_size=1"]
LATENT_EXPERTS = [*MOE, "--model.moe.latent_dim=32", "--model.moe.n_shared_experts=1"]
K3 = [
    *MLA,
    '--model.layer_pattern=["linear","nope"]',
    "--model.attention_gate=element",
    "--model.linear_attention.kind=kimi_delta",
    "--model.linear_attention.n_key_heads=4",
    "--model.linear_attention.key_head_dim=16",
    "--model.linear_attention.full_rank_gate=true",
    "--model.linear_attention.decay_bound=5.0",
    *RESIDUALS,
    *LATENT_EXPERTS,
    "--model.moe.balance=quantile",
    "--model.moe.score_function=sigmoid",
    "--model.activation=situ",
]
DOCUMENTS = ["--data.document_mask=true"]
# In the model of BASE, every storage is below the smallest size for offloading.
LARGER = ["--model.dim=512", "--model.ffn_dim=1024", "--model.n_layers=4", "--train.seq_len=1024"]
OFFLOADED = [*LARGER, "--activation_checkpoint.mode=offload"]
WINDOW = ['--model.layer_pattern=["sliding","full"]', "--model.sliding_window=32"]

ONE: dict[str, list[str]] = {
    "dense": [],
    "float32": ["--precision.compute=float32"],
    "all bfloat16": ["--precision.storage=bfloat16", "--optimizer.moment_dtype=bfloat16"],
    "tied": ["--model.tie_embeddings=true"],
    "biases and norms": [
        "--model.attention_bias=true",
        "--model.qk_norm=true",
        "--model.norm_position=sandwich",
        "--model.ffn_bias=true",
    ],
    "documents": DOCUMENTS,
    # Below 128 tokens, PyTorch prefers a kernel for decoding.
    "short documents": [*DOCUMENTS, "--train.seq_len=64"],
    "window": WINDOW,
    "window with documents": WINDOW + DOCUMENTS,
    "soft caps": ["--model.attention_soft_cap=20.0", "--model.logit_soft_cap=30.0"],
    "sinks": ["--model.attention_sinks=true"],
    "narrow heads": [*WINDOW, "--model.head_dim=8", "--model.attention_sinks=true"],
    "gate": ["--model.attention_gate=element"],
    "mla": MLA,
    "mla with documents": MLA + DOCUMENTS,
    "mtp": ["--model.mtp.depth=2"],
    "gated delta": [*LINEAR, "--model.linear_attention.kind=gated_delta"],
    "kimi delta": [*LINEAR, "--model.linear_attention.kind=kimi_delta"],
    "gated delta with documents": [*LINEAR, *DOCUMENTS],
    "experts": MOE,
    "experts with shared ones": [*MOE, "--model.moe.n_shared_experts=1", "--model.moe.balance=aux_loss"],
    "experts in groups": [
        *MOE,
        "--model.moe.n_expert_groups=4",
        "--model.moe.n_limited_groups=2",
        "--model.moe.score_function=sigmoid",
    ],
    "experts with capacity": [*MOE, "--model.moe.capacity_factor=1.5"],
    "experts with biases": [*MOE, "--model.moe.expert_bias=true", "--model.moe.router_bias=true"],
    "experts in float32": [*MOE, "--precision.compute=float32"],
    "attention residuals": RESIDUALS,
    "attention residuals, recomputed": [*RESIDUALS, "--activation_checkpoint.mode=full"],
    "latent experts": LATENT_EXPERTS,
    "quantile balancing": [*MOE, "--model.moe.balance=quantile"],
    "the parts of kimi k3": K3,
    "z-loss": ["--train.z_loss_coef=0.001"],
    "recompute": ["--activation_checkpoint.mode=full"],
    "recompute selectively": ["--activation_checkpoint.mode=selective"],
    "experts, recomputed": [*MOE, "--activation_checkpoint.mode=full"],
    "activation offload": OFFLOADED,
    "activation offload, experts": [*OFFLOADED, *MOE],
    "bfloat16 moments": ["--optimizer.moment_dtype=bfloat16"],
    "int8 moments": ["--optimizer.moment_dtype=int8"],
    "lion": ["--optimizer.name=lion"],
    "muon": ["--optimizer.name=muon"],
    "muon with all options": [
        "--optimizer.name=muon",
        "--optimizer.muon.second_moment=neuron",
        "--optimizer.muon.cautious_decay=true",
        "--optimizer.muon.split_heads=true",
        "--optimizer.muon.qk_clip=100",
        "--optimizer.muon.orthogonalization=polar_express",
    ],
    "muon on experts": [*MOE, "--optimizer.name=muon"],
    "mean of weights": ["--optimizer.ema=0.99"],
    "float8 tensorwise": ["--precision.float8=tensorwise"],
    "float8 rowwise": ["--precision.float8=rowwise"],
    "float8 blockwise": ["--precision.float8=blockwise"],
    "float8 mxfp8, emulated": ["--precision.float8=mxfp8"],
    "deterministic": ["--run.deterministic=true"],
    "monitors": ["--metrics.monitor_interval=3"],
    "losses by source": ["--metrics.sources=true"],
}

COMPILE = ["--compile.enabled=true", "--compile.loss=true"]
# A compilation takes tens of seconds, so these variants are slow tests, and no pairs contain them.
COMPILED: dict[str, list[str]] = {
    "compiled": COMPILE,
    "activation offload, compiled": [*OFFLOADED, *COMPILE],
    "compiled update": ["--compile.optimizer=true", "--optimizer.moment_dtype=bfloat16"],
    "compiled with a memory budget": [*COMPILE, "--activation_checkpoint.mode=memory_budget"],
    "compiled with soft caps and documents": [
        *COMPILE,
        *DOCUMENTS,
        "--model.attention_soft_cap=20.0",
        "--model.logit_soft_cap=30.0",
    ],
}
# The name of "compiled" with Inductor's CUDA graphs.
IN_GRAPHS = "compiled, in CUDA graphs"

# On four ranks, each with its own simulated GPU and a real ProcessGroupNCCL.
FOUR: dict[str, list[str]] = {
    "fsdp2": [],
    "hsdp": ["--parallel.dp_replicate=2"],
    "fsdp2, deferred": ["--parallel.defer_gradient_reduction=true"],
    "ddp": ["--parallel.data_parallel=ddp"],
    "zero1": ["--parallel.data_parallel=zero1"],
    "zero1 in symmetric memory": ["--parallel.data_parallel=zero1", "--parallel.symmetric_memory=true"],
    "zero2": ["--parallel.data_parallel=zero2"],
    "zero2 with replicas": ["--parallel.data_parallel=zero2", "--parallel.dp_replicate=2"],
    "tp": ["--parallel.tp=2"],
    "tp without sp": ["--parallel.tp=2", "--parallel.sequence_parallel=false"],
    "async tp, compiled": [
        "--parallel.tp=2",
        "--parallel.async_tp=true",
        "--compile.enabled=true",
        "--model.n_layers=1",
    ],
    "cp allgather": ["--parallel.cp=2", "--parallel.context=allgather"],
    "cp ulysses": ["--parallel.cp=2", "--parallel.context=ulysses"],
    "cp ring": ["--parallel.cp=2", "--parallel.context=ring"],
    "cp ring with documents": ["--parallel.cp=4", "--parallel.context=ring", *DOCUMENTS],
    "cp of linear attention": [*LINEAR, "--parallel.cp=2"],
    "cp of mla": [*MLA, "--parallel.cp=2"],
    "ep": [*MOE, "--parallel.ep=4"],
    "ep over tp": [*MOE, "--parallel.ep=2", "--parallel.tp=2"],
    "ep, recomputed": [*MOE, "--parallel.ep=4", "--activation_checkpoint.mode=full"],
    "ep, compiled and recomputed": [
        *MOE,
        "--parallel.ep=4",
        "--model.moe.balance=aux_loss",
        "--compile.enabled=true",
        "--activation_checkpoint.mode=selective",
    ],
    "ep over nodes": [*MOE, "--parallel.ep=4", "--parallel.ep_node_size=2"],
    "ep overlapped": [*MOE, "--parallel.ep=4", "--parallel.ep_overlap=true"],
    "ep over nodes, overlapped, compiled and recomputed": [
        *MOE,
        "--parallel.ep=4",
        "--parallel.ep_node_size=2",
        "--parallel.ep_overlap=true",
        "--compile.enabled=true",
        "--activation_checkpoint.mode=selective",
    ],
    "ep over nodes in float8": [
        *MOE,
        "--parallel.ep=4",
        "--parallel.ep_node_size=2",
        "--precision.float8_dispatch=true",
    ],
    "ep over nodes in float8, compiled and recomputed": [
        *MOE,
        "--parallel.ep=4",
        "--parallel.ep_node_size=2",
        "--precision.float8_dispatch=true",
        "--compile.enabled=true",
        "--activation_checkpoint.mode=selective",
    ],
    "ep over nodes, compiled and recomputed": [
        *MOE,
        "--parallel.ep=4",
        "--parallel.ep_node_size=2",
        "--compile.enabled=true",
        "--activation_checkpoint.mode=selective",
    ],
    "never freed, reduced once": [
        "--parallel.reshard_after_forward=never",
        "--parallel.defer_gradient_reduction=true",
    ],
    "pp 1F1B": ["--parallel.pp=2", "--pipeline.schedule=1F1B"],
    "pp interleaved": ["--parallel.pp=2", "--pipeline.schedule=Interleaved1F1B", "--model.n_layers=4"],
    "pp zero bubble": ["--parallel.pp=2", "--pipeline.schedule=ZBVZeroBubble", "--model.n_layers=4"],
    "pp dual": [
        "--parallel.pp=2",
        "--pipeline.schedule=DualPipeV",
        "--model.n_layers=4",
        "--train.micro_batch_size=1",
        *MOE,
    ],
    "activation offload, fsdp2": OFFLOADED,
    "activation offload, ep over tp": [*OFFLOADED, *MOE, "--parallel.ep=2", "--parallel.tp=2"],
    "activation offload, pp zero bubble": [
        *OFFLOADED,
        "--parallel.pp=2",
        "--pipeline.schedule=ZBVZeroBubble",
    ],
    "pp with mtp and zero1": ["--parallel.pp=2", "--model.mtp.depth=1", "--parallel.data_parallel=zero1"],
    "pp with attention residuals": [*RESIDUALS, "--parallel.pp=2", "--pipeline.schedule=1F1B"],
    "kimi k3 over tp and ep": [*K3, "--parallel.tp=2", "--parallel.ep=2"],
    "tp and cp": ["--parallel.tp=2", "--parallel.cp=2"],
    "tp and pp": ["--parallel.tp=2", "--parallel.pp=2"],
    "muon over fsdp2": ["--optimizer.name=muon"],
    "muon over zero1 and tp": ["--optimizer.name=muon", "--parallel.data_parallel=zero1", "--parallel.tp=2"],
    "int8 moments, deterministic": ["--optimizer.moment_dtype=int8", "--run.deterministic=true"],
    "float8 blockwise": ["--precision.float8=blockwise"],
    # Four ranks have whole blocks of 128 rows.
    "float8 blockwise, gathered in codes": [
        "--precision.float8=blockwise",
        "--precision.float8_all_gather=true",
        "--model.dim=512",
        "--model.ffn_dim=512",
    ],
    "float8 mxfp8 with ep over tp, emulated": [
        *MOE,
        "--precision.float8=mxfp8",
        "--parallel.ep=2",
        "--parallel.tp=2",
        "--model.n_kv_heads=4",
    ],
    "offload": ["--parallel.cpu_offload=true"],
    "offload with bounded logits": [
        "--parallel.cpu_offload=true",
        "--optimizer.name=muon",
        "--optimizer.muon.qk_clip=100",
    ],
}

# Functions of forge in which the host may wait during a step. Expert parallelism reads the row counts of each rank. Experts
# in float32 read the row count of each expert. An offloaded state must reach the host before its update.
SPLITS = {"model/host.py:lists_of"}
OFFLOAD = {
    "parallel/logits.py:complete",
    "parallel/step/gradients.py:clip_gradients",
    "parallel/step/gradients.py:report_gradients",
    "train/step.py:apply_gradients",
}


# Runs on a CPU neither compile nor recompute: their losses are the reference.
PLAIN = [
    "--compile.enabled=false",
    "--compile.loss=false",
    "--compile.optimizer=false",
    "--activation_checkpoint.mode=none",
]


def losses_on_both(options: list[str], folder: Path, world: int = 1, on_gpu: str = "") -> list[list[float]]:
    """Return the losses of a variant on CPUs, without compilation and recomputation, and on GPUs.

    on_gpu: the patch of the ranks on GPUs. Both start from the weights of one CPU step, because initial values depend on the
    device type.
    """
    base = [*BASE, "--train.hooks=[]"]

    def losses(name: str, patch: str, *more: str) -> list[float]:
        run = runs.Run(folder / name, *options, base=base)
        codes = run.start(*more, world=world, patch=patch).join()
        assert codes == [0] * world, run.output()[-4000:]
        return run.losses()

    losses("start", ON_THE_CPU, *PLAIN, "--train.steps=1")
    weights = f"--checkpoint.init={folder / 'start' / 'run' / 'checkpoints' / step_name(1)}"
    return [losses("cpu", ON_THE_CPU, *PLAIN, weights), losses("cuda", on_gpu, weights)]
