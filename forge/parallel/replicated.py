"""Routers under FSDP2: every rank keeps them whole, and their gradients are summed in one collective per step.

They compute in another dtype than the block around them, so FSDP would gather and reduce them apart from it, in every layer
and microbatch. A router has a few megabytes at most, and over many ranks a collective of that size is all latency. Whole on
every rank they take as many bytes each as their parameters, gradients and moments have: 0.4 GB for 40 routers of 256 experts
on a stream of 2560, in float32 with float32 moments.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn

from forge.model import Router, Transformer
from forge.parallel.layout import Layout
from forge.parallel.precision import Unit
from forge.shard import Shard


def replicated_parameters(
    model: Transformer, dtypes: Mapping[nn.Parameter, torch.dtype], layout: Layout
) -> set[nn.Parameter]:
    """Return the parameters of routers that need no cast to compute; none where nothing is sharded, or all is offloaded."""
    if layout.meshes.fsdp.size() == 1 or layout.parallel.cpu_offload:
        return set()
    routers = [module for module in model.modules() if isinstance(module, Router)]
    return {p for router in routers for p in router.parameters() if dtypes[p] == p.dtype}


def units_without(units: Sequence[Unit], parameters: set[nn.Parameter]) -> list[Unit]:
    """Return `units`, those that have no parameter but `parameters` left out; others lose the modules of which this holds."""
    kept = []
    for unit in units:
        modules = tuple(
            m for m in unit.modules if not parameters.issuperset(m.parameters()) or not list(m.parameters())
        )
        if modules:
            kept.append(replace(unit, modules=modules))
    return kept


class Replicated:
    """The sum over `ranks` of the gradients of `shards`, which all of them hold whole."""

    def __init__(self, shards: Sequence[Shard], ranks: dist.ProcessGroup):
        self._shards, self._ranks = shards, ranks
        self._work: dist.Work | None = None

    def start_sum(self) -> None:
        """Begin the sum, behind the last backward. Collective."""
        if not self._shards:
            return
        for shard in self._shards:
            if shard.grad is None:  # this rank's tokens have reached no router, others' may have
                shard.parameter.grad = torch.zeros_like(shard.parameter)
        self._flat = torch.cat([grad.reshape(-1) for grad in self._gradients()])
        self._work = dist.all_reduce(self._flat, group=self._ranks, async_op=True)

    def finish_sum(self) -> None:
        """Wait for it, and let the gradients be the sums."""
        if self._work is None:
            return
        self._work.wait()
        grads = self._gradients()
        parts = self._flat.split([grad.numel() for grad in grads])
        torch._foreach_copy_(grads, [part.view_as(grad) for part, grad in zip(parts, grads, strict=True)])
        del self._flat
        self._work = None

    def _gradients(self) -> list[torch.Tensor]:
        return [grad for shard in self._shards if (grad := shard.grad) is not None]
