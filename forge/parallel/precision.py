"""The compute dtype of every parameter, and FSDP's units, each with one compute dtype.

The results depend on the dtypes alone, not on the units. The policy is the dtype precision.compute. A largest subtree
of modules whose parameters have another dtype casts its inputs to that dtype, and its outputs back to the policy
(forge/parallel/blocks.py). So a module in float32 leaves a bfloat16 stream unchanged. FSDP's units follow these borders
within each part of the model, e.g. the embedding or a block:

    one dtype      the part is one unit
    several        the dtype with the most elements forms one unit; each largest subtree in another dtype is a unit

The routed experts of a layer are separate units, because other ranks share them.
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from forge.config.layout import Precision
from forge.model import Experts, Transformer
from forge.model.norm import promoted
from forge.parallel.modules import for_all_layers, has_all_names, matches_any_depth
from forge.runtime.errors import UserError

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}


def pinned_parameters(model: nn.Module, patterns: Sequence[str]) -> set[nn.Parameter]:
    """Return the parameters under every module matched by a pattern of `precision.fp32_modules`.

    Raises UserError for a pattern that matches no module with parameters, unless it is the key's default: a dense model
    has no router.
    """
    modules = {name: set(module.parameters()) for name, module in model.named_modules() if name}
    pinned: set[nn.Parameter] = set()
    for pattern in patterns:
        found = set().union(*(owned for name, owned in modules.items() if matches_any_depth(pattern, name)))
        if not found and pattern not in Precision().fp32_modules and has_all_names(model):
            names = for_all_layers(name for name, owned in modules.items() if owned)
            near = difflib.get_close_matches(pattern, sorted(names), n=1, cutoff=0.0)
            raise UserError(
                f"precision.fp32_modules = {pattern!r} matches no module of this model; the nearest name is "
                f"{near[0]!r}. Patterns are whole names with a glob for each component; `*` alone matches one or "
                f"more components."
            )
        pinned |= found
    return pinned


def compute_dtypes(
    parameters: Collection[nn.Parameter],
    policy: torch.dtype,
    pinned: Collection[nn.Parameter] = frozenset(),
) -> dict[nn.Parameter, torch.dtype]:
    """Return the compute dtype of each parameter: promote(float32, policy) if the parameter is pinned, else the policy.

    Parameters that are not floating-point keep their dtype.
    """

    def resolve(parameter: nn.Parameter) -> torch.dtype:
        if not parameter.is_floating_point():
            return parameter.dtype
        return promoted(policy) if parameter in pinned else policy

    return {parameter: resolve(parameter) for parameter in parameters}


@dataclass(frozen=True)
class Unit:
    """Modules whose parameters are gathered together, the dtype of the gather, and whether the modules are routed experts."""

    modules: tuple[nn.Module, ...]
    compute: torch.dtype
    experts: bool = False


def plan_units(
    model: Transformer, precision: Precision
) -> tuple[list[list[Unit]], dict[nn.Parameter, torch.dtype]]:
    """Return the units of `model` in the order of forward, and the compute dtype of every parameter.

    Each part that is gathered separately has one group of units; the root's is last. A group has several units if dtypes
    differ, an inner unit before its outer one. Raises UserError if precision.fp32_modules cannot be followed.
    """
    pinned, policy = pinned_parameters(model, precision.fp32_modules), DTYPES[precision.compute]
    groups: list[list[Unit]] = []
    dtypes: dict[nn.Parameter, torch.dtype] = {}
    parts: list[list[nn.Module]] = [*_parts(model), [model]]
    for part in parts:
        resolved = compute_dtypes([p for p in _parameters(part) if p not in dtypes], policy, pinned)
        groups.append(_units(part, resolved))
        dtypes |= resolved
    if not any(unit.modules == (model,) for unit in groups[-1]):
        # The root of FSDP is the whole model even if no parameter is left for it.
        groups[-1].append(Unit((model,), policy))
    return groups, dtypes


def _parts(model: Transformer) -> list[list[nn.Module]]:
    """Return the parts of the model: embedding, each block, norm with head.

    Parts that share a parameter are joined. A tied embedding is left to the root.
    """
    parts: list[list[nn.Module | None]] = [[layer] for layer in model.layers.values()]
    if model.config.tie_embeddings:
        parts.append([model.norm])
    else:
        parts = [[model.embedding], *parts, [model.norm, model.head]]
    there = [[module for module in part if module is not None] for part in parts]
    return joined_by_parameters([part for part in there if part])


def _units(part: list[nn.Module], dtypes: dict[nn.Parameter, torch.dtype]) -> list[Unit]:
    """Return the units of `part`, experts' units first."""
    experts = [module for root in part for module in root.modules() if isinstance(module, Experts)]
    inner = [replace(unit, experts=True) for module in experts for unit in uniform_units([module], dtypes)]
    return inner + uniform_units(part, dtypes, apart=set(_parameters(experts)))


