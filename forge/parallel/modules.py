"""Match modules against name patterns of configuration keys, and replace a module while keeping its hooks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from fnmatch import fnmatchcase

from torch import nn

HOOKS = (
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
)


def matches_exact_depth(pattern: str, name: str) -> bool:
    """Return whether `pattern` matches `name`, with `*` matching one component only.

    E.g. `layers.*.wq` does not match `layers.0.attention.wq`. For tensor-parallel plans, where an accidental match
    would split a module.
    """
    patterns, names = pattern.split("."), name.split(".")
    return len(patterns) == len(names) and all(map(fnmatchcase, names, patterns))


def has_all_names(model: nn.Module) -> bool:
    """Return whether `model` is a whole model, not a pipeline stage. A stage lacks some names."""
    return getattr(model, "is_whole", True)


def for_all_layers(names: Iterable[str]) -> set[str]:
    """Return `names` with each number replaced with `*`. Messages suggest such a pattern in place of one name per layer."""
    return {".".join("*" if part.isdigit() else part for part in name.split(".")) for name in names}


def replace_module(model: nn.Module, name: str, new: nn.Module) -> None:
    """Replace the module `name` of `model` with `new`. Hooks of the old module move to `new`."""
    carry_hooks(model.get_submodule(name), new)
    model.set_submodule(name, new)


def carry_hooks(old: nn.Module, new: nn.Module) -> None:
    """Register all forward hooks and pre-hooks of `old` on `new`, in the same order.

    Hooks registered with keyword arguments keep receiving them.
    """
    for name in HOOKS:
        # Share the dictionaries themselves, so a hook's handle can still remove it.
        setattr(new, name, getattr(old, name))


def count_hooks(model: nn.Module) -> Counter[str]:
    """Return the number of hooks of each kind on all modules of `model`."""
    return Counter({name: sum(len(getattr(module, name)) for module in model.modules()) for name in HOOKS})
