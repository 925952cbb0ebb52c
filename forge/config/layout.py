"""[parallel], [pipeline], [precision], [activation_checkpoint] and [compile]: the layout and the number formats."""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

from annotated_types import MinLen
from pydantic import StringConstraints, model_validator

from forge.config.section import (
    NO_EXPERTS,
    Count,
    Dtype,
    ImportPath,
    ListOf,
    Phrase,
    Positive,
    Section,
    Share,
    Text,
    Unused,
    unused,
    unused_if,
    used_if,
)

TensorStyle = Literal["colwise", "rowwise", "colwise_rep", "rowwise_rep", "sequence_parallel"]
TENSOR_STYLES: tuple[str, ...] = get_args(TensorStyle)
# Fallbacks may set only these keys, because they do not change the training results.
Override = Annotated[
    str,
    StringConstraints(
        pattern=r"^((parallel|pipeline|activation_checkpoint)\.\w+|train\.micro_batch_size)=\S+"
        r"( ((parallel|pipeline|activation_checkpoint)\.\w+|train\.micro_batch_size)=\S+)*$"
    ),
    Phrase(
        "KEY=VALUE of [parallel], [pipeline], [activation_checkpoint] or train.micro_batch_size; a space separates several"
    ),
]
CsvPath = Annotated[str, StringConstraints(pattern=r"\.csv$"), Phrase("a path ending in .csv")]
WITH_TP, WITH_PP = unused_if("parallel.tp", 1), unused_if("parallel.pp", 1)
WITH_FLOAT8 = unused_if("precision.float8", "none")
LISTED = Unused(
    "pipeline.layers_per_stage is a list", lambda c: isinstance(c.pipeline.layers_per_stage, tuple)
)
FSDP = used_if("parallel.data_parallel", "fsdp2")
BUFFERED = used_if("parallel.data_parallel", "ddp", "zero1", "zero2")
BY_BLOCK = used_if("activation_checkpoint.mode", "full", "selective", "offload")
COMPILES = Unused(
    "nothing is compiled", lambda c: not (c.compile.enabled or c.compile.loss or c.compile.optimizer)
)


