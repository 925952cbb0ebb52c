"""How one model is spread over many ranks, and in which number formats."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from pydantic import StringConstraints

from forge.config.section import Count, Dtype, ListOf, Phrase, Positive, Section, Share, Text

TensorStyle = Literal["colwise", "rowwise", "colwise_rep", "rowwise_rep", "sequence_parallel"]
TENSOR_STYLES: tuple[str, ...] = get_args(TensorStyle)
ImportPath = Annotated[
    str, StringConstraints(pattern=r"^[\w.]+:\w+$"), Phrase("an import path package.module:function")
]
CsvPath = Annotated[str, StringConstraints(pattern=r"\.csv$"), Phrase("a path ending in .csv")]


class Parallel(Section):
    """Degrees of parallelism: pp * dp_replicate * dp_shard * cp * tp is the number of processes."""

    data_parallel: Literal["fsdp2", "zero2", "zero1", "ddp"] = "fsdp2"
    """fsdp2 shards parameters, gradients and optimizer; zero2 the last two; zero1 the last; ddp nothing."""
    dp_replicate: Positive = 1
    """Copies of the sharded model; with fsdp2, more than one is HSDP."""
    dp_shard: Literal[-1] | Positive = -1
    """Ranks that share one copy of the model (ddp: shard nothing). -1: all that the other degrees leave."""
    tp: Positive = 1
    """Tensor parallelism: ranks that share every matrix product."""
    cp: Positive = 1
    """Context parallelism: ranks that share every sequence."""
    pp: Positive = 1
    """Pipeline parallelism: groups of ranks that hold different layers."""
    ep: Positive = 1
    """Expert parallelism: ranks that share the experts of a layer; divides dp_shard * cp * tp."""
    sequence_parallel: bool = True
    """With tp: norms and residual stream hold 1/tp of the sequence."""
    loss_parallel: bool = True
    """With tp: the head's logits stay sharded over the vocabulary."""
    tp_plan: Literal["auto"] | ImportPath = "auto"
    """With tp: how modules are split. auto: the model's own plan. A function of (model, config) returns a dict."""
    tp_plan_styles: dict[Text, TensorStyle] = {}
    """With tp: a plan by hand: names of modules, `*` for any one component, to styles; other modules stay whole."""
    async_tp: bool = False
    """With tp: compiled blocks overlap matrix products with their collectives. Needs CUDA, compile.enabled."""
    context: Literal["allgather", "ulysses", "ring"] = "allgather"
    """With cp: how a query reaches keys on other ranks."""
    reshard_after_forward: Literal["auto", "always", "never"] | Positive = "auto"
    """Free gathered parameters after forward. A number: keep them sharded over that many ranks only;
    experts are freed."""
    shard_optimizer_over: Literal["dp_shard", "dp"] = "dp_shard"
    """Ranks that share the optimizer state: those of one copy, or of all copies."""
    prefetch: Count = 1
    """Units (not fsdp2: buckets) whose parameters are gathered while an earlier one computes. 0, with fsdp2: as PyTorch
    does by itself."""
    defer_gradient_reduction: bool = False
    """Reduce gradients once per step, not once per microbatch: less traffic for a full-size gradient on each rank."""
    bucket_size: Literal["auto"] | Count = "auto"
    """Not fsdp2: parameters in a bucket, the unit of communication. auto: 40 million, with many ranks a million for each;
    0: one bucket for all."""
    overlap_gradients: bool = True
    """Not fsdp2: reduce buckets while backward goes on."""
    overlap_parameters: bool = True
    """Not fsdp2: gather buckets while the next forward goes on."""
    check_gradients: Literal["none", "finite", "plausible"] = "none"
    """Not fsdp2: stop and name the parameter when a rank's gradient is not finite, or a thousand times what it has been.
    Waits for the device at every bucket."""
    symmetric_memory: bool = False
    """Not fsdp2: keep the buffers in symmetric memory of NCCL. Needs CUDA."""
    cpu_offload: bool = False
    """Keep parameters, gradients and optimizer state in host memory."""


class Pipeline(Section):
    """With pp > 1: how layers become stages and in which order the stages work."""

    schedule: (
        Literal[
            "GPipe",
            "1F1B",
            "Interleaved1F1B",
            "LoopedBFS",
            "InterleavedZeroBubble",
            "ZBVZeroBubble",
            "DualPipeV",
        ]
        | CsvPath
    ) = "1F1B"
    """Order of forwards and backwards."""
    layers_per_stage: Count = 0
    """Layers in one stage. 0: as even as costs allow, those of embedding, head and experts counted."""
    module_names: ListOf[ListOf[Text]] = ()
    """A split by hand: the module names of every stage. []: automatic."""
    round: Literal["up", "down", "error"] = "error"
    """Where layers_per_stage gives stages that pp does not divide: more of them, fewer, or an error."""


class Precision(Section):
    """Number formats; softmax, norms, rotary tables and loss use at least float32 whatever is said here."""

    storage: Dtype = "float32"
    """Format of the parameters between steps. bfloat16 loses updates smaller than 1/256 of a weight."""
    compute: Dtype = "bfloat16"
    """Format of parameters and activations in forward and backward."""
    reduce: Dtype = "float32"
    """Format in which gradients are summed over ranks."""
    fp32_modules: ListOf[Text] = ("*.router",)
    """Globs over module names that compute in float32 (or compute, if wider)."""
    mixed_storage_rule: Literal["uniform_storage", "per_parameter"] = "uniform_storage"
    """Where a unit holds parameters of several formats: uniform_storage computes with each in its own format;
    per_parameter with those at least as wide as compute in compute, with narrower ones in their own."""
    float8: Literal["none", "tensorwise", "rowwise"] = "none"
    """Float8 matrix products, by scaling granularity."""
    float8_all_gather: Literal["auto"] | bool = "auto"
    """Gather parameters in float8. auto: with fsdp2, tensorwise and tp = 1."""
    float8_exclude: ListOf[Text] = ("head", "*.router")
    """Globs over linear layers that stay out of float8, as do those with a size that 16 does not divide."""


class ActivationCheckpoint(Section):
    """Trade computation for memory: recompute activations in backward."""

    mode: Literal["none", "full", "selective", "memory_budget"] = "none"
    """What is recomputed: nothing, whole blocks, cheap operations, what a budget asks (needs compile)."""
    modules: ListOf[Text] = ()
    """full, selective: only these parts of a block, such as `attention`. []: the block."""
    every: Positive = 1
    """full, selective: in every n-th block only."""
    memory_budget: Share = 0.5
    """memory_budget: share kept of the activations that a block has otherwise. 0: recompute all."""


class Compile(Section):
    """torch.compile."""

    enabled: bool = False
    """Compile every block."""
    loss: bool = False
    """Compile head and loss."""
    backend: Text = "inductor"
    """Compiler: inductor makes kernels; aot_eager only traces, which finds the same errors in a second."""
