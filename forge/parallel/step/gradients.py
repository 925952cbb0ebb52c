"""Gradients between backward and the optimizer: the global norm, the decision whether to skip, and clipping.

Nothing in this file synchronises with the device: norm, decision and clip coefficient stay on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from forge.model.norm import promoted
from forge.shard import Shard


def sum_gradients(shards: Sequence[Shard], ranks: dist.ProcessGroup) -> None:
    """Sum the gradients of `shards` over `ranks`, a group of ranks with the same elements.

    Collective: one all-reduce. A missing gradient counts as zeros, e.g. of a router that received no token on this
    rank.
    """
    shards = [shard for shard in shards if shard.boxes]
    for shard in shards:
        if shard.grad is None:
            shard.parameter.grad = torch.zeros_like(shard.parameter)
    grads = [grad for shard in shards if (grad := shard.grad) is not None]
    if not grads or dist.get_world_size(ranks) == 1:
        return
    exact = promoted(grads[0].dtype)
    flat = torch.cat([grad.reshape(-1).to(exact) for grad in grads])
    dist.all_reduce(flat, group=ranks)
    parts = flat.split([grad.numel() for grad in grads])
    torch._foreach_copy_(grads, [part.view_as(grad) for part, grad in zip(parts, grads, strict=True)])


@dataclass(frozen=True)
class GradientReport:
    """The gradient norm of a step, and decisions about the step: device scalars, equal on all ranks.

    norm: L2 norm of the whole gradient, float64. skip: float32, 1.0 if the step must leave the model unchanged because a
    gradient or the loss is not finite, else 0.0. stop: number of ranks requesting the end of the run after this step,
    float64. save: number of ranks requesting a checkpoint, float64.
    """

    norm: Tensor
    skip: Tensor
    stop: Tensor
    save: Tensor


def report_gradients(shards: list[Shard], loss: Tensor, *, stop: bool, save: bool = False) -> GradientReport:
    """Return the gradient norm and the decision whether to skip the step.

    Collective over all ranks: one small all-reduce.

    loss: a device scalar. If it is not finite on any rank, all ranks skip the step. stop, save: this rank's requests. Each
    element of the global gradient is counted on only one rank, so the norm does not depend on the layout.
    """
    entries = torch.zeros(4, dtype=torch.float64, device=loss.device)
    # `fill_` runs a kernel. An assignment would copy from the host and synchronise with the device.
    entries[1].fill_(float(stop))
    entries[3].fill_(float(save))
    entries[2] = (~torch.isfinite(loss)).double()
    for counted in (True, False):
        for dtype, grads in _present(
            [shard for shard in shards if shard.is_primary_replica is counted]
        ).items():
            norms = torch._foreach_norm(grads, 2, dtype=promoted(dtype))
            square = torch.stack(norms).double().square().sum().to(entries.device)
            if counted:
                entries[0] += square
            else:
                # A replica is not counted in the norm, but a non-finite value in only one replica must make all ranks
                # skip.
                entries[2] += (~torch.isfinite(square)).double()
    if dist.get_world_size() > 1:
        dist.all_reduce(entries)
    norm = entries[0].sqrt()
    skip = (~torch.isfinite(norm) | (entries[2] > 0)).float()
    return GradientReport(norm=norm, skip=skip, stop=entries[1], save=entries[3])


def clip_gradients(shards: list[Shard], norm: Tensor, max_norm: float, optimizer: object = None) -> None:
    """Scale all gradients in place, on the device, to a global norm of at most `max_norm`; 0: do not clip.

    An optimizer with a method `scale_by` receives the factor instead, and scales the gradients in its next step.

    Pascanu et al., "On the difficulty of training recurrent neural networks", 2013.
    """
    if max_norm == 0:
        return
    coefficient = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    if scale_by := getattr(optimizer, "scale_by", None):
        scale_by(coefficient)
        return
    for dtype, grads in _present(shards).items():
        factor = coefficient.to(device=grads[0].device, dtype=promoted(dtype))
        if dtype == factor.dtype:
            torch._foreach_mul_(grads, factor)
            continue
        for grad in grads:
            # A factor in bfloat16 would scale all gradients by a rounded value. CUDA rounds a 0-dimensional factor to
            # the gradient's dtype; a factor with as many dimensions as the gradient keeps its own dtype.
            grad.mul_(factor.view((1,) * grad.ndim))


def _present(shards: list[Shard]) -> dict[torch.dtype, list[Tensor]]:
    """Return this rank's existing gradients, grouped by dtype, because a multi-tensor kernel takes one dtype.

    Gradients of offloaded parameters are on the CPU.
    """
    grads: dict[torch.dtype, list[Tensor]] = {}
    for shard in shards:
        if shard.boxes and (grad := shard.grad) is not None:
            grads.setdefault(grad.dtype, []).append(grad)
    return grads
