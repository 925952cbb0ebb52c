"""Distribution of one model over ranks, and the number formats of its computation."""

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
# Only keys that do not change the course of the training.
Override = Annotated[
    str,
    StringConstraints(
        pattern=r"^((parallel|pipeline|activation_checkpoint)\.\w+|train\.micro_batch_size)=\S+"
        r"( ((parallel|pipeline|activation_checkpoint)\.\w+|train\.micro_batch_size)=\S+)*$"
    ),
    Phrase(
        "KEY=VALUE of [parallel], [pipeline], [activation_checkpoint] or train.micro_batch_size, several with a space between"
    ),
]
CsvPath = Annotated[str, StringConstraints(pattern=r"\.csv$"), Phrase("a path ending in .csv")]
WITH_TP, WITH_PP = unused_if("parallel.tp", 1), unused_if("parallel.pp", 1)
WITH_FLOAT8 = unused_if("precision.float8", "none")
LISTED = Unused(
    "pipeline.layers_per_stage is a list", lambda c: isinstance(c.pipeline.layers_per_stage, tuple)
)
BY_BLOCK = used_if("activation_checkpoint.mode", "full", "selective")
COMPILES = Unused(
    "nothing is compiled", lambda c: not (c.compile.enabled or c.compile.loss or c.compile.optimizer)
)


class Parallel(Section):
    """Degrees of parallelism. The number of processes is pp * dp_replicate * dp_shard * cp * tp."""

    data_parallel: Literal["fsdp2", "zero2", "zero1", "ddp"] = "fsdp2"
    """Sharded state. fsdp2: parameters, gradients and optimizer state; zero2: gradients and optimizer state; zero1:
    optimizer state; ddp: nothing."""
    dp_replicate: Positive = 1
    """Number of copies of the sharded model. With fsdp2, more than one is HSDP."""
    dp_shard: Literal[-1] | Positive = -1
    """Ranks that one copy of the model is sharded over (ddp: data-parallel ranks). -1: all remaining ranks."""
    fallbacks: ListOf[Override] = ()
    """Overrides for a layout that does not fit the number of processes, e.g. ["parallel.tp=2", "parallel.tp=1
    train.micro_batch_size=1"]: the first that fits is used."""
    tp: Positive = 1
    """Tensor parallelism: ranks that each matrix product is split over."""
    cp: Positive = 1
    """Context parallelism: ranks that each sequence is split over."""
    pp: Positive = 1
    """Pipeline parallelism: ranks that the layers are split over."""
    ep: Annotated[Positive, NO_EXPERTS] = 1
    """Expert parallelism: ranks that the experts of a layer are split over. Must divide dp_shard * cp * tp."""
    ep_node_size: Annotated[Literal["auto"] | Positive, unused_if("parallel.ep", 1)] = "auto"
    """With ep: ranks of the ep axis on one node, a divisor of ep. If ep is larger, a token is sent to each node once, however
    many of its experts are there. auto: the processes that the launcher starts per node, if they divide ep."""
    sequence_parallel: Annotated[bool, WITH_TP] = True
    """With tp: shard norms and residual stream along the sequence."""
    loss_parallel: Annotated[bool, WITH_TP] = True
    """With tp: keep logits sharded along the vocabulary."""
    tp_plan: Annotated[Literal["auto"] | ImportPath | dict[Text, TensorStyle], WITH_TP] = "auto"
    """With tp: how modules are split. auto: the model's own plan. A table maps module names to styles; `*` matches one
    component of a name, and other modules are not split. A function takes (model, config) and returns such a table."""
    tp_plan_styles: Annotated[dict[Text, TensorStyle], WITH_TP, unused("replaced by parallel.tp_plan")] = {}
    """Former key of a table for tp_plan. Used if tp_plan is auto."""
    async_tp: Annotated[bool, WITH_TP] = False
    """With tp: overlap matrix products with their collectives in compiled blocks. Needs CUDA and compile.enabled.
    Experimental: not yet run on a GPU."""
    context: Annotated[Literal["allgather", "ulysses", "ring"], unused_if("parallel.cp", 1)] = "allgather"
    """With cp: how attention reads the keys and values of other ranks."""
    reshard_after_forward: Annotated[
        Literal["auto", "always", "never"] | Positive, used_if("parallel.data_parallel", "fsdp2")
    ] = "auto"
    """Free gathered parameters after forward. auto: yes, except in a pipeline. never: keep them until the step ends. A
    number: keep them sharded over that many ranks; experts are freed."""
    shard_optimizer_over: Literal["dp_shard", "dp"] = "dp_shard"
    """zero1, zero2: shard the optimizer state over the ranks of one copy (dp_shard) or of all copies (dp)."""
    prefetch: Count = 1
    """fsdp2: number of units whose parameters are gathered in advance, while an earlier one computes; 0: PyTorch's default.
    The other engines hold all parameters anyway, and gather all in advance."""
    defer_gradient_reduction: bool = False
    """Reduce gradients once per step, not once per microbatch: less communication, but each rank holds full gradients."""
    bucket_size: Literal["auto"] | Count = "auto"
    """Not fsdp2: number of parameters in a bucket, the unit of communication. auto: 40 million, or 1 million times the ranks
    if that is more. 0: one bucket."""
    overlap_gradients: bool = True
    """Not fsdp2: overlap the reduction of buckets with backward."""
    overlap_parameters: bool = True
    """Not fsdp2: overlap the gathering of buckets with the next forward."""
    check_gradients: Literal["none", "finite", "plausible"] = "none"
    """Not fsdp2: stop and name the parameter if a rank's gradient is not finite (finite), or also if it is a thousand times
    larger than before (plausible). Waits for the device at every bucket."""
    symmetric_memory: bool = False
    """Not fsdp2: allocate the buffers in NCCL's symmetric memory. Needs CUDA. Experimental: not yet run on a GPU."""
    cpu_offload: bool = False
    """Keep parameters, gradients and optimizer state in host memory."""

    @model_validator(mode="before")
    @classmethod
    def _from_styles(cls, values: Any) -> Any:
        """Copy tp_plan from its former key. An invalid style is reported under that key."""
        styles = values.get("tp_plan_styles") if isinstance(values, dict) else None
        if not isinstance(styles, dict) or not styles or values.get("tp_plan", "auto") != "auto":
            return values
        return values | {"tp_plan": styles} if all(s in TENSOR_STYLES for s in styles.values()) else values


