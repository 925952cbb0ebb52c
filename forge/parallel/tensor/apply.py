"""Tensor parallelism: the tp ranks divide every matrix product; with sequence parallelism, the other operators too.

With sequence parallelism, each block makes two all-gathers and two reduce-scatters in forward, and as many in backward;
without it, two all-reduces in each direction. Modules and their styles: forge/parallel/tensor/plan.py. Experts stay
whole (forge/parallel/expert.py).

Partial gradients: some parameters are whole on every rank, but each rank computes their gradient from only its part of the
activations. Norms and routers see pieces of the sequence; QK-norm sees some of the heads. These gradients are summed
over the tp ranks once per step, in one collective (`sum_gradients`).

Loss: each rank computes the logits of its own rows of the vocabulary; logits are not gathered. For each token, the
ranks exchange two numbers: the logsumexp over the rank's rows, and the target's logit, which is 0 except on the owner
rank of the target's row. The logsumexp of the ranks' logsumexps is the logsumexp over the whole vocabulary (Shoeybi et
al. 2019, "Megatron-LM", section 3, sends maximum and sum separately). Gradients of the rank's logits and rows are
local. Gradients of hidden states are summed over the ranks.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from typing import cast

import torch
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, parallelize_module
from torch.distributed.tensor.placement_types import Shard as Split

from forge.model import FusedLoss, LatentAttention, Transformer
from forge.model.loss import Vocabulary, chunk_loss
from forge.parallel.layout import Layout
from forge.parallel.modules import replace_module
from forge.parallel.step.collectives import SEQUENCE, gather_for_all, gather_for_parts, share
from forge.parallel.tensor.local import ModulePlace, first_row
from forge.parallel.tensor.plan import PARTS, TensorPlan, input_of, plan_for, styles_of
from forge.runtime import compat
from forge.runtime.errors import UserError
from forge.shard import Shard

# Name endings of the projections that write into the residual stream.
INTO_STREAM = tuple(f".{back}" for _, back in PARTS.values())


def apply_tensor(model: Transformer, layout: Layout) -> None:
    """Split `model` (on the meta device) over the tp ranks, in place. All parameters except experts' become DTensors.

    Raises UserError if the plan does not fit the model, or if asynchronous collectives are requested without a GPU.
    """
    mesh, parallel = layout.meshes.tp, layout.parallel
    # PyTorch warns at every redistribution over more than one axis. A step has none, but tests and tools have some.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    if parallel.async_tp:
        _overlap_collectives(mesh)
    plan = plan_for(model, layout)
    stream = Split(SEQUENCE) if parallel.sequence_parallel else Replicate()
    for name, module in list(model.named_modules()):
        style = plan.get(name)
        if isinstance(style, ParallelStyle):
            parallelize_module(module, mesh, style, src_data_rank=None)
        elif styles := styles_of(module):
            partial = _sees_a_part(model, name, plan, parallel.sequence_parallel)
            output = stream if name.endswith(INTO_STREAM) else Replicate()
            split = styles[style](
                module, ModulePlace(mesh, stream, input_of(model, name, stream), output, partial)
            )
            if split is not module:
                replace_module(model, name, split)
    model.loss = _loss(model, plan, layout)
    plain = [name for name, p in model.named_parameters() if not isinstance(p, DTensor)]
    left = [name for name in plain if ".experts." not in name]
    assert not left, f"tensor parallelism does not know what to do with {', '.join(left)}"


def partial_shards(model: nn.Module, shards: Sequence[Shard]) -> list[Shard]:
    """Return the shards whose gradients must be summed over the tp ranks. Empty without tensor parallelism."""
    modules = {n: m for n, m in model.named_modules() if getattr(m, "partial_gradients", False)}
    names = {f"{name}.{own}" for name, module in modules.items() for own, _ in module.named_parameters()}
    return [shard for shard in shards if shard.name in names]


def _sees_a_part(model: nn.Module, name: str, plan: TensorPlan, pieces: bool) -> bool:
    """Return whether the module `name` processes only some of the tokens or heads on this rank."""
    parent, _, leaf = name.rpartition(".")
    if leaf == "latent_norm":
        return True
    if leaf in ("wa_down", "wg_down"):
        return _splits_rows(plan.get(f"{parent}.{leaf.removesuffix('_down')}"))
    if leaf == "latents":
        return _splits_rows(plan.get(f"{parent}.wkv_b"))
    of_heads = {"q_norm": "wq", "k_norm": "wk", "out_norm": "wv"}
    if leaf in of_heads and not isinstance(model.get_submodule(parent), LatentAttention):
        return _splits_rows(plan.get(f"{parent}.{of_heads[leaf]}"))
    return pieces


def _splits_rows(style: str | ParallelStyle | None) -> bool:
    """Return whether a projection of this style gives each rank a part of its outputs, e.g. of the heads."""
    if isinstance(style, ColwiseParallel):
        return style.output_layouts[0].is_shard()
    return style == "colwise"


def _loss(model: Transformer, plan: TensorPlan, layout: Layout) -> TensorLoss:
    assert isinstance(model.loss, FusedLoss)
    mesh, style = layout.meshes.tp, plan.get("embedding" if model.config.tie_embeddings else "head")
    split = layout.parallel.loss_parallel and style is not None and style != "colwise_rep"
    return TensorLoss(
        model.loss,
        mesh,
        pieces=layout.parallel.sequence_parallel,
        first_row=first_row(layout.model.vocab_size, mesh) if split else None,
    )


def _overlap_collectives(mesh: DeviceMesh) -> None:
    """Turn on PyTorch's asynchronous TP: the compiler interleaves matrix products with their collectives.

    Raises UserError without CUDA.
    """
    if mesh.device_type != "cuda":
        raise UserError("parallel.async_tp = true needs CUDA GPUs with peer-to-peer memory access; use false")
    torch._inductor.config._micro_pipeline_tp = True
    compat.share_memory(mesh.get_group())


class TensorLoss(FusedLoss):
    """FusedLoss for a head whose weight is a DTensor over `mesh`. Sums and logits are equal on all ranks. Collective.

    pieces: True if hidden states are pieces of the sequence. first_row: the first row of this rank's part of the
    vocabulary. None: the vocabulary is not divided; the weight is gathered and every rank computes the whole loss.
    """

    def __init__(self, plain: FusedLoss, mesh: DeviceMesh, *, pieces: bool, first_row: int | None):
        super().__init__(plain.z_loss_coef, plain.chunk_tokens, plain.soft_cap)
        self.mesh = mesh
        self.pieces = pieces
        self.split = first_row is not None
        if first_row is not None:
            self.chunk = functools.partial(chunk_loss, vocabulary=SplitVocabulary(mesh, first_row))

    def forward(self, hidden: Tensor, head_weight: Tensor, labels: Tensor | None) -> Tensor:
        """hidden `[batch, seq, dim]`, or `[batch, seq / tp, dim]` if `pieces`; labels and results as for FusedLoss."""
        weight = cast(DTensor, head_weight)
        if self.split and labels is not None:
            whole = gather_for_parts(hidden, self.mesh) if self.pieces else share(hidden, self.mesh)
            return super().forward(whole, weight.to_local(), labels)
        whole = gather_for_all(hidden, self.mesh) if self.pieces else hidden
        return super().forward(whole, weight.redistribute(placements=[Replicate()]).to_local(), labels)


class SplitVocabulary(Vocabulary):
    """A vocabulary split over ranks. This rank has the rows from `first_row`, and their logits. Methods are collective."""

    def __init__(self, mesh: DeviceMesh, first_row: int):
        self.mesh = mesh
        self.first_row = first_row

    def locate(self, target: Tensor, columns: int) -> tuple[Tensor, Tensor]:
        column = target - self.first_row
        here = (column >= 0) & (column < columns)
        return column.masked_fill(~here, 0), here

    def combine(self, lse: Tensor, target_logit: Tensor) -> tuple[Tensor, Tensor]:
        mine = torch.stack([lse, target_logit])[None]
        ranks = functional.wait_tensor(compat.all_gather_single(mine, 0, self.mesh))  # [tp, 2, chunk, 1]
        return ranks[:, 0].logsumexp(0), ranks[:, 1].sum(0)
