"""Tensor parallelism: the ranks of one mesh share every matrix product; with sequence parallelism also the rest.

Linear layers are split by PyTorch's styles and compute on DTensors. Embedding, norms and loss compute on local tensors
with collectives of their own, because DTensor would make the embedding's whole gradient on every rank and sum each
norm's gradient by itself in every microbatch. Per block and direction there are two all-gathers and two
reduce-scatters; without sequence parallelism two all-reduces.

A parameter that is whole on every rank, but whose gradient is made from this rank's part of the activations only
(norms and routers on pieces of the sequence, QK-norm on some of the heads), is `open`: its gradients are summed over the
ranks once per step, all in one collective, by `sum_partial_gradients`. Experts are left whole (forge/parallel/expert.py).
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Sequence
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    RowwiseParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import Shard as Split
from torch.nn import functional as F

from forge.errors import UserError
from forge.model import Embedding, FusedLoss, Head, RMSNorm, Router, Transformer
from forge.parallel.collectives import SEQUENCE, own_piece, sum_to_all, sum_to_pieces
from forge.parallel.layout import Layout
from forge.parallel.loss_parallel import TensorLoss
from forge.parallel.tensor_plan import PARTS, Plan, plan_for
from forge.shard import Shard

# Names end so in a block's last projections, which write into the residual stream.
INTO_STREAM = tuple(f".{back}" for _, back in PARTS.values())


def apply_tensor(model: Transformer, layout: Layout) -> None:
    """Split `model` (on the meta device) in place over the tp ranks; all parameters but experts' become DTensors.

    Raises UserError if the plan does not fit the model, or if asynchronous collectives are asked for without a card.
    """
    mesh, parallel = layout.meshes.tp, layout.parallel
    if mesh.size() == 1:
        return
    # It warns of every redistribution over more than one axis; none is in a step, some are in tests and tools.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    if parallel.async_tp:
        _overlap_collectives(mesh)
    plan = plan_for(model, layout)
    stream = Split(SEQUENCE) if parallel.sequence_parallel else Replicate()
    opened: list[str] = []
    for name, module in list(model.named_modules()):
        style = plan.get(name)
        if isinstance(style, ParallelStyle):
            parallelize_module(module, mesh, style, src_data_rank=None)
        elif any(isinstance(module, kind) for kind in PARTS):
            _take_whole_input(module, stream, mesh)
        elif isinstance(module, nn.Linear):
            _split_linear(module, style, stream if name.endswith(INTO_STREAM) else Replicate(), mesh)
        elif isinstance(module, Embedding):
            _split_embedding(module, style, mesh, pieces=parallel.sequence_parallel)
        elif isinstance(module, Head):
            distribute(module, mesh, Split(0) if style else Replicate())
        elif isinstance(module, Router):
            distribute(module, mesh, Replicate())
            module.__class__ = _LocalRouter
            opened.append(f"{name}.weight")
        elif isinstance(module, RMSNorm):
            distribute(module, mesh, Replicate())
            module.__class__ = _LocalNorm
            if _sees_a_part(name, plan, parallel.sequence_parallel):
                opened.append(f"{name}.weight")
    model.loss = _loss(model, plan, layout)
    model.__dict__["_forge_open_over_tp"] = frozenset(opened)
    plain = [name for name, p in model.named_parameters() if not isinstance(p, DTensor)]
    left = [name for name in plain if ".experts." not in name]
    assert not left, f"tensor parallelism does not know what to do with {', '.join(left)}"


def partial_shards(model: nn.Module, shards: Sequence[Shard]) -> list[Shard]:
    """The shards whose gradients `sum_partial_gradients` has to complete; none without tensor parallelism."""
    opened = model.__dict__.get("_forge_open_over_tp", frozenset())
    return [shard for shard in shards if shard.name in opened]


def sum_partial_gradients(shards: Sequence[Shard], mesh: DeviceMesh) -> None:
    """Sum the gradients of `shards` over the ranks of `mesh`, which hold the same elements; one collective."""
    present = [shard.grad for shard in shards if shard.boxes]
    grads = [grad for grad in present if grad is not None]
    if not grads:
        return
    exact = torch.promote_types(torch.float32, grads[0].dtype)
    flat = torch.cat([grad.reshape(-1).to(exact) for grad in grads])
    dist.all_reduce(flat, group=mesh.get_group())
    parts = flat.split([grad.numel() for grad in grads])
    torch._foreach_copy_(grads, [part.view_as(grad) for part, grad in zip(parts, grads, strict=True)])


def _take_whole_input(part: nn.Module, stream: Placement, mesh: DeviceMesh) -> None:
    """Gather a part's input once, as one DTensor for all projections, so that their gradients are summed only once."""
    others = (None,) * (len(inspect.signature(part.forward).parameters) - 1)
    prepare = PrepareModuleInput(
        input_layouts=(stream, *others), desired_input_layouts=(Replicate(), *others), use_local_output=False
    )
    parallelize_module(part, mesh, prepare)


