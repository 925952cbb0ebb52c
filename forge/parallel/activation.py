"""Activation checkpointing: activations are freed after forward and computed again in backward.

    full           everything inside a block but its input; a third more computation
    selective      only what is cheap to compute again; what MATMULS, ATTENTION and COLLECTIVES return is kept
    memory_budget  the compiler chooses, block by block, under a budget for what is kept
    (no key)       `every` = n: in every n-th block only; `modules`: only these children of a block

Which forwards are recomputed: forge/parallel/blocks.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.checkpoint import (
    SAC_IGNORED_OPS,
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

# Operators by name, because which of them exist differs between builds and versions of PyTorch.
# Names are followed by every overload.
MATMULS = (
    "aten.mm",
    "aten.addmm",
    "aten.bmm",
    "aten.linear",
    "aten._scaled_mm",
    "aten._grouped_mm",
    "aten._scaled_grouped_mm",
)
ATTENTION = (
    "aten._scaled_dot_product_flash_attention",
    "aten._scaled_dot_product_flash_attention_for_cpu",
    "aten._scaled_dot_product_efficient_attention",
    "aten._scaled_dot_product_cudnn_attention",
    "aten._scaled_dot_product_attention_math",
    "higher_order.flex_attention",
)
COLLECTIVES = (
    "_c10d_functional.all_gather_into_tensor",
    "_c10d_functional.reduce_scatter_tensor",
    "_c10d_functional.all_to_all_single",
    "_c10d_functional.all_reduce",
)
# The profiler's marks, which say nothing about memory.
MARKS = ("profiler._record_function_enter_new", "profiler._record_function_exit")
# What float8 scales with: a handful of numbers that cost a pass over a whole activation each.
SCALES = ("aten.max", "aten.amax")


class Recomputed:
    """`forward` under a checkpoint: called again in backward. `selective`: what is expensive is kept."""

    def __init__(self, forward: Callable[..., Any], *, selective: bool):
        functools.update_wrapper(self, forward)
        self._forward = forward
        self._options: dict[str, Any] = {"context_fn": selective_context} if selective else {}
        # Selective checkpointing does not let recomputation issue more operations than forward did, and counts the
        # profiler's marks, of which FSDP sets more in recomputation around a unit that lies inside.
        SAC_IGNORED_OPS.update(overload for name in MARKS for overload in _overloads(name))

    def __call__(self, x: torch.Tensor, *args: Any) -> Any:
        forward = self._forward
        # The other arguments enter by closure: under a compiler only tensors may cross into a checkpoint.
        # Nothing draws random numbers, so there is no generator state to keep.
        return checkpoint(
            lambda x: forward(x, *args), x, use_reentrant=False, preserve_rng_state=False, **self._options
        )


def selective_context() -> Any:
    """Return the context managers for `checkpoint`'s forward and recomputation under `keep_expensive`."""
    return create_selective_checkpoint_contexts(keep_expensive)


def keep_expensive(_context: Any, operator: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    """Keep what matrix products, attention and collectives return; compute everything else again."""
    return CheckpointPolicy.MUST_SAVE if operator in kept_operators() else CheckpointPolicy.PREFER_RECOMPUTE


@functools.cache
def kept_operators() -> frozenset[Any]:
    """Return the operators behind MATMULS, ATTENTION, COLLECTIVES and SCALES in this build of PyTorch."""
    return frozenset(
        overload for name in MATMULS + ATTENTION + COLLECTIVES + SCALES for overload in _overloads(name)
    )


def _overloads(name: str) -> Iterator[Any]:
    namespace, _, operator = name.partition(".")
    found = getattr(getattr(torch.ops, namespace), operator, None)
    if isinstance(found, torch._ops.OpOverloadPacket):
        yield from (getattr(found, overload) for overload in found.overloads())
    elif found is not None:
        yield found
