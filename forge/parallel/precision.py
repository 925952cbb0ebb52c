"""In which dtype every parameter computes, and how modules are grouped so that an FSDP unit has only one.

FSDP2 gathers a unit's parameters in one dtype and asks that they are stored in one dtype. So a model in which a few
modules compute in float32 beside bfloat16 is cut into units along those borders:

    one dtype in a group of modules     the group is one unit
    two                                 the largest subtrees of the rarer one (by elements) are units, the rest is one
    three or more                       the largest subtrees of each are units, nothing is left over

What is computed depends on the dtypes alone, not on that grouping: each largest subtree in another dtype than the
policy's casts what comes in to its own dtype and what goes out back, so that a module in float32 leaves a bfloat16
stream as it found it. A module whose class sets `exact_output` returns its own dtype.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from forge.config.layout import Precision
from forge.errors import UserError
from forge.model.precision import promoted

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}

_RECORDED = "_forge_compute_dtype"


@dataclass(frozen=True)
class Unit:
    """Modules whose parameters are gathered together, the dtype that they are gathered in, and whether by `experts`."""

    modules: tuple[nn.Module, ...]
    compute: torch.dtype
    experts: bool = False


def record_compute_dtype(parameter: nn.Parameter, dtype: torch.dtype) -> None:
    """Note on a parameter that the checkpoint it came from computes with it in `dtype`, however it is stored here."""
    setattr(parameter, _RECORDED, dtype)


def matches(pattern: str, name: str) -> bool:
    """Whether `pattern` stands for the whole dotted `name`.

    Each component is a glob of its own (`*norm` is `attention_norm`, never `attention.norm`); a component that is `*`
    alone stands for one or more, so `*.router` is a router at any depth.
    """
    return _match(pattern.split("."), name.split("."))


def _match(pattern: Sequence[str], name: Sequence[str]) -> bool:
    if not pattern or not name:
        return not pattern and not name
    if pattern[0] == "*":
        return any(_match(pattern[1:], name[taken:]) for taken in range(1, len(name) + 1))
    return fnmatchcase(name[0], pattern[0]) and _match(pattern[1:], name[1:])


def pinned_parameters(model: nn.Module, patterns: Sequence[str]) -> set[nn.Parameter]:
    """The parameters under every module whose name one of `precision.fp32_modules` stands for.

    Raises UserError for a pattern that stands for no module with parameters, unless it is the key's default: a dense
    model has no router.
    """
    modules = {name: set(module.parameters()) for name, module in model.named_modules() if name}
    pinned: set[nn.Parameter] = set()
    for pattern in patterns:
        found = set().union(*(owned for name, owned in modules.items() if matches(pattern, name)))
        if not found and pattern not in Precision().fp32_modules and judges_names(model):
            names = [name for name, owned in modules.items() if owned]
            anywhere = {".".join("*" if p.isdigit() else p for p in name.split(".")) for name in names}
            near = difflib.get_close_matches(pattern, sorted(anywhere), n=1, cutoff=0.0)
            raise UserError(
                f"precision.fp32_modules = {pattern!r} stands for no module of this model; the nearest name is "
                f"{near[0]!r}. Patterns are whole names with a glob for each component; `*` alone stands for one or "
                f"more components."
            )
        pinned |= found
    return pinned


def judges_names(model: nn.Module) -> bool:
    """Whether a name that `model` does not have is a slip: the stages of a pipeline have only some of the names."""
    return getattr(model, "is_whole", True)


def compute_dtypes(
    modules: Sequence[nn.Module],
    policy: torch.dtype | None,
    *,
    pinned: Collection[nn.Parameter] = frozenset(),
    per_parameter: bool = False,
    ignored: Collection[nn.Parameter] = frozenset(),
) -> dict[nn.Parameter, torch.dtype]:
    """The dtype in which each parameter of `modules` computes, those in `ignored` left out. The first rule that fits:

    1. not a floating-point number: its own dtype
    2. pinned by the user: promote(float32, policy)
    3. recorded by the checkpoint it came from
    4. no policy: its own dtype
    5. all parameters of `modules` are stored in one dtype: the policy; else each its own dtype.
       With `per_parameter` each by itself: stored at least as wide as the policy it is a master copy and computes in
       the policy; stored narrower, in its own dtype.
    """
    parameters = [p for p in _parameters(modules) if p not in ignored]
    uniform = len({p.dtype for p in parameters if p.is_floating_point()}) <= 1

    def resolve(parameter: nn.Parameter) -> torch.dtype:
        stored = parameter.dtype
        if not parameter.is_floating_point():
            return stored
        if parameter in pinned:
            return promoted(policy or stored)
        recorded: torch.dtype | None = getattr(parameter, _RECORDED, None)
        if recorded is not None or policy is None:
            return recorded or stored
        follows = torch.promote_types(stored, policy) == stored if per_parameter else uniform
        return policy if follows else stored

    return {parameter: resolve(parameter) for parameter in parameters}


def maximal_subtrees(module: nn.Module, keys: dict[nn.Parameter, Any]) -> list[tuple[nn.Module, Any]]:
    """(subtree, key) of the largest subtrees of `module` whose parameters all have one key, in the order of the modules.

    Parameters without a key do not count, nor do subtrees without any. Containers that are never called
    (ModuleList, ModuleDict) are no subtrees, their children are. None lies inside another.
    """
    found = [pair for child in module.children() for pair in maximal_subtrees(child, keys)]
    held = {keys[p] for p in _parameters([module]) if p in keys}
    called = type(module).forward is not nn.Module.forward
    return [(module, held.pop())] if len(held) == 1 and called else found


def cast_at_borders(model: nn.Module, dtypes: dict[nn.Parameter, torch.dtype], policy: torch.dtype) -> None:
    """Wrap the forward of each largest subtree of `model` that computes in another dtype than `policy`.

    It then gets floating-point arguments in its own dtype, and what it returns goes on in `policy`. What is wrapped is
    the forward, so recomputation inside or around it sees the same dtypes. The model as a whole is left alone: it
    takes tokens and returns losses.
    """
    for child in model.children():
        for subtree, compute in maximal_subtrees(child, dtypes):
            if compute != policy:
                outside = None if getattr(subtree, "exact_output", False) else policy
                subtree.forward = _casting(subtree.forward, compute, outside)


def _casting(
    forward: Callable[..., Any], inside: torch.dtype, outside: torch.dtype | None
) -> Callable[..., Any]:
    @functools.wraps(forward)
    def cast(*args: Any) -> Any:
        output = forward(*(_to(arg, inside) for arg in args))
        return output if outside is None else tree_map(lambda leaf: _to(leaf, outside), output)

    return cast


def _to(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def uniform_units(
    modules: Sequence[nn.Module],
    dtypes: dict[nn.Parameter, torch.dtype],
    apart: Collection[nn.Parameter] = frozenset(),
) -> list[Unit]:
    """Units of one storage and one compute dtype for all parameters of `modules` that are in `dtypes`; inner ones first.

    Those `apart` have units of their own; none of those made here lies around them, but for what takes the rest.
    Raises UserError where parameters of different dtypes lie in one module, so that no border runs between them.
    """
    keys = {p: (p.dtype, dtypes[p]) for p in _parameters(modules) if p in dtypes and p not in apart}
    sizes: dict[tuple[torch.dtype, torch.dtype], int] = {}
    for parameter, key in keys.items():
        sizes[key] = sizes.get(key, 0) + parameter.numel()
    if not sizes:
        return []
    if len(sizes) == 1:
        (key,) = sizes
        return [Unit(tuple(modules), key[1])]
    # Of two equally large ones the first is split off: `min` and dictionaries keep the order of the parameters' names.
    split = {min(sizes, key=lambda key: sizes[key])} if len(sizes) == 2 else set(sizes)

    borders: dict[nn.Parameter, Any] = {**keys, **dict.fromkeys(apart)}
    subtrees = [pair for module in modules for pair in maximal_subtrees(module, borders) if pair[1] in split]
    covered = set(_parameters([subtree for subtree, _ in subtrees]))
    missed = {p for p, key in keys.items() if key in split and p not in covered}
    if missed:
        names = [name for module in modules for name, p in module.named_parameters() if p in missed]
        raise UserError(
            f"{', '.join(names)} of {type(modules[0]).__name__} cannot compute in another dtype than what lies beside "
            f"them in the same module. Put them into a module of their own, or leave them out of precision.fp32_modules."
        )
    units = []
    for group in joined_by_parameters([[subtree] for subtree, _ in subtrees]):
        compute = next(dtypes[p] for p in _parameters(group) if p in keys)
        units.append(Unit(tuple(group), compute))
    rest = {p: key[1] for p, key in keys.items() if key not in split}
    if rest:
        whole = [m for m in modules if any(p in rest for p in m.parameters())]
        units.append(Unit(tuple(whole), next(iter(rest.values()))))
    return units


def joined_by_parameters(groups: Sequence[Sequence[nn.Module]]) -> list[list[nn.Module]]:
    """`groups` of modules, those that share a parameter made one, at the place of the first."""
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


def _parameters(modules: Sequence[nn.Module]) -> Iterator[nn.Parameter]:
    return iter(dict.fromkeys(p for module in modules for p in module.parameters()))
