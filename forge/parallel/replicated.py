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
from torch import nn

from forge.model import Router, Transformer
from forge.parallel.layout import Layout
from forge.parallel.precision import Unit


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
