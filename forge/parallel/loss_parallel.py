"""The loss where ranks share the head: each computes the logits of its own rows of the vocabulary, which are not gathered.

Per chunk of tokens the ranks exchange two numbers per token: the logsumexp over a rank's own rows, and the target's
logit, which is 0 on all ranks but the one that holds the target's row. The logsumexp of the logsumexps is the one over
the whole vocabulary (Shoeybi et al. 2019, "Megatron-LM", section 3, where maximum and sum are sent separately). Gradients
of a rank's own logits and rows are local; those of hidden states are summed over the ranks.
"""

from __future__ import annotations

import functools
from typing import cast

import torch
import torch.distributed._functional_collectives as functional
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from forge import compat
from forge.model import FusedLoss
from forge.model.loss import chunk_loss
from forge.parallel.collectives import gather_for_all, gather_for_parts, share


class TensorLoss(FusedLoss):
    """FusedLoss for a head whose weight is a DTensor over `mesh`; sums and logits are equal on all ranks.

    `pieces`: hidden states come as pieces of the sequence. `first_row`: where this rank's rows of the vocabulary begin,
    for a weight that is split over it; None: the weight is gathered and every rank computes the whole loss.
    """

    def __init__(self, plain: FusedLoss, mesh: DeviceMesh, *, pieces: bool, first_row: int | None):
        super().__init__(plain.z_loss_coef, plain.chunk_tokens, plain.soft_cap)
        self.mesh = mesh
        self.pieces = pieces
        self.split = first_row is not None
        if first_row is not None:
            self.chunk = functools.partial(chunk_loss, read=SplitHead(mesh, first_row).read)

    def forward(self, hidden: Tensor, head_weight: Tensor, labels: Tensor | None) -> Tensor:
        """hidden `[batch, seq, dim]`, or of seq / tp tokens if `pieces`; labels and results as for FusedLoss."""
        weight = cast(DTensor, head_weight)
        if self.split and labels is not None:
            whole = gather_for_parts(hidden, self.mesh) if self.pieces else share(hidden, self.mesh)
            return super().forward(whole, weight.to_local(), labels)
        whole = gather_for_all(hidden, self.mesh) if self.pieces else hidden
        return super().forward(whole, weight.redistribute(placements=[Replicate()]).to_local(), labels)


class SplitHead:
    """Reads the logits of this rank's rows of the vocabulary, from `first_row` on."""

    def __init__(self, mesh: DeviceMesh, first_row: int):
        self.mesh = mesh
        self.first_row = first_row

    def read(self, logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """As forge.model.loss.whole_vocabulary, for logits `[chunk, rows]`, target int64 `[chunk, 1]`.

        The first two results are equal on all ranks.
        """
        column = target - self.first_row
        here = (column >= 0) & (column < logits.shape[-1])
        column = column.masked_fill(~here, 0)
        lse, target_logit = self.combine(
            logits.logsumexp(-1, keepdim=True), logits.gather(-1, column).masked_fill(~here, 0.0)
        )
        return lse, target_logit, column, here.to(logits.dtype)

    def combine(self, lse: Tensor, target_logit: Tensor) -> tuple[Tensor, Tensor]:
        """Combine values over each rank's rows into values over the whole vocabulary; both `[chunk, 1]`, in and out."""
        mine = torch.stack([lse, target_logit])[None]
        ranks = functional.wait_tensor(compat.all_gather_single(mine, 0, self.mesh))  # [tp, 2, chunk, 1]
        return ranks[:, 0].logsumexp(0), ranks[:, 1].sum(0)