class Pipeline(Section):
    """With pp > 1: the split of layers into stages, and the order in which the stages run."""

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
    """Order of forward and backward passes: a name, or a CSV file with one row of actions per rank."""
    layers_per_stage: Annotated[Count | Annotated[ListOf[Count], MinLen(1)], WITH_PP] = 0
    """Layers in one stage, or a list of the layers in each. 0: balance the cost of the stages, including embedding, head and
    experts."""
    module_names: Annotated[
        ListOf[ListOf[Text]], WITH_PP, unused("replaced by pipeline.layers_per_stage")
    ] = ()
    """Former key: a list of the modules in each stage. If layers_per_stage is 0, each stage gets as many layers as its list
    names."""
    round: Annotated[
        Literal["up", "down", "error"], WITH_PP, unused_if("pipeline.layers_per_stage", 0), LISTED
    ] = "error"
    """If layers_per_stage gives a number of stages that pp does not divide: use more stages, fewer, or report an error."""

    @model_validator(mode="before")
    @classmethod
    def _from_names(cls, values: Any) -> Any:
        """Count layers_per_stage in its former key."""
        names = values.get("module_names") if isinstance(values, dict) else None
        if not isinstance(names, list | tuple) or not names or values.get("layers_per_stage", 0) != 0:
            return values
        return values | {"layers_per_stage": [str(of_stage).count("layers.") for of_stage in names]}


class Precision(Section):
    """Number formats. Softmax, norms, rotary tables and loss always use at least float32."""

    storage: Dtype = "float32"
    """Format of the stored parameters. bfloat16 loses updates smaller than 1/256 of a weight."""
    compute: Dtype = "bfloat16"
    """Format of parameters and activations in forward and backward."""
    reduce: Dtype = "float32"
    """Format of the sums of gradients over ranks."""
    fp32_modules: ListOf[Text] = ("*.router", "*.decay")
    """Glob patterns of module names that compute in float32, or in precision.compute if that is wider."""
    mixed_storage_rule: Annotated[
        Literal["uniform_storage", "per_parameter"], unused("all parameters have one storage format")
    ] = "uniform_storage"
    """No effect: all parameters are stored in precision.storage."""
    float8: Literal["none", "tensorwise", "rowwise", "blockwise", "mxfp8"] = "none"
    """Float8 matrix products, with one scale per tensor, per row, per 128 values (128 x 128 weights), or per 32 values."""
    float8_experts: Annotated[Literal["auto"] | bool, WITH_FLOAT8] = "auto"
    """Also use float8 in routed experts. auto: with blockwise and mxfp8. Their weight gradients stay in precision.compute."""
    float8_emulate: Annotated[Literal["auto"] | bool, WITH_FLOAT8] = "auto"
    """Round operands to float8 and multiply them in a wider format. auto: if the hardware has no kernel, e.g. on a
    CPU."""
    float8_all_gather: Annotated[Literal["auto"] | bool, WITH_FLOAT8] = "auto"
    """Gather parameters in float8. auto: only with fsdp2, tp = 1, and not rowwise; with blockwise and mxfp8 also only
    with ep = 1, without compilation, and if each rank has whole blocks."""
    float8_exclude: Annotated[ListOf[Text], WITH_FLOAT8] = ("head", "*.router", "*.wa", "*.wa_down", "*.wb")
    """Glob patterns of linear layers and routed experts that do not use float8. With tensorwise and rowwise, layers never
    use it if 16 does not divide one of their sizes."""


class ActivationCheckpoint(Section):
    """Save memory by recomputing activations in backward."""

    mode: Literal["none", "full", "selective", "memory_budget"] = "none"
    """Recompute nothing, whole blocks, cheap operations, or as much as memory_budget requires (needs compile.enabled)."""
    modules: Annotated[ListOf[Text], BY_BLOCK] = ()
    """full, selective: recompute only these parts of a block, such as `attention`. []: the whole block."""
    every: Annotated[Positive, BY_BLOCK] = 1
    """full, selective: recompute only in every n-th block."""
    memory_budget: Annotated[Share, used_if("activation_checkpoint.mode", "memory_budget")] = 0.5
    """memory_budget: fraction of a block's activations to keep. 0: recompute all."""


class Compile(Section):
    """Compilation with torch.compile."""

    enabled: bool = False
    """Compile each block."""
    loss: bool = False
    """Compile the head and the loss."""
    optimizer: bool = False
    """Compile AdamW's update to one pass over the memory, which also clips and writes the copy that the model computes
    with; with muon, the update of the parameters that AdamW updates. Not for moments in int8."""
    backend: Annotated[Text, COMPILES] = "inductor"
    """Compiler backend. inductor generates kernels; aot_eager only traces, which finds the same errors within a second."""
