"""Activation checkpointing: activations are forgotten after forward and computed again in backward.

    full           everything inside a block but its input; a third more computation
    selective      only what is cheap to compute again; what MATMULS, ATTENTION and COLLECTIVES return is kept
    memory_budget  the compiler chooses, block by block, under a budget for what is kept
    (no key)       `every` = n: in every n-th block only; `modules`: only these children of a block

What is wrapped is a module's forward, not the module, so parameters keep their names. Hooks on the wrapped
module itself (FSDP's, and tensor parallelism's on a child) run outside: what they gather is not gathered again.
A block with a mixture of experts is selective half by half, because only its first half can be compiled.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch._functorch.config
from torch import nn
from torch.utils.checkpoint import (
    SAC_IGNORED_OPS,
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from forge import compat
from forge.errors import UserError, did_you_mean
from forge.model import Transformer
from forge.parallel.layout import Layout
from forge.parallel.order import take_step
from forge.parallel.precision import judges_names

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
MARKS = ("profiler._record_function_enter_new", "profiler._record_function_exit")
# What float8 scales with: a handful of numbers that cost a pass over a whole activation each.
SCALES = ("aten.max", "aten.amax")


def apply_activation(model: Transformer, layout: Layout) -> None:
    """Make the blocks of `model` recompute as `activation_checkpoint` says, in place.

    Raises UserError if a name in `modules` is no child of any block, or for what this PyTorch cannot do.
    """
    take_step(model, "activation")
    chosen = layout.activation_checkpoint
    if chosen.mode == "memory_budget" and not compat.weigh_meshes_as_nothing() and layout.parallel.tp > 1:
        raise UserError(
            'activation_checkpoint.mode = "memory_budget" does not work with '
            f"parallel.tp = {layout.parallel.tp} under PyTorch {torch.__version__}; "
            'use "selective", or another version'
        )
    # Share of activations that the compiler may keep. A global of PyTorch, read when a block is compiled.
    torch._functorch.config.activation_memory_budget = (
        chosen.memory_budget if chosen.mode == "memory_budget" else 1.0
    )
    if chosen.mode not in ("full", "selective"):
        return
    context = selective_context if chosen.mode == "selective" else None
    # Selective checkpointing does not let recomputation issue more operations than forward did, and counts the profiler's
    # marks, of which FSDP sets more in recomputation around a unit that lies inside.
    SAC_IGNORED_OPS.update(overload for name in MARKS for overload in _overloads(name))
    blocks = [block for name, block in model.layers.items() if int(name) % chosen.every == 0]
    if chosen.modules:
        if judges_names(model):
            check_modules(model, chosen.modules)
        blocks = [
            child for block in blocks for name, child in block.named_children() if name in chosen.modules
        ]
    # A mixture's blocks by halves, also those without experts: the compiler of PyTorch 2.11 drops the second half of a block
    # that is wrapped otherwise than the next.
    halves = context is not None and layout.model.moe is not None and not chosen.modules
    for module in blocks:
        for method in ("attend", "feed") if halves else ("forward",):
            recompute(module, context, method)


def recompute(module: nn.Module, context: Callable[[], Any] | None = None, method: str = "forward") -> None:
    """Make `module` forget its activations in forward and compute them again in backward; `context` may keep some."""
    setattr(module, method, Recomputed(getattr(module, method), context))


class Recomputed:
    """A forward, called under a checkpoint; `forward` is what is computed again."""

    def __init__(self, forward: Callable[..., Any], context: Callable[[], Any] | None):
        functools.update_wrapper(self, forward)
        self.forward = forward
        self.whole = context is None
        self._options: dict[str, Any] = {} if context is None else {"context_fn": context}

    def __call__(self, x: torch.Tensor, *args: Any) -> Any:
        forward = self.forward
        # The other arguments enter by closure: under a compiler only tensors may cross into a checkpoint.
        # Nothing draws random numbers, so there is no generator state to keep.
        return checkpoint(
            lambda x: forward(x, *args), x, use_reentrant=False, preserve_rng_state=False, **self._options
        )


def selective_context() -> Any:
    """Context managers for `checkpoint`'s forward and recomputation under `keep_expensive`."""
    return create_selective_checkpoint_contexts(keep_expensive)


def keep_expensive(_context: Any, operator: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    """Keep what matrix products, attention and collectives return; compute everything else again."""
    return CheckpointPolicy.MUST_SAVE if operator in kept_operators() else CheckpointPolicy.PREFER_RECOMPUTE


@functools.cache
def kept_operators() -> frozenset[Any]:
    """The operators behind MATMULS, ATTENTION, COLLECTIVES and SCALES in this build of PyTorch."""
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


def check_modules(model: Transformer, names: tuple[str, ...]) -> None:
    """Raise UserError for a name that is of no part of any block of `model`."""
    known = sorted({name for block in model.layers.values() for name, _ in block.named_children()})
    for name in names:
        if name not in known:
            raise UserError(
                f'activation_checkpoint.modules: "{name}" is no part of a block; the parts are {", ".join(known)}'
                + did_you_mean(name, known)
            )