class Parallel(Section):
    """Degrees of parallelism. The world size is pp * dp_replicate * dp_shard * cp * tp."""

    data_parallel: Literal["fsdp2", "zero2", "zero1", "ddp"] = "fsdp2"
    """Data-parallel engine. fsdp2 shards parameters, gradients and optimizer state. zero2 shards gradients and
    optimizer state. zero1 shards optimizer state. ddp shards nothing."""
    dp_replicate: Positive = 1
    """Number of replicas of the sharded model. Above 1 with fsdp2: HSDP."""
    dp_shard: Literal[-1] | Positive = -1
    """Number of data-parallel ranks sharding one replica of the model (ddp: number of data-parallel ranks). -1: all
    remaining ranks."""
    fallbacks: ListOf[Override] = ()
    """Overrides to try, in order, if the layout does not fit the number of processes, e.g. ["parallel.tp=2",
    "parallel.tp=1 train.micro_batch_size=1"]. The first one that fits is used."""
    tp: Positive = 1
    """Tensor parallelism: number of ranks splitting each matrix product."""
    cp: Positive = 1
    """Context parallelism: number of ranks splitting each sequence."""
    pp: Positive = 1
    """Pipeline parallelism: number of ranks splitting the layers."""
    ep: Annotated[Positive, NO_EXPERTS] = 1
    """Expert parallelism: number of ranks splitting the experts of a layer. Must divide dp_shard * cp * tp."""
    ep_node_size: Annotated[Literal["auto"] | Positive, unused_if("parallel.ep", 1)] = "auto"
    """With ep: number of ep ranks on one node; must divide ep. If ep is larger than this number, a token is sent to
    each node at most once, even if several of the token's experts are on the node. auto: the number of processes per
    node, if that number divides ep."""
    ep_overlap: Annotated[bool, unused_if("parallel.ep", 1)] = False
    """With ep: divide the tokens of a microbatch into two parts, and send rows of one part while the experts compute the
    other. Experts' matrix products are smaller, and each expert weight sums two gradients. Not timed on a GPU."""
    sequence_parallel: Annotated[bool, WITH_TP] = True
    """With tp: shard the norms' inputs and the residual stream along the sequence."""
    loss_parallel: Annotated[bool, WITH_TP] = True
    """With tp: keep the logits sharded along the vocabulary."""
    tp_plan: Annotated[Literal["auto"] | ImportPath | dict[Text, TensorStyle], WITH_TP] = "auto"
    """With tp: how modules are split. auto: the model's own plan. A table maps module names to styles; `*` matches one
    component of a name; unmatched modules are not split. An import path names a function from (model, config) to such a
    table."""
    tp_plan_styles: Annotated[dict[Text, TensorStyle], WITH_TP, unused("replaced by parallel.tp_plan")] = {}
    """Former key for a tp_plan table. Used if tp_plan is auto."""
    async_tp: Annotated[bool, WITH_TP] = False
    """With tp: overlap matrix products with their collectives in compiled blocks. Needs CUDA and compile.enabled.
    Experimental: not yet run on a GPU."""
    context: Annotated[Literal["allgather", "ulysses", "ring"], unused_if("parallel.cp", 1)] = "allgather"
    """With cp: how attention gets keys and values from other ranks: gather all of them (allgather), exchange heads
    (ulysses), or pass them around a ring (ring)."""
    reshard_after_forward: Annotated[Literal["auto", "always", "never"] | Positive, FSDP] = "auto"
    """fsdp2: whether to free gathered parameters after forward. always: yes. auto: yes, except in a pipeline. never:
    keep them until the end of the step. A number: reshard them over this number of ranks; experts' parameters are
    freed."""
    shard_optimizer_over: Literal["dp_shard", "dp"] = "dp_shard"
    """zero1, zero2: shard the optimizer state over the ranks of one replica (dp_shard) or of all replicas (dp)."""
    prefetch: Annotated[Count, FSDP] = 1
    """fsdp2: number of units whose parameters are gathered ahead of the computing unit. 0: PyTorch's default. The other
    engines hold full parameters and ignore this key."""
    defer_gradient_reduction: Annotated[bool, FSDP] = False
    """fsdp2: reduce gradients once per step instead of once per microbatch. Less communication, but each rank holds
    full gradients."""
    bucket_size: Literal["auto"] | Count = "auto"
    """ddp, zero1, zero2: number of parameters in a bucket, the unit of communication. auto: the larger of 40 million
    and 1 million times the number of ranks. 0: one bucket."""
    overlap_gradients: bool = True
    """ddp, zero1, zero2: overlap the reduction of buckets with backward."""
    overlap_parameters: bool = True
    """ddp, zero1, zero2: overlap the gathering of buckets with the next forward."""
    check_gradients: Annotated[Literal["none", "finite", "plausible"], BUFFERED] = "none"
    """ddp, zero1, zero2: check each rank's gradients before they are summed. finite: stop and name the parameter if a
    gradient is not finite. plausible: also stop if a bucket's norm is over 1000 times its largest norm so far.
    Synchronises with the device at every bucket."""
    symmetric_memory: Annotated[bool, BUFFERED] = False
    """ddp, zero1, zero2: allocate the buffers in NCCL's symmetric memory, for GPUs with NVSwitch. Experimental: not yet
    run on a GPU."""
    cpu_offload: bool = False
    """fsdp2: keep parameters, gradients and optimizer state in host memory."""

    @model_validator(mode="before")
    @classmethod
    def _from_styles(cls, values: Any) -> Any:
        """Set tp_plan from its former key, tp_plan_styles. An invalid style is reported under the former key."""
        styles = values.get("tp_plan_styles") if isinstance(values, dict) else None
        if not isinstance(styles, dict) or not styles or values.get("tp_plan", "auto") != "auto":
            return values
        return values | {"tp_plan": styles} if all(s in TENSOR_STYLES for s in styles.values()) else values


class Pipeline(Section):
    """With pp > 1: the split of layers into stages, and the schedule of the stages."""

    schedule: Annotated[
        Literal[
            "GPipe",
            "1F1B",
            "Interleaved1F1B",
            "LoopedBFS",
            "InterleavedZeroBubble",
            "ZBVZeroBubble",
            "DualPipeV",
        ]
        | CsvPath,
        WITH_PP,
    ] = "1F1B"
    """Schedule of forward and backward passes: a name, or a CSV file with one row of actions per rank."""
    layers_per_stage: Annotated[Count | Annotated[ListOf[Count], MinLen(1)], WITH_PP] = 0
    """Number of layers in each stage, or a list with one number per stage. 0: balance the cost of the stages, including
    embedding, head and experts."""
    module_names: Annotated[
        ListOf[ListOf[Text]], WITH_PP, unused("replaced by pipeline.layers_per_stage")
    ] = ()
    """Former key: a list of module names for each stage. If layers_per_stage is 0, the number of layers in each list is
    used."""
    round: Annotated[
        Literal["up", "down", "error"], WITH_PP, unused_if("pipeline.layers_per_stage", 0), LISTED
    ] = "error"
    """If pp does not divide the number of stages given by layers_per_stage: use more stages (up), use fewer (down), or
    report an error."""

    @model_validator(mode="before")
    @classmethod
    def _from_names(cls, values: Any) -> Any:
        """Set layers_per_stage to the number of layers in each list of its former key, module_names.

        No effect if layers_per_stage is set.
        """
        names = values.get("module_names") if isinstance(values, dict) else None
        if not isinstance(names, list | tuple) or not names or values.get("layers_per_stage", 0) != 0:
            return values
        return values | {"layers_per_stage": [str(of_stage).count("layers.") for of_stage in names]}


