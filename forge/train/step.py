"""One optimizer step, used by trainer, planner, verifier and benchmarks.

Functions are collective and do not synchronise with the device.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from forge.optim import Optimizer
from forge.parallel.step.gradients import GradientReport, clip_gradients
from forge.parallel.step.model import Batch, ParallelModel, Sums
from forge.parallel.step.routers import RouterReport


def compute_gradients(model: ParallelModel, batch: Batch) -> Sums:
    """Compute the gradient of the global batch into the shards. Return the sums of losses. Collective."""
    sums = model.forward_backward(batch, model.count_tokens(batch))
    model.finalize_gradients()
    return sums


def apply_gradients(
    model: ParallelModel,
    optimizer: Optimizer,
    report: GradientReport,
    lr: float,
    max_norm: float,
    around_update: AbstractContextManager[object] | None = None,
) -> RouterReport | None:
    """Clip the gradients, update parameters and routers unless `report.skip`, and discard the gradients. Collective.

    max_norm: bound of the global gradient norm; 0: no clipping. around_update: context manager entered for the
    optimizer's update only. Return the routers' report.
    """
    clip_gradients(model.shards, report.norm, max_norm, optimizer)
    if model.largest_logits and hasattr(optimizer, "bound_logits"):
        optimizer.bound_logits(model.largest_logits)
    with around_update or nullcontext():
        # Under parallel.cpu_offload the update runs on the CPU, which waits here for the flag.
        optimizer.step(lr, report.skip.to(model.shards[0].data.device))
    model.after_update(getattr(optimizer, "copies", ()))
    routers = model.update_router(report.skip)
    model.zero_gradients()
    return routers
