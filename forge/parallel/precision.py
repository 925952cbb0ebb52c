"""The compute dtype of every parameter, and FSDP's units, each with one compute dtype.

Results depend only on the dtypes, not on the units. The policy is the dtype precision.compute. A maximal subtree of
modules with another compute dtype casts its inputs to this dtype and its outputs back to the policy
(`cast_at_borders`). A float32 module thus leaves the residual stream in bfloat16. FSDP's units follow the same
subtrees. Each block, the embedding, and the norm with the head are divided into units by compute dtype:

    one dtype      all modules form one unit
    several        the modules in the dtype with the most elements form one unit; each maximal subtree in another dtype
                   is a unit of its own

Routed experts that are sharded over other ranks than their block are separate units.
"""

from __future__ import annotations

import difflib
import functools
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from forge.config.layout import Precision
from forge.model import Experts, Transformer
from forge.model.norm import promoted
from forge.parallel.modules import for_all_layers, has_all_names
from forge.runtime.errors import UserError

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}


def pinned_parameters(model: nn.Module, patterns: Sequence[str]) -> set[nn.Parameter]:
    """Return all parameters of modules matched by a pattern of `precision.fp32_modules`.

    Raises UserError for a pattern matching no module with parameters. The key's default patterns may match nothing,
    e.g. because a dense model has no router.
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


def matches_any_depth(pattern: str, name: str) -> bool:
    """Return whether `pattern` matches the whole `name`; a component `*` matches one or more components.

    For precision.fp32_modules, whose patterns name modules at any depth: `*.router` matches every router. Other
    components are ordinary globs: `*norm` matches `attention_norm`, never `attention.norm`.
    """

    def match(pattern: Sequence[str], name: Sequence[str]) -> bool:
        if not pattern or not name:
            return not pattern and not name
        if pattern[0] == "*":
            return any(match(pattern[1:], name[taken:]) for taken in range(1, len(name) + 1))
        return fnmatchcase(name[0], pattern[0]) and match(pattern[1:], name[1:])

    return match(pattern.split("."), name.split("."))


@dataclass(frozen=True)
class Unit:
    """Modules whose parameters FSDP gathers together.

    compute: the dtype in which FSDP gathers the parameters. experts: the modules are routed experts, in a unit of their
    own.
    """

    modules: tuple[nn.Module, ...]
    compute: torch.dtype
    experts: bool = False


def plan_units(
    model: Transformer, precision: Precision, *, experts_apart: bool = True
) -> tuple[list[list[Unit]], dict[nn.Parameter, torch.dtype]]:
    """Return the groups of units of `model` in the order of forward, and the compute dtype of every parameter.

    The groups are the embedding, each block, the norm with the head, and last the root. Groups that share a parameter are
    joined. A tied embedding is in the root's group. A group has several units if its parameters have several compute
    dtypes, or if it has routed experts and `experts_apart` is true. Experts whose dtype differs from the rest of the group
    always have their own unit. A unit comes before the unit that encloses it.

    The compute dtype is precision.compute, or for modules of precision.fp32_modules the wider of float32 and
    precision.compute. Raises UserError if precision.fp32_modules is invalid for the model.
    """
    pinned, policy = pinned_parameters(model, precision.fp32_modules), DTYPES[precision.compute]
    groups: list[list[Unit]] = []
    dtypes: dict[nn.Parameter, torch.dtype] = {}
    parts: list[list[nn.Module]] = [*_parts(model), [model]]
    for part in parts:
        # Parameters without a floating-point dtype keep their dtype.
        resolved = {
            p: (promoted(policy) if p in pinned else policy) if p.is_floating_point() else p.dtype
            for p in _parameters(part)
            if p not in dtypes
        }
        groups.append(_units(part, resolved, experts_apart))
        dtypes |= resolved
    if not any(unit.modules == (model,) for unit in groups[-1]):
        # FSDP's root is the whole model, even if no parameter is left for the root.
        groups[-1].append(Unit((model,), policy))
    return groups, dtypes


def _parts(model: Transformer) -> list[list[nn.Module]]:
    """Return groups of modules: the embedding, each block, and the norm with the head.

    Groups that share a parameter are joined. A tied embedding is left to the root.
    """
    parts: list[list[nn.Module | None]] = [[layer] for layer in model.layers.values()]
    if model.config.tie_embeddings:
        parts.append([model.norm])
    else:
        parts = [[model.embedding], *parts, [model.norm, model.head]]
    there = [[module for module in part if module is not None] for part in parts]
    return joined_by_parameters([part for part in there if part])


def _units(part: list[nn.Module], dtypes: dict[nn.Parameter, torch.dtype], experts_apart: bool) -> list[Unit]:
    """Return the units of the group of modules `part`, units of experts first."""
    experts = [module for root in part for module in root.modules() if isinstance(module, Experts)]
    inner = [replace(unit, experts=True) for module in experts for unit in uniform_units([module], dtypes)]
    around = uniform_units(part, dtypes, apart=set(_parameters(experts)))
    if not experts_apart and around and all(unit.compute == around[-1].compute for unit in inner):
        return uniform_units(part, dtypes)
    return inner + around


def uniform_units(
    modules: Sequence[nn.Module],
    dtypes: dict[nn.Parameter, torch.dtype],
    apart: Collection[nn.Parameter] = frozenset(),
) -> list[Unit]:
    """Divide the parameters of `modules` into units with one compute dtype each, nested units first.

    dtypes: compute dtype of each parameter; parameters without an entry are ignored. apart: parameters ignored because
    they already have separate units, nested in the returned units. Raises UserError if one module has parameters of
    different dtypes, because units consist of whole modules.
    """
    keys = {p: dtypes[p] for p in _parameters(modules) if p in dtypes and p not in apart}
    sizes: Counter[torch.dtype] = Counter()
    for parameter, key in keys.items():
        sizes[key] += parameter.numel()
    if len(sizes) <= 1:
        return [Unit(tuple(modules), compute) for compute in sizes]
    # Among dtypes with equally many elements, take the dtype whose first parameter comes last.
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
    """Return (subtree, key) for the largest subtrees of `module` whose parameters all have the same key.

    keys: parameter -> key, e.g. its compute dtype. Subtrees are in the order of modules. No subtree is inside another.
    Parameters without a key are ignored, and so are subtrees without parameters. Containers without a forward (ModuleList,
    ModuleDict) are not returned; their children may be.
    """
    found = [pair for child in module.children() for pair in maximal_subtrees(child, keys)]
    held = {keys[p] for p in module.parameters() if p in keys}
    called = type(module).forward is not nn.Module.forward
    return [(module, held.pop())] if len(held) == 1 and called else found


def cast_at_borders(model: nn.Module, dtypes: dict[nn.Parameter, torch.dtype], policy: torch.dtype) -> None:
    """Cast inputs and outputs of each maximal subtree of `model` whose compute dtype is not `policy`.

    dtypes: compute dtype of each parameter. policy: compute dtype of all other modules. The subtree receives
    floating-point arguments in its own compute dtype and returns results in `policy`. If the class of the subtree's
    root sets `exact_output`, the results are not cast. If the class sets `casts_in`, the method of that name casts
    instead of forward; None: nothing casts. `model` never casts, because it takes tokens and returns losses.
    """
    for child in model.children():
        for subtree, compute in maximal_subtrees(child, dtypes):
            if compute != policy:
                outside = None if getattr(subtree, "exact_output", False) else policy
                method = getattr(subtree, "casts_in", "forward")
                if method is not None:
                    setattr(subtree, method, casting(getattr(subtree, method), compute, outside))


def casting(
    forward: Callable[..., Any], inside: torch.dtype, outside: torch.dtype | None
) -> Callable[..., Any]:
    """Return `forward` with floating-point arguments cast to `inside`, and results cast to `outside` (None: not cast)."""

    @functools.wraps(forward)
    def cast(*args: Any) -> Any:
        output = forward(*(_to(arg, inside) for arg in args))
        return output if outside is None else tree_map(lambda leaf: _to(leaf, outside), output)

    return cast


def _to(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def joined_by_parameters(groups: Sequence[Sequence[nn.Module]]) -> list[list[nn.Module]]:
    """Join groups sharing a parameter. A joined group takes the position of its first member."""
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
