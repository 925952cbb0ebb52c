"""In which dtype every parameter computes.

What is computed depends on these dtypes alone, not on the units of FSDP that are made from them (forge/parallel/units.py):
each largest subtree of modules in another dtype than the policy's casts its inputs to its own dtype and its outputs back
(forge/parallel/blocks.py), so a module in float32 leaves a bfloat16 stream as it found it.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from forge.config.layout import Precision
from forge.errors import UserError
from forge.model.precision import promoted
from forge.parallel.names import for_all_layers, has_all_names, matches_any_depth

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}


def pinned_parameters(model: nn.Module, patterns: Sequence[str]) -> set[nn.Parameter]:
    """Return the parameters under every module that a pattern of `precision.fp32_modules` matches.

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
    *,
    pinned: Collection[nn.Parameter] = frozenset(),
    per_parameter: bool = False,
) -> dict[nn.Parameter, torch.dtype]:
    """Return the dtype in which each of `parameters`, those of one part of a model, computes. The first rule that fits:

    1. not a floating-point number: its own dtype
    2. pinned by the user: promote(float32, policy)
    3. all are stored in one dtype: the policy; else each its own dtype.
       With `per_parameter` each by itself: stored at least as wide as the policy it is a master copy and computes in
       the policy; stored narrower, in its own dtype.
    """
    uniform = len({p.dtype for p in parameters if p.is_floating_point()}) <= 1

    def resolve(parameter: nn.Parameter) -> torch.dtype:
        stored = parameter.dtype
        if not parameter.is_floating_point():
            return stored
        if parameter in pinned:
            return promoted(policy)
        follows = torch.promote_types(stored, policy) == stored if per_parameter else uniform
        return policy if follows else stored

    return {parameter: resolve(parameter) for parameter in parameters}


def casting(
    forward: Callable[..., Any], inside: torch.dtype, outside: torch.dtype | None
) -> Callable[..., Any]:
    """Return `forward` with floating-point arguments cast to `inside` and results to `outside` (None: left alone)."""

    @functools.wraps(forward)
    def cast(*args: Any) -> Any:
        output = forward(*(_to(arg, inside) for arg in args))
        return output if outside is None else tree_map(lambda leaf: _to(leaf, outside), output)

    return cast


def _to(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value
