"""`build_parallel_model`: the one place where a model meets its layout."""

from __future__ import annotations

import torch

from forge.config import Config
from forge.model import FusedLoss, Transformer, build_model
from forge.parallel.activation import apply_activation, check_modules
from forge.parallel.compile import apply_compile
from forge.parallel.context import apply_context
from forge.parallel.data import DataParallel, apply_data_parallel
from forge.parallel.expert import apply_expert
from forge.parallel.float8 import apply_float8, check_patterns
from forge.parallel.initialize import initialize
from forge.parallel.layout import Layout, make_layout
from forge.parallel.mesh import Meshes
from forge.parallel.model import ParallelModel, SequentialModel
from forge.parallel.order import take_step
from forge.parallel.pipeline import Part, PipelinedModel, Stage, plan_pipeline
from forge.parallel.precision import DTYPES, pinned_parameters
from forge.parallel.tensor import apply_tensor
from forge.parallel.tensor_plan import plan_for


def build_parallel_model(config: Config, meshes: Meshes, device: torch.device) -> ParallelModel:
    """The model of `config` over all ranks, with its initial values. Collective."""
    layout = make_layout(config, meshes)
    if meshes.degrees.pp == 1:
        model, engine = build_part(config, layout, device)
        return SequentialModel([model], [engine], layout)
    check_names(config, layout)
    plan = plan_pipeline(config, meshes.degrees)
    own = plan.of_rank(meshes.pp.rank())
    parts = [Part(stage, *build_part(config, layout, device, stage)) for stage in own]
    return PipelinedModel(parts, plan, layout)


def build_part(
    config: Config, layout: Layout, device: torch.device, stage: Stage | None = None
) -> tuple[Transformer, DataParallel]:
    """The whole model, or one stage of it, on the ranks that share it. Collective over these.

    It is made on the meta device and parallelism is applied from the inside out (the order and its reasons:
    forge/parallel/order.py); only then does memory exist, of each rank's own shards.
    """
    model = build_meta_model(config, stage)
    engine = apply_layout(model, layout)
    engine.allocate(device)
    take_step(model, "initialise")
    initialize(engine.shards, model.initial_values(), config.run.seed)
    model.reset_buffers(layout.compute)
    return model, engine


def check_names(config: Config, layout: Layout) -> None:
    """Raise UserError where the configuration names modules that the model does not have.

    Each step checks the names that it is given, but a stage of a pipeline has only some of the modules.
    """
    model = build_meta_model(config)
    pinned_parameters(model, config.precision.fp32_modules)
    check_modules(model, config.activation_checkpoint.modules)
    if config.precision.float8 != "none":
        check_patterns(model, config.precision.float8_exclude)
    if config.parallel.tp > 1:
        plan_for(model, layout)


def apply_layout(model: Transformer, layout: Layout) -> DataParallel:
    """Change `model`, on the meta device, in place into this rank's part of it, without memory yet. Collective."""
    apply_context(model, layout)
    apply_tensor(model, layout)
    apply_expert(model, layout)
    apply_float8(model, layout)
    apply_activation(model, layout)
    apply_compile(model, layout)
    return apply_data_parallel(model, layout)


def build_meta_model(config: Config, stage: Stage | None = None) -> Transformer:
    """The model of `config`, or one stage of it, on the meta device: shapes and the storage dtype, no memory."""
    part = {} if stage is None else {"layers": stage.layers, "embed": stage.embed, "head": stage.head}
    with torch.device("meta"):
        model = build_model(config.model, config.train.seq_len, **part)
    model.loss = FusedLoss(
        config.train.z_loss_coef, config.train.loss_chunk_tokens, config.model.logit_soft_cap
    )
    return model.to(DTYPES[config.precision.storage])
