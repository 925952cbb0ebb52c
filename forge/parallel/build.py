"""`build_parallel_model`: make the model of a configuration on the meta device and apply parallelism from the inside out.

Memory is allocated only at the end, and only for the rank's own shards. The order of the steps is fixed:

context      replaces the attention function, in modules that no other step has changed yet
tensor       splits plain linear layers, before later steps convert or wrap them
expert       distributes the experts, which tensor parallelism leaves alone
float8       swaps linear layers, carrying over tensor parallelism's hooks on them
blocks       wraps blocks, with all steps above inside: recomputation, compilation
casts        casts for modules with another compute dtype; after blocks, so graphs and recomputation see this dtype
data         shards the parameters over data ranks; must know all blocks in their final form
allocate     gives each rank uninitialised storage for its own shards
initialise   fills the shards with initial values
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch

from forge.config import Config
from forge.model import FusedLoss, Transformer, build_model
from forge.model.norm import promoted
from forge.parallel.blocks import apply_blocks, check_modules
from forge.parallel.context import apply_context, check_attention, replace_attention
from forge.parallel.engines.buffered import Buffered
from forge.parallel.engines.fsdp import FullySharded
from forge.parallel.expert import apply_expert
from forge.parallel.float8 import apply_float8, check_patterns
from forge.parallel.initialize import describe, initialize
from forge.parallel.layout import Layout, make_layout
from forge.parallel.mesh import Meshes
from forge.parallel.modules import for_all_layers
from forge.parallel.pipeline import PipelinedModel, Stage, StageModel, plan_pipeline
from forge.parallel.precision import DTYPES, cast_at_borders, pinned_parameters, plan_units
from forge.parallel.step.model import DataParallel, ParallelModel, SequentialModel
from forge.parallel.tensor.apply import apply_tensor
from forge.parallel.tensor.plan import plan_for
from forge.runtime.errors import UserError


def build_parallel_model(
    config: Config,
    meshes: Meshes,
    device: torch.device,
    *,
    values: Callable[..., None] | None = None,
    attention: Callable[[Any], Any] | None = None,
    memory: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> ParallelModel:
    """Build the model of `config`, distributed over all ranks and initialised.

    Collective. values: fills the shards, like `initialize`; None: `initialize`, with numbers of `device`. attention: maps
    each layer's attention function to its replacement. memory: returns a context manager active during allocation and
    initialisation, e.g. FakeTensorMode.
    """
    layout = make_layout(config, meshes)

    def build(stage: Stage | None) -> tuple[Transformer, DataParallel]:
        model = build_meta_model(config, stage)
        if stage is None:
            check_groups(model, config)
        engine = apply_layout(model, layout)
        if attention is not None:
            replace_attention(model, attention)
        with memory():
            engine.allocate(device)
            starts, engine.shards = describe(model, engine.shards, config)
            # Under parallel.cpu_offload the shards are on the CPU, which would generate other numbers than the GPU.
            fill = values or partial(initialize, device=device)
            fill(engine.shards, starts, config.run.seed)
            model.reset_buffers(layout.compute)
        return model, engine

    if meshes.degrees.pp == 1:
        model, engine = build(None)
        return SequentialModel([model], [engine], layout)
    check_names(config, layout)
    plan = plan_pipeline(config, meshes.degrees)
    own = plan.of_rank(meshes.pp.rank())
    return PipelinedModel([StageModel(stage, *build(stage)) for stage in own], plan, layout)


def apply_layout(model: Transformer, layout: Layout) -> DataParallel:
    """Apply the steps that `layout` needs to `model`, in place. Return the data-parallel engine. Collective.

    Afterwards the model is this rank's part, still on the meta device.
    """
    meshes, precision, compiled = layout.meshes, layout.precision, layout.compile
    if meshes.cp.size() > 1:
        apply_context(model, layout)
    if meshes.tp.size() > 1:
        apply_tensor(model, layout)
    if layout.model.moe is not None:
        apply_expert(model, layout)
    if precision.float8 != "none" or precision.float8_dispatch:
        apply_float8(model, layout)
    if layout.activation_checkpoint.mode != "none" or compiled.enabled or compiled.loss:
        apply_blocks(model, layout)
    cast_at_borders(model, plan_units(model, precision)[1], layout.compute)
    return apply_data_parallel(model, layout)


def apply_data_parallel(model: Transformer, layout: Layout) -> DataParallel:
    """Apply the engine of `parallel.data_parallel` to `model` (on the meta device), in place. Collective.

    An engine either gathers parameters unit by unit (`FullySharded`) or keeps them in contiguous buffers (`Buffered`).
    If no other rank shares this rank's parameters, fsdp2 has nothing to shard. Contiguous buffers then replace fsdp2,
    because they need no hooks, casts and copies for gathering and reducing. fsdp2 stays if the buffers would take
    more memory.
    """
    parallel = layout.parallel
    if parallel.data_parallel != "fsdp2":
        return Buffered(model, layout)
    if not (_alone(layout) and _buffers_take_no_more_memory(layout)):
        return FullySharded(model, layout)
    # The keys of the buffered engines do not apply to fsdp2.
    plain = {"data_parallel": "zero1", "check_gradients": "none", "symmetric_memory": False}
    engine = Buffered(model, replace(layout, parallel=parallel.model_copy(update=plain)))
    engine.name = "contiguous buffers (fsdp2 has nothing to shard here)"
    return engine


def _alone(layout: Layout) -> bool:
    """Return whether each of FSDP's meshes, for dense parameters and for experts, has only this rank."""
    meshes = layout.meshes
    return meshes.fsdp.size() == 1 and (layout.model.moe is None or meshes.fsdp_experts.size() == 1)


