"""Initial values that do not depend on the layout.

Every element of a parameter is a pure function of (seed, parameter name, global index). Random values are generated in
float32, in blocks of 2^16 consecutive elements of the flattened global tensor. Each block has its own generator, keyed
by (seed, name, block number). A rank generates only the blocks that overlap its shards. For each type of device, the
same seed gives the same bits on any number of ranks.

`describe` returns these values by parameter name, and sets the fields of shards that optimizers read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from forge.config import Config
from forge.model import Experts, Normal, Router, SharedGate, ShortConvolution, Uniform
from forge.parallel.parametrization import parametrize
from forge.shard import Box, Kind, Shard

BLOCK = 1 << 16
# Boxes are filled in spans of at most this many elements of the flattened tensor, to bound scratch memory (16 MiB).
LONGEST_SPAN = 1 << 22


def describe(
    model: nn.Module, shards: Sequence[Shard], config: Config
) -> tuple[dict[str, float | Normal | Uniform], list[Shard]]:
    """Return the initial values of `model` by parameter name, and `shards` with kind, heads and rates set.

    Optimizers need these three fields in every shard.
    """
    known: Any = model
    kinds, heads = parameter_kinds(model), known.heads() if hasattr(model, "heads") else {}
    kind_of = {name: kinds.get(parameter, "dense") for name, parameter in model.named_parameters()}
    described = [replace(s, kind=kind_of[s.name], heads=heads.get(s.name, 1)) for s in shards]
    starts = known.initial_values()
    if config.optimizer.parametrization == "standard":
        return starts, described
    return parametrize(starts, described, config)


def parameter_kinds(model: nn.Module) -> dict[nn.Parameter, Kind]:
    """Return the kind of each parameter of experts, routers and convolutions in `model`. All other parameters are dense.

    The gate of shared experts counts as a router with one row.
    """
    classes: dict[type[nn.Module], Kind] = {
        Experts: "expert",
        Router: "router",
        SharedGate: "router",
        ShortConvolution: "convolution",
    }
    return {
        parameter: kind
        for module in model.modules()
        for known, kind in classes.items()
        if isinstance(module, known)
        for parameter in module.parameters()
    }


def initialize(
    shards: list[Shard],
    values: dict[str, float | Normal | Uniform],
    seed: int,
    device: torch.device | None = None,
) -> None:
    """Fill every shard in place with its initial values.

    values: parameter name -> constant or distribution. device: generates the numbers; None: each shard's own device. Raises
    KeyError if a parameter has no entry, so no memory stays uninitialised.
    """
    for shard in shards:
        start = values[shard.name]
        if not isinstance(start, Normal | Uniform):
            shard.data.fill_(start)
            continue
        for box, piece in shard.pieces(shard.data):
            fill_random(piece, box, shard.global_shape, start, seed, shard.name, device)


def fill_random(
    out: Tensor,
    box: Box,
    global_shape: torch.Size,
    start: Normal | Uniform,
    seed: int,
    name: str,
    device: torch.device | None = None,
) -> None:
    """Fill `out` with the elements of `box` of the global tensor `name`, drawn from the distribution `start`.

    `out` has the box's shape. device: generates the numbers; None: the device of `out`.
    """
    if box.numel == 0:
        return
    strides = [prod(global_shape[d + 1 :]) for d in range(len(global_shape))]
    first = sum(offset * stride for offset, stride in zip(box.offsets, strides, strict=True))
    span = 1 + sum((size - 1) * stride for size, stride in zip(box.sizes, strides, strict=True))
    if span <= LONGEST_SPAN:
        drawn = _draw(first, first + span, prod(global_shape), seed, name, device or out.device)
        out.copy_(start.of(drawn).as_strided(box.sizes, strides))
        return
    axis = next(d for d, size in enumerate(box.sizes) if size > 1)
    half = box.sizes[axis] // 2
    for begin, size in ((0, half), (half, box.sizes[axis] - half)):
        offsets = (*box.offsets[:axis], box.offsets[axis] + begin, *box.offsets[axis + 1 :])
        sizes = (*box.sizes[:axis], size, *box.sizes[axis + 1 :])
        part = out.narrow(axis, begin, size)
        fill_random(part, Box(offsets, sizes), global_shape, start, seed, name, device)


def _draw(start: int, stop: int, numel: int, seed: int, name: str, device: torch.device) -> Tensor:
    """Return random elements [start, stop) of the flattened tensor `name`. Standard normal, float32 `[stop - start]`."""
    out = torch.empty(stop - start, dtype=torch.float32, device=device)
    generator = torch.Generator(device)
    for block in range(start // BLOCK, (stop - 1) // BLOCK + 1):
        begin, end = block * BLOCK, min((block + 1) * BLOCK, numel)
        key = hashlib.blake2b(f"{seed}:{name}:{block}".encode(), digest_size=8).digest()
        generator.manual_seed(int.from_bytes(key, "little") >> 1)
        # Always generate the whole block: an element's value must not depend on the part of the block held by this
        # rank.
        drawn = torch.randn(end - begin, dtype=torch.float32, device=device, generator=generator)
        low, high = max(begin, start), min(end, stop)
        out[low - start : high - start] = drawn[low - begin : high - begin]
    return out
