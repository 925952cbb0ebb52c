"""Small parameters under FSDP2 that every rank keeps whole; their gradients are summed in one collective per step.

Routers, and decays of linear attention, compute in another dtype than the block around them. FSDP would gather and reduce
them apart from the block, in every layer and microbatch: a collective of a few megabytes is all latency over many ranks.
Whole on every rank they cost the bytes of their parameters, gradients and moments: 0.4 GB for 40 routers of 256 experts on a
stream of 2560, in float32 with float32 moments.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn

from forge.model import Router, Transformer
from forge.model.linear_attention import Decay
from forge.parallel.layout import Layout
from forge.parallel.precision import Unit


def replicated_parameters(
    model: Transformer, dtypes: Mapping[nn.Parameter, torch.dtype], layout: Layout
) -> set[nn.Parameter]:
    """Return the parameters of routers that need no cast to compute, and those of decays, which cast by themselves.

    None where nothing is sharded, or all is offloaded.
    """
    if layout.meshes.fsdp.size() == 1 or layout.parallel.cpu_offload:
        return set()
    small = [module for module in model.modules() if isinstance(module, Router | Decay)]
    return {p for m in small for p in m.parameters() if isinstance(m, Decay) or dtypes[p] == p.dtype}


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
