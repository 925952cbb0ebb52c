"""The `Optimizer` protocol, `build_optimizer`, and helpers shared by optimizers.

docs/internals/extending/optimizer.md is the recipe for your own optimizer.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from forge.config.layout import Compile
from forge.config.schema import OptimizerConfig
from forge.runtime.imports import load_class
from forge.shard import Box, Shard


class Optimizer(Protocol):
    """Updates this rank's shards. Built as `Class(shards, config, group)` by `build_optimizer`.

    Optional members:

    - `follow(config)`: called by phases before a step, to change hyperparameters.
    - `scale_by(factor)`: receives the clip coefficient of the next step.
    - `bound_logits(logits)`: receives the largest attention logits (forge/parallel/logits.py).
    - `copies`: parameter -> its copy in the compute dtype, if each step writes this copy too.
    """

    def step(self, lr: float, skip: Tensor) -> None:
        """Make one update with the shards' gradients.

        All ranks call `step` together, so an optimizer may use collectives.

        If `skip`, a scalar on the device of the shards, is 1.0, leave every bit of state unchanged.
        """

    def tensors(self) -> Iterator[tuple[str, Shard, Tensor]]:
        """Yield (slot, shard, values) for each tensor of the state. slot: name of the kind of state, e.g. the first moment.

        shard: the parameter's shard, or a separate shard for state of another shape. Checkpoints save each tensor as
        `optimizer.<parameter>.<slot>` and load into `values` in place. All tensors must therefore exist from the start,
        laid out like `shard.data`.
        """

    def state(self) -> dict[str, Any]:
        """Return the state that is not in `tensors`: JSON, equal on all ranks. May synchronise with the device."""

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore a result of `state`. Ignore unknown keys: optimizer.ema may have been on."""


# Import paths of the values of `optimizer.name`.
SHIPPED = {
    "adamw": "forge.optim.adamw:AdamW",
    "lion": "forge.optim.lion:Lion",
    "muon": "forge.optim.muon:Muon",
}


def optimizer_class(name: str) -> Any:
    """Return the class of a shipped optimizer, or the class at an import path."""
    if name not in SHIPPED:
        return load_class(name)
    module, _, cls = SHIPPED[name].partition(":")
    return getattr(importlib.import_module(module), cls)


def build_optimizer(
    shards: list[Shard],
    config: OptimizerConfig,
    group: ProcessGroup | None = None,
    compiled: Compile | None = None,
    copies: Mapping[Tensor, Tensor] | None = None,
) -> Optimizer:
    """Make the optimizer `config.name`, with an average of the weights if `config.ema` is above 0.

    Call on all ranks together: Muon and int8 moments use collectives, unless the shards are from `share_boxes`.

    group: ranks that together hold every element of the parameters, with the same list of shards on each rank; None:
    only this process. Optimizers that need whole matrices, e.g. Muon, exchange parts of matrices over this group.
    compiled: compiler settings for AdamW's update, also within Muon; None: do not compile. copies: parameter -> the
    same elements in the compute dtype. The compiled update writes parameters and copies.
    """
    shards = with_scales(shards, config)
    make: Any = optimizer_class(config.name)
    if compiled is not None:
        from forge.optim.compiled import CompiledAdamW

        assert config.name in ("adamw", "muon"), "refused by the configuration"
        adamw = partial(CompiledAdamW, compiled=compiled, copies=copies or {})
        make = partial(make, adamw=adamw) if config.name == "muon" else adamw
    optimizer: Optimizer = make(shards, config, group)
    if config.ema:
        from forge.optim.ema import WithAverage

        return WithAverage(optimizer, shards, config.ema)
    return optimizer


def gradient(shard: Shard) -> Tensor:
    """Return the shard's local gradient; zeros if backward computed none, e.g. for an expert without tokens."""
    grad = shard.grad
    return torch.zeros_like(shard.data) if grad is None else grad


def weight_decay(name: str, config: OptimizerConfig) -> float:
    """Return the decoupled weight decay of the parameter `name`, from `optimizer.groups` and `optimizer.no_decay`."""
    own = own_decay(name, config)
    return config.weight_decay if own is None else own


def own_decay(name: str, config: OptimizerConfig) -> float | None:
    """Return the weight decay of the parameter `name` if it overrides `optimizer.weight_decay`, else None."""
    given = _of_groups(name, config, "weight_decay")
    exempt = any(fnmatchcase(name, glob) for glob in config.no_decay)
    return 0.0 if given is None and exempt else given