def _buffers_take_no_more_memory(layout: Layout) -> bool:
    """Return whether contiguous buffers take no more memory than fsdp2.

    True if the buffers' gradients are no wider than fsdp2's, and no configuration key (float8, cpu_offload,
    reshard_after_forward) lets fsdp2 hold less than the buffers. fsdp2 accumulates gradients in `storage`. Between
    microbatches it holds them in the wider of `storage` and `reduce`.
    """
    gradient = torch.promote_types(promoted(layout.compute), layout.reduce)
    held = layout.storage
    if layout.meshes.degrees.accumulation > 1:
        held = torch.promote_types(held, layout.reduce)
    return (
        held.itemsize >= gradient.itemsize
        and layout.precision.float8 == "none"
        and not layout.parallel.cpu_offload
        and layout.parallel.reshard_after_forward != "always"
    )


def check_names(config: Config, layout: Layout) -> None:
    """Raise UserError if the configuration names a module that the whole model lacks.

    A pipeline stage has only some of the modules, so the steps applied to a stage cannot check all names.
    """
    model = build_meta_model(config)
    check_groups(model, config)
    pinned_parameters(model, config.precision.fp32_modules)
    check_modules(model, config.activation_checkpoint)
    if config.precision.float8 != "none":
        check_patterns(model, config.precision.float8_exclude)
    if config.parallel.cp > 1:
        check_attention(model)
    if config.parallel.tp > 1:
        plan_for(model, layout)


def check_groups(model: Transformer, config: Config) -> None:
    """Raise UserError if a pattern of optimizer.groups matches no parameter. `model`: the whole model, not a stage."""
    names = [name for name, _ in model.named_parameters()]
    for number, group in enumerate(config.optimizer.groups):
        for glob in group.names:
            if not any(fnmatchcase(name, glob) for name in names):
                close = ", ".join(difflib.get_close_matches(glob, _patterns(names), n=3, cutoff=0.0))
                raise UserError(
                    f'optimizer.groups[{number}].names: "{glob}" matches no parameter; the nearest names are {close}'
                )


def _patterns(names: Iterable[str]) -> list[str]:
    """Return patterns to suggest in place of `names`, e.g. layers.*.attention.wq, *.attention.wq and *.wq."""
    general = sorted(for_all_layers(names))
    ends = {
        f"*.{'.'.join(parts[at:])}"
        for parts in (n.split(".") for n in general)
        for at in range(1, len(parts))
    }
    return [*general, *sorted(ends)]


def build_meta_model(config: Config, stage: Stage | None = None) -> Transformer:
    """Return the model of `config`, or one pipeline stage, on the meta device in the storage dtype."""
    part = {} if stage is None else {"layers": stage.layers, "embed": stage.embed, "head": stage.head}
    with torch.device("meta"):
        model = build_model(config.model, config.train.seq_len, **part)
    model.loss = FusedLoss(
        config.train.z_loss_coef, config.train.loss_chunk_tokens, config.model.logit_soft_cap
    )
    return model.to(DTYPES[config.precision.storage])
