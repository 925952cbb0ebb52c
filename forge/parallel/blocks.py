"""How blocks run: recomputed in backward, compiled, and in which dtype. Nothing else replaces the forward of a module.

A forward is replaced, never a module, so parameters keep their names. Hooks of the module itself (FSDP's, and those of
tensor parallelism on a child) run outside of the new forward: what they gather is not gathered again by recomputation and
is in no graph. From the inside out:

    selective recomputation  the compiler has to see which results the checkpoint keeps
    compile                  the block as it will run
    full recomputation       nothing inside is kept, so the compiler gains nothing from seeing the checkpoint, and inside
                             of one PyTorch 2.13 fails to trace tensor parallelism with SDPA (it saves a DeviceMesh)
    wait                     the first block only: compiled code must not get the promise of a collective's result
    cast                     last, so that graph and recomputation see the dtype that the module computes in
"""

from __future__ import annotations

from typing import Any

import torch
import torch._functorch.config
from torch import nn

from forge import compat
from forge.config.layout import ActivationCheckpoint
from forge.errors import UserError, did_you_mean
from forge.model import MoE, Transformer
from forge.parallel.activation import Recomputed
from forge.parallel.compile import GRAPHS, compile_chunks, compiler_for, hiding_gradients, waiting
from forge.parallel.layout import Layout
from forge.parallel.names import has_all_names
from forge.parallel.precision import casting
from forge.parallel.units import maximal_subtrees, plan_units


def apply_blocks(model: Transformer, layout: Layout) -> None:
    """Replace forwards of `model` in place as `activation_checkpoint`, `compile` and `precision` ask.

    Raises UserError for a name in activation_checkpoint.modules that is no child of a block, a compiler that PyTorch does
    not know, a loss that has nothing to compile, and for what this PyTorch cannot do.
    """
    _set_memory_budget(layout)
    if has_all_names(model):
        check_modules(model, layout.activation_checkpoint)
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, GRAPHS)
    policy = BlockPolicy(layout)
    for layer, block in model.layers.items():
        policy.wrap(block, int(layer))
    if layout.compile.enabled and model.layers:
        first: Any = next(iter(model.layers.values()))
        first.forward = waiting(first.forward)
    if layout.compile.loss:
        compile_chunks(model.loss, compiler_for(layout.compile))
    cast_at_borders(model, plan_units(model, layout.precision)[1], layout.compute)


class BlockPolicy:
    """Which forwards of a block are recomputed and compiled."""

    def __init__(self, layout: Layout):
        self._recomputation = layout.activation_checkpoint
        self._selective = self._recomputation.mode == "selective"
        # A mixture's blocks are recomputed by halves, because only the first half of a block with experts can be compiled;
        # also those without experts: the compiler of PyTorch 2.11 drops the second half of a block that is wrapped
        # otherwise than the next.
        self._halves = self._selective and layout.model.moe is not None
        self._compiler = compiler_for(layout.compile) if layout.compile.enabled else None

    def wrap(self, block: Any, layer: int) -> None:
        """Replace the forwards of `block`, the one with the global index `layer`, in the order at the head of this file."""
        chosen = self._recomputation
        recomputed = chosen.mode in ("full", "selective") and layer % chosen.every == 0
        whole = recomputed and not chosen.modules and not self._halves
        if recomputed and chosen.modules:
            for name, child in block.named_children():
                if name in chosen.modules:
                    child.forward = self._recompute(child.forward)
        elif recomputed and self._halves:
            block.attend, block.feed = self._recompute(block.attend), self._recompute(block.feed)
        if whole and self._selective:
            block.forward = self._recompute(block.forward)
        if self._compiler is not None:
            self._compile(block)
        if whole and not self._selective:
            block.forward = self._recompute(block.forward)

    def _recompute(self, forward: Any) -> Recomputed:
        return Recomputed(forward, selective=self._selective)

    def _compile(self, block: Any) -> None:
        assert self._compiler is not None
        if not isinstance(block.feed_forward, MoE):
            block.forward = hiding_gradients(block, self._compiler(block.forward))
            return
        block.attend = hiding_gradients(block, self._compiler(block.attend))
        shared: Any = block.feed_forward.shared
        if shared is not None:
            # The whole call, so that what tensor parallelism hooked onto it is inside.
            call = self._compiler(shared._call_impl)
            shared._compiled_call_impl = hiding_gradients(shared, call)


def cast_at_borders(model: nn.Module, dtypes: dict[nn.Parameter, torch.dtype], policy: torch.dtype) -> None:
    """Let each largest subtree of `model` that computes in another dtype than `policy` cast what goes in and out.

    It gets floating-point arguments in its own dtype, and what it returns goes on in `policy`; a module whose class sets
    `exact_output` returns its own dtype. The model as a whole is left alone: it takes tokens and returns losses.
    """
    for child in model.children():
        for subtree, compute in maximal_subtrees(child, dtypes):
            if compute != policy:
                outside = None if getattr(subtree, "exact_output", False) else policy
                subtree.forward = casting(subtree.forward, compute, outside)


def check_modules(model: Transformer, chosen: ActivationCheckpoint) -> None:
    """Raise UserError for a name in `chosen.modules`, where that is used, that is no child of any block of `model`."""
    if chosen.mode not in ("full", "selective"):
        return
    known = sorted({name for block in model.layers.values() for name, _ in block.named_children()})
    for name in chosen.modules:
        if name not in known:
            raise UserError(
                f'activation_checkpoint.modules: "{name}" is no part of a block; the parts are {", ".join(known)}'
                + did_you_mean(name, known)
            )


def _set_memory_budget(layout: Layout) -> None:
    """Set the share of activations that the compiler may keep. A global of PyTorch, read when a block is compiled."""
    chosen = layout.activation_checkpoint
    limited = chosen.mode == "memory_budget"
    if limited and not compat.weigh_meshes_as_nothing() and layout.parallel.tp > 1:
        raise UserError(
            'activation_checkpoint.mode = "memory_budget" does not work with '
            f"parallel.tp = {layout.parallel.tp} under PyTorch {torch.__version__}; "
            'use "selective", or another version'
        )
    torch._functorch.config.activation_memory_budget = chosen.memory_budget if limited else 1.0