def uniform_units(
    modules: Sequence[nn.Module],
    dtypes: dict[nn.Parameter, torch.dtype],
    apart: Collection[nn.Parameter] = frozenset(),
) -> list[Unit]:
    """Divide the parameters of `modules` into units with one compute dtype each, nested units first.

    dtypes: compute dtype of each parameter; parameters without an entry are ignored. apart: parameters for which the
    caller makes separate units, nested in the returned units. Raises UserError if one module has parameters of different
    dtypes, because units consist of whole modules.
    """
    keys = {p: dtypes[p] for p in _parameters(modules) if p in dtypes and p not in apart}
    sizes: Counter[torch.dtype] = Counter()
    for parameter, key in keys.items():
        sizes[key] += parameter.numel()
    if len(sizes) <= 1:
        return [Unit(tuple(modules), compute) for compute in sizes]
    # Of dtypes with equally many elements the last is the rest: `max` and dictionaries keep the order of the parameters.
    rest = max(reversed(sizes), key=lambda key: sizes[key])

    borders: dict[nn.Parameter, Any] = {**keys, **dict.fromkeys(apart)}
    subtrees = [
        pair
        for module in modules
        for pair in maximal_subtrees(module, borders)
        if pair[1] not in (rest, None)
    ]
    covered = set(_parameters([subtree for subtree, _ in subtrees]))
    missed = {p for p, key in keys.items() if key != rest and p not in covered}
    if missed:
        names = [name for module in modules for name, p in module.named_parameters() if p in missed]
        raise UserError(
            f"{', '.join(names)} of {type(modules[0]).__name__} cannot compute in another dtype than the other "
            f"parameters of their module. Put them into a separate module, or remove them from precision.fp32_modules."
        )
    units = []
    for group in joined_by_parameters([[subtree] for subtree, _ in subtrees]):
        compute = next(dtypes[p] for p in _parameters(group) if p in keys)
        units.append(Unit(tuple(group), compute))
    whole = [m for m in modules if any(keys.get(p) == rest for p in m.parameters())]
    return [*units, Unit(tuple(whole), rest)]


def maximal_subtrees(module: nn.Module, keys: dict[nn.Parameter, Any]) -> list[tuple[nn.Module, Any]]:
    """Return (subtree, key) of the largest subtrees of `module` whose parameters all have one key, in modules' order.

    Parameters without a key are ignored, and so are subtrees without parameters. Containers that are never called
    (ModuleList, ModuleDict) are not subtrees, but their children are. No subtree is inside another.
    """
    found = [pair for child in module.children() for pair in maximal_subtrees(child, keys)]
    held = {keys[p] for p in module.parameters() if p in keys}
    called = type(module).forward is not nn.Module.forward
    return [(module, held.pop())] if len(held) == 1 and called else found


def joined_by_parameters(groups: Sequence[Sequence[nn.Module]]) -> list[list[nn.Module]]:
    """Join those of `groups` that share a parameter. A joined group takes the position of its first member."""
    joined: list[list[nn.Module]] = []
    for group in groups:
        owned = set(_parameters(group))
        sharing = [other for other in joined if not owned.isdisjoint(_parameters(other))]
        if not sharing:
            joined.append(list(group))
            continue
        first, *others = sharing
        for other in others:
            joined.remove(other)
            first += other
        first += group
    return joined


def _parameters(modules: Sequence[nn.Module]) -> list[nn.Parameter]:
    return list(dict.fromkeys(p for module in modules for p in module.parameters()))