def _split_linear(module: nn.Linear, style: str | None, back: Placement, mesh: DeviceMesh) -> None:
    """`back` is the layout that the output takes if it has all features."""
    styles: dict[str | None, ParallelStyle] = {
        "colwise": ColwiseParallel(),
        "colwise_rep": ColwiseParallel(output_layouts=back),
        "rowwise": RowwiseParallel(output_layouts=back),
        "rowwise_rep": RowwiseParallel(input_layouts=Replicate(), output_layouts=back),
        # Every rank computes it alike, on the whole sequence.
        None: PrepareModuleInputOutput(
            input_layouts=Replicate(),
            desired_input_layouts=Replicate(),
            output_layouts=Replicate(),
            desired_output_layouts=back,
        ),
    }
    if style is None:
        distribute(module, mesh, Replicate())
    parallelize_module(module, mesh, styles[style], src_data_rank=None)


def distribute(module: nn.Module, mesh: DeviceMesh, placement: Placement) -> None:
    """Make the parameters that are directly in `module` (on the meta device) DTensors over the 1-D `mesh`."""
    for name, parameter in list(module.named_parameters(recurse=False)):
        whole = distribute_tensor(parameter.detach(), mesh, [placement], src_data_rank=None)
        module.register_parameter(name, nn.Parameter(whole, requires_grad=parameter.requires_grad))


class _LocalNorm(RMSNorm):
    """A norm on a local part of the activations; its weight is whole on every rank."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, cast(DTensor, self.weight).to_local(), self.eps)


class _LocalRouter(Router):
    """A router of this rank's piece of the sequence; its weight is whole on every rank."""

    def logits(self, x: Tensor) -> Tensor:
        return F.linear(x.to(self.weight.dtype), cast(DTensor, self.weight).to_local())


def _sees_a_part(name: str, plan: Plan, pieces: bool) -> bool:
    """Whether the norm `name` works on only some of the tokens or heads."""
    parent, _, leaf = name.rpartition(".")
    if leaf in ("q_norm", "k_norm"):
        return plan.get(f"{parent}.w{leaf[0]}") == "colwise"
    return pieces


class _LocalEmbedding(Embedding):
    """Looks up all tokens among the rows of the vocabulary that this rank has, from `first_row` on."""

    mesh: DeviceMesh
    pieces: bool
    first_row: int | None

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens int64 `[batch, seq]` -> the stream: `[batch, seq / tp, dim]` if `pieces`, else `[batch, seq, dim]`."""
        weight = cast(DTensor, self.weight).to_local()
        if self.first_row is None:
            x = F.embedding(tokens, weight)
            return own_piece(x, self.mesh) if self.pieces else x
        row = tokens - self.first_row
        here = (row >= 0) & (row < weight.shape[0])
        x = F.embedding(row.masked_fill(~here, 0), weight).masked_fill(~here.unsqueeze(-1), 0.0)
        return sum_to_pieces(x, self.mesh) if self.pieces else sum_to_all(x, self.mesh)


def _split_embedding(module: Embedding, style: str | None, mesh: DeviceMesh, *, pieces: bool) -> None:
    vocabulary = module.weight.shape[0]
    distribute(module, mesh, Split(0) if style else Replicate())
    module.__class__ = _LocalEmbedding
    local = cast(_LocalEmbedding, module)
    local.mesh, local.pieces = mesh, pieces
    local.first_row = first_row(vocabulary, mesh) if style else None


def first_row(vocabulary: int, mesh: DeviceMesh) -> int:
    """Where this rank's rows begin: all ranks but the last ones have ceil(vocabulary / tp) of them."""
    return min(vocabulary, -(-vocabulary // mesh.size()) * mesh.get_local_rank())


def _loss(model: Transformer, plan: Plan, layout: Layout) -> TensorLoss:
    style = plan.get("embedding" if model.config.tie_embeddings else "head")
    split = layout.parallel.loss_parallel and style is not None and style != "colwise_rep"
    return TensorLoss(
        cast(FusedLoss, model.loss),
        layout.meshes.tp,
        pieces=layout.parallel.sequence_parallel,
        first_row=first_row(layout.model.vocab_size, layout.meshes.tp) if split else None,
    )


def _overlap_collectives(mesh: DeviceMesh) -> None:
    """Let the compiler split matrix products and interleave them with their collectives (PyTorch's asynchronous TP)."""
    if mesh.device_type != "cuda":
        raise UserError("parallel.async_tp = true needs CUDA cards that reach each other's memory; use false")
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    torch._inductor.config._micro_pipeline_tp = True
    enable_symm_mem_for_group(mesh.get_group().group_name)
