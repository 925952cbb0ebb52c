"""`Layout`: the configuration sections needed by parallelism, and the meshes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from forge.config import Config
from forge.config.layout import ActivationCheckpoint, Compile, Parallel, Precision
from forge.config.model import ModelConfig
from forge.parallel.mesh import Meshes
from forge.parallel.precision import DTYPES
from forge.runtime.errors import UserError
from forge.runtime.imports import load_function
from forge.shard import Box


@dataclass(frozen=True)
class Layout:
    """The distribution of one model over ranks. Every `apply_*` takes a model and a Layout.

    tensor_plan: maps a model to its tensor-parallel plan, by importing and calling the function `parallel.tp_plan`.
    check_replicas: compare replicas between ranks during the run. observe_logits: record the largest attention logits
    for the optimizer.
    """

    model: ModelConfig
    parallel: Parallel
    precision: Precision
    activation_checkpoint: ActivationCheckpoint
    compile: Compile
    meshes: Meshes
    micro_batch_size: int
    check_replicas: bool
    observe_logits: bool
    tensor_plan: Callable[[nn.Module], object]

    @property
    def storage(self) -> torch.dtype:
        return DTYPES[self.precision.storage]

    @property
    def compute(self) -> torch.dtype:
        return DTYPES[self.precision.compute]

    @property
    def reduce(self) -> torch.dtype:
        return DTYPES[self.precision.reduce]

    @property
    def sequence_pieces(self) -> int:
        """Return the number of pieces into which tensor parallelism divides the sequence.

        Sequence parallelism divides the residual stream. A mixture of experts divides its tokens for routing even
        without sequence parallelism.
        """
        divided = self.parallel.sequence_parallel or self.model.moe is not None
        return self.parallel.tp if divided else 1


def frees_after_forward(layout: Layout | Config) -> bool:
    """Return whether FSDP2 frees gathered parameters after forward. Under auto, some units are exceptions."""
    choice = layout.parallel.reshard_after_forward
    return layout.parallel.pp == 1 if choice == "auto" else choice != "never"


def bounds_logits(config: Config) -> bool:
    """Return whether the optimizer needs the largest attention logits of each step."""
    return config.optimizer.name == "muon" and config.optimizer.muon.qk_clip > 0


def make_layout(config: Config, meshes: Meshes) -> Layout:
    """Return the Layout of `config` on `meshes`."""

    def tensor_plan(model: nn.Module) -> object:
        path = str(config.parallel.tp_plan)
        try:
            function = load_function(path)
        except ValueError as error:
            raise UserError(f'parallel.tp_plan = "{path}": {error}') from error
        return function(model, config)

    return Layout(
        model=config.model,
        parallel=config.parallel,
        precision=config.precision,
        activation_checkpoint=config.activation_checkpoint,
        compile=config.compile,
        meshes=meshes,
        micro_batch_size=config.train.micro_batch_size,
        check_replicas=config.resilience.check_replicas,
        observe_logits=bounds_logits(config),
        tensor_plan=tensor_plan,
    )


def own_box(parameter: DTensor, at: Mapping[str, int] | None = None) -> Box:
    """Return this rank's box (rectangular slice) of the global tensor.

    at: mesh axis -> position, to get the box of another rank. Each mesh axis in turn divides the box like torch.chunk, the
    last axis first. The order matters if FSDP2 and tensor parallelism split the same dimension (`_StridedShard`): FSDP2
    splits the parts left by tensor parallelism, although its axis comes first in the mesh.
    """
    offsets, sizes = [0] * parameter.ndim, list(parameter.shape)
    mesh = parameter.device_mesh
    for axis in reversed(range(mesh.ndim)):
        placement = parameter.placements[axis]
        if placement.is_replicate():
            continue
        dim: int = placement.dim  # type: ignore[attr-defined]
        piece = -(-sizes[dim] // mesh.size(axis))
        place = mesh.get_local_rank(axis) if at is None else at[(mesh.mesh_dim_names or ())[axis]]
        start = min(piece * place, sizes[dim])
        offsets[dim] += start
        sizes[dim] = min(piece, sizes[dim] - start)
    # Check only this rank's box: `to_local` is slow, and the planner asks for the boxes of thousands of ranks.
    if at is None:
        local = parameter.to_local()
        assert tuple(sizes) == tuple(local.shape) or not local.numel()
    return Box(tuple(offsets), tuple(sizes))


def local_box(parameter: nn.Parameter, at: Mapping[str, int] | None = None) -> Box:
    """Return this rank's box of `parameter`: a slice under tensor or expert parallelism, else the whole parameter.

    at: as for `own_box`.
    """
    if isinstance(parameter, DTensor):
        return own_box(parameter, at)
    return Box((0,) * parameter.ndim, tuple(parameter.shape))