class Precision(Section):
    """Number formats. Softmax, norms, rotary tables and the loss always use at least float32."""

    storage: Dtype = "float32"
    """Format of the stored parameters. bfloat16 loses updates smaller than 1/512 of a weight."""
    compute: Dtype = "bfloat16"
    """Format of parameters and activations in forward and backward."""
    reduce: Dtype = "float32"
    """Format of gradients in sums over ranks."""
    fp32_modules: ListOf[Text] = ("*.router", "*.decay")
    """Glob patterns of modules computing in float32, or in precision.compute, if wider."""
    mixed_storage_rule: Annotated[
        Literal["uniform_storage", "per_parameter"], unused("all parameters have one storage format")
    ] = "uniform_storage"
    """No effect: all parameters are stored in precision.storage."""
    float8: Literal["none", "tensorwise", "rowwise", "blockwise", "mxfp8"] = "none"
    """Float8 matrix products. tensorwise: one scale per tensor; rowwise: per row; blockwise: per 128 values (128 x 128
    in weights); mxfp8: per 32 values."""
    float8_experts: Annotated[Literal["auto"] | bool, WITH_FLOAT8] = "auto"
    """Also use float8 in routed experts. auto: with blockwise and mxfp8. Weight gradients of routed experts stay in
    precision.compute."""
    float8_emulate: Annotated[Literal["auto"] | bool, WITH_FLOAT8] = "auto"
    """Emulate float8: round operands to float8 and multiply them in a wider format. auto: only if the hardware has no
    kernel, e.g. on a CPU."""
    float8_all_gather: Annotated[Literal["auto"] | bool, WITH_FLOAT8] = "auto"
    """Gather parameters in float8. auto: with fsdp2, tp = 1 and any recipe except rowwise. blockwise and mxfp8 also
    require ep = 1, no compilation, and whole blocks on each rank."""
    float8_dispatch: Annotated[bool, NO_EXPERTS] = False
    """Round the inputs of routed experts, and the gradients of their outputs, to mxfp8. If a token is sent once to each
    node (parallel.ep_node_size), both are sent in float8, with half the bytes of bfloat16. Needs no other float8 key."""
    float8_exclude: Annotated[ListOf[Text], WITH_FLOAT8] = ("head", "*.router", "*.wa", "*.wa_down", "*.wb")
    """Glob patterns of linear layers and routed experts to keep out of float8. With tensorwise and rowwise, layers
    whose sizes are not multiples of 16 never use float8."""


class ActivationCheckpoint(Section):
    """Save memory by recomputing activations in backward, or by keeping them in host memory."""

    mode: Literal["none", "full", "selective", "memory_budget", "offload"] = "none"
    """none: keep all activations. full: recompute whole blocks. selective: recompute cheap operations. memory_budget:
    the compiler recomputes as much as memory_budget requires (needs compile.enabled). offload: copy the activations of
    each block to host memory in forward, and back in backward."""
    modules: Annotated[ListOf[Text], BY_BLOCK] = ()
    """full, selective, offload: only these submodules of a block, e.g. `attention`. []: the whole block. With offload,
    needs compile.enabled = false."""
    every: Annotated[Positive, BY_BLOCK] = 1
    """full, selective, offload: only every n-th block."""
    memory_budget: Annotated[Share, used_if("activation_checkpoint.mode", "memory_budget")] = 0.5
    """memory_budget: fraction of a block's activations to keep. 0: recompute everything."""


class Compile(Section):
    """Compilation with torch.compile."""

    enabled: bool = False
    """Compile each block."""
    loss: bool = False
    """Compile the head and the loss."""
    optimizer: bool = False
    """Compile AdamW's update into one pass over memory, including clipping and the write of the compute copy. With
    muon, this applies to the parameters updated by AdamW. Not available with int8 moments."""
    backend: Annotated[Text, COMPILES] = "inductor"
    """Compiler backend. inductor generates kernels. aot_eager only traces, and finds the same errors within a second."""