def with_scales(shards: Sequence[Shard], config: OptimizerConfig) -> list[Shard]:
    """Return `shards` with the learning-rate factors (lr_scale) of `optimizer.groups`."""
    scales = [_of_groups(shard.name, config, "lr_scale") for shard in shards]
    return [
        shard if scale is None else replace(shard, rates=replace(shard.rates, scale=scale))
        for shard, scale in zip(shards, scales, strict=True)
    ]


def _of_groups(name: str, config: OptimizerConfig, key: str) -> float | None:
    """Return `key` of the last group of `optimizer.groups` that matches `name` and sets `key`; None if no group does."""
    for group in reversed(config.groups):
        value: float | None = getattr(group, key)
        if value is not None and any(fnmatchcase(name, glob) for glob in group.names):
            return value
    return None


def wide_dtype(shard: Shard) -> torch.dtype:
    """Return the dtype of the update's arithmetic: the wider of float32 and the parameter's storage dtype."""
    return torch.promote_types(torch.float32, shard.parameter.dtype)


def write_unless(skip: Tensor, target: Tensor, values: Tensor) -> None:
    """Copy `values` into `target`, cast to its dtype.

    If the device scalar `skip` is 1.0, leave every bit of `target` unchanged.
    """
    torch.where(skip.to(target.device) > 0, target, values.to(target.dtype), out=target)


def update_groups(shards: Sequence[Shard], config: OptimizerConfig, max_numel: int) -> list[list[Shard]]:
    """Group shards of equal weight decay and rates for multi-tensor kernels.

    Groups with the default weight decay come first. A group is closed once it has `max_numel` elements, to bound the memory
    of temporary tensors. Shards without elements are left out.
    """
    kinds: dict[Any, list[list[Shard]]] = {}
    filled: dict[Any, int] = {}  # elements of the last group
    for shard in (shard for shard in shards if shard.boxes):
        kind = own_decay(shard.name, config), shard.rates
        groups = kinds.setdefault(kind, [[]])
        if filled.get(kind, 0) >= max_numel:
            groups.append([])
            filled[kind] = 0
        groups[-1].append(shard)
        filled[kind] = filled.get(kind, 0) + sum(box.numel for box in shard.boxes)
    decayed_first = sorted(kinds.items(), key=lambda item: item[0][0] is not None)
    return [group for _, groups in decayed_first for group in groups]


def share_boxes(
    shards: Sequence[Shard], config: OptimizerConfig, group: dist.ProcessGroup | None
) -> list[Shard]:
    """Return copies of `shards` with `boxes_on` set for the ranks of `group`. Collective.

    The optimizer's constructor then needs no communication. If it fails on one rank, e.g. because memory is exhausted, no
    other rank waits for this rank. Return `shards` if `config` names an optimizer that needs no boxes of other ranks, or a
    user's optimizer, which may derive shards with other boxes.
    """
    is_own = ":" not in config.name
    if group is None or not is_own or (config.name != "muon" and config.moment_dtype != "int8"):
        return list(shards)
    # Keep equal boxes only once, because the optimizer keeps its shards and thereby all boxes.
    same: dict[tuple[Box, ...], tuple[Box, ...]] = {}
    everyones = [
        [same.setdefault(one, one) for one in of_rank] for of_rank in gather_shard_boxes(shards, group)
    ]
    of_ranks = dict(zip(dist.get_process_group_ranks(group), everyones, strict=True))

    def knowing(number: int, shard: Shard) -> Shard:
        return replace(shard, boxes_on=lambda rank: of_ranks[rank][number])

    return [knowing(number, shard) for number, shard in enumerate(shards)]


def gather_shard_boxes(
    shards: Sequence[Shard], group: dist.ProcessGroup | None
) -> list[list[tuple[Box, ...]]]:
    """Return the boxes of `shards` on every rank of `group`: one list per rank, with one entry per shard.

    group None: only this process. Collective, unless `boxes_on` of all shards is set.
    """
    if group is None or group.size() == 1:
        return [[shard.boxes for shard in shards]]
    known = [shard.boxes_on for shard in shards if shard.boxes_on is not None]
    if len(known) == len(shards):
        return [[boxes_on(rank) for boxes_on in known] for rank in dist.get_process_group_ranks(group)]
    mine = [(shard.name, shard.global_shape, shard.boxes) for shard in shards]
    everyones = [mine] * group.size()
    dist.all_gather_object(everyones, mine, group=group)
    for other in everyones:
        assert [of[:2] for of in other] == [of[:2] for of in mine], "ranks have other parameters"
    return [[boxes for *_, boxes in of_rank] for of_rank in everyones]
