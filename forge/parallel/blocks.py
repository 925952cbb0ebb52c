"""Wrap the forwards of blocks, for recomputation or offload, and compilation. Casts: forge/parallel/precision.py.

Only forwards are replaced, never modules, so parameters keep their names. FSDP's hooks on a block, and tensor
parallelism's hooks on a child, run outside the new forward: recomputation gathers no parameters again, and the compiled
graph contains no hooks. From the inside out:

    selective recomputation  the compiler has to see the results kept by the checkpoint
    compile                  the block as it will run
    full recomputation       nothing inside is kept, so the compiler gains nothing from seeing the checkpoint. With a
                             checkpoint inside the graph, PyTorch 2.13 fails to trace tensor parallelism with SDPA (it
                             saves a DeviceMesh)
    offload                  acts on the tensors saved by the block, or by its compiled graph
    wait                     the first block only: compiled code must not receive the result of a running collective

Casts come after these wrappers, so graph and recomputation see the module's compute dtype.

Compilation is block by block: all blocks of a kind share one graph, so depth costs no compile time. A graph break is an
error, never a silent loss of speed. A block with a mixture of experts is several graphs: the attention half with the
norm before the mixture, the shared experts, the router, the experts' activation, and each permutation of rows. Between
the graphs the host reads the number of rows for each rank.

Activation checkpointing frees activations after forward and restores them in backward:

    full           keeps only a block's input; a third more computation
    selective      keeps the results of the operators in KEPT and recomputes the cheap rest. Compiled parts of a mixture
                   of experts are recomputed as a whole
    memory_budget  the compiler chooses, block by block, under a budget for kept memory
    offload        computes nothing again: activations wait in host memory (forge/parallel/offload.py)

The modes full, selective and offload can be restricted. With `every` = n, only every n-th block is chosen; with
`modules`, only the named children of blocks.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch._functorch.config
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.checkpoint import (
    SAC_IGNORED_OPS,
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from forge.config.layout import ActivationCheckpoint, Compile
from forge.model import MoE, Transformer
from forge.model.dispatch import Kernels
from forge.model.host import HostReads
from forge.model.residual import Mixed
from forge.model.sdpa import GRAPHS
from forge.parallel.layout import Layout
from forge.parallel.modules import has_all_names
from forge.parallel.offload import Offload
from forge.runtime import compat
from forge.runtime.errors import UserError, did_you_mean

# Operators whose results selective checkpointing keeps. By name, because the set of operators differs between builds and
# versions of PyTorch; each name stands for every overload.
KEPT = (
    # matrix products
    "aten.mm",
    "aten.addmm",
    "aten.bmm",
    "aten.linear",
    "aten._scaled_mm",
    "aten._grouped_mm",
    "aten._scaled_grouped_mm",
    # attention
    "aten._scaled_dot_product_flash_attention",
    "aten._scaled_dot_product_flash_attention_for_cpu",
    "aten._scaled_dot_product_efficient_attention",
    "aten._scaled_dot_product_cudnn_attention",
    "aten._scaled_dot_product_attention_math",
    "flex_attention",
    "forge.planned_attention",
    "forge.affine_scan",
    "forge.fused_delta_rule",
    # collectives
    "_c10d_functional.all_gather_into_tensor",
    "_c10d_functional.reduce_scatter_tensor",
    "_c10d_functional.all_to_all_single",
    "_c10d_functional.all_reduce",
    # float8 scales: a few numbers, but each costs a pass over a whole activation
    "aten.max",
    "aten.amax",
)
# The modes that `every` and `modules` restrict.
BY_BLOCK = ("full", "selective", "offload")
PROFILER_MARKS = ("profiler._record_function_enter_new", "profiler._record_function_exit")


def apply_blocks(model: Transformer, layout: Layout) -> None:
    """Replace forwards of `model` in place, as `activation_checkpoint` and `compile` require.

    Raises UserError if a name in activation_checkpoint.modules is not a child of a block, the compiler is unknown,
    compile.loss is set for a loss without chunks, or this PyTorch lacks a needed feature.
    """
    _set_memory_budget(layout)
    if has_all_names(model):
        check_modules(model, layout.activation_checkpoint)
    if layout.compile.enabled or layout.compile.loss:
        # Past the limit a compiled block raises an error. Attention residuals need one graph for each number of saved
        # streams.
        limit = GRAPHS * layout.model.streams_into(layout.model.n_layers)
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, limit)
    policy = BlockPolicy(layout)
    for layer, block in model.layers.items():
        policy.wrap(block, int(layer))
    if layout.compile.enabled and model.layers:
        first: Any = next(iter(model.layers.values()))
        first.forward = waiting(first.forward)
    if layout.compile.loss:
        compile_chunks(model.loss, compiler_for(layout.compile))


class BlockPolicy:
    """The rule for a model's blocks: which forwards are recomputed or offloaded, and which are compiled."""

    def __init__(self, layout: Layout):
        self._recomputation = layout.activation_checkpoint
        self._selective = self._recomputation.mode == "selective"
        self._offload = Offload() if self._recomputation.mode == "offload" else None
        # In a model with experts, each half of a block is checkpointed separately, because only the first half of a
        # block with experts can be compiled. Dense blocks are treated the same way: PyTorch 2.11's compiler drops the
        # second half of a block whose wrapping differs from the next block's.
        self._halves = self._selective and layout.model.moe is not None
        self._compiler = compiler_for(layout.compile) if layout.compile.enabled else None

    def wrap(self, block: Any, layer: int) -> None:
        """Wrap forwards of `block`, number `layer` of the model, for compilation, recomputation and offload.

        The module docstring gives the order of the wrappers, from the inside out.
        """
        chosen = self._recomputation
        is_chosen = chosen.mode in BY_BLOCK and layer % chosen.every == 0
        whole = is_chosen and not chosen.modules and not self._halves
        if is_chosen and chosen.modules:
            for name, child in block.named_children():
                if name in chosen.modules:
                    child.forward = self._lighten(child, child.forward)
        elif is_chosen and self._halves:
            # Not `feed`, which would also keep the stream.
            for name in ("attend", "ffn_branch"):
                setattr(block, name, self._lighten(block, getattr(block, name)))
        if whole and self._selective:
            block.forward = self._lighten(block, block.forward)
        if self._compiler is not None:
            self._compile(block)
        if whole and not self._selective:
            block.forward = self._lighten(block, block.forward)

    def _lighten(self, module: nn.Module, forward: Any) -> Any:
        """Return `forward`, a forward of `module`, wrapped in offload or recomputation.

        The wrapped forward keeps less memory for backward.
        """
        if self._offload is not None:
            return self._offload.wrap(module, forward)
        return Recomputed(forward, selective=self._selective)

    def _compile(self, block: Any) -> None:
        assert self._compiler is not None
        mixture = isinstance(block.feed_forward, MoE)
        if isinstance(block, Mixed) and not self._selective:
            # A mix needs a graph for each number of saved streams. Branches and mixes are compiled separately, so all
            # layers share the large graphs of the branches. A selective checkpoint lies inside the compiled function
            # and contains the mixes, so they are compiled with it.
            of_block = ["attention_branch", "ffn_input"] + ([] if mixture else ["ffn_branch"])
            parts: list[tuple[nn.Module, str]] = [(block, name) for name in of_block]
            parts += [(mix, "forward") for mix in (block.attention_mix, block.ffn_mix) if mix is not None]
        else:
            parts = [(block, "attend" if mixture else "forward")]
        for module, name in parts:
            setattr(module, name, hiding_gradients(module, self._compiler(getattr(module, name))))
        if not mixture:
            return
        compiler = self._compiler_within_a_checkpoint
        shared: Any = block.feed_forward.shared
        if shared is not None:
            # Compile the whole call, including tensor parallelism's hooks.
            call = compiler(shared._call_impl)
            shared._compiled_call_impl = hiding_gradients(shared, call)
        moe: Any = block.feed_forward
        moe.router.route = hiding_gradients(moe.router, compiler(moe.router.route))
        moe.experts.activate = compiler(moe.experts.activate)
        if hasattr(moe.dispatch, "kernels"):
            moe.dispatch.kernels = Kernels(*map(compiler, moe.dispatch.kernels))
        if moe.rounding is not None:
            moe.rounding.compile(compiler)

    def _compiler_within_a_checkpoint(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return `function` compiled, for use inside a selective checkpoint, which recomputes it as a whole.

        The checkpoint must not see the operators of the compiled code, because compiled code writes in place into the
        results of its matrix products.
        """
        assert self._compiler is not None
        compiled = self._compiler(function)
        if not self._selective:
            return compiled

        @functools.wraps(function)
        def opaque(*args: Any) -> Any:
            with _disable_current_modes():
                return compiled(*args)

        return opaque


class Recomputed:
    """`forward` under activation checkpointing: backward runs `forward` again.

    selective: True to keep expensive results and recompute only the others.
    """

    def __init__(self, forward: Callable[..., Any], *, selective: bool):
        functools.update_wrapper(self, forward)
        self._forward = forward
        self._options: dict[str, Any] = {"context_fn": selective_context} if selective else {}
        # Selective checkpointing raises if recomputation runs more operations than forward did. Profiler marks count as
        # operations, and FSDP sets more marks in recomputation around a unit inside the block.
        SAC_IGNORED_OPS.update(overload for name in PROFILER_MARKS for overload in _overloads(name))

    def __call__(self, x: torch.Tensor, *args: Any) -> Any:
        forward = self._forward
        # The other arguments enter by closure, because under a compiler only tensors may be arguments of a checkpoint.
        # A compiled forward reads nothing from the device, so no host reads need to be kept.
        kept = nullcontext if torch.compiler.is_compiling() else HostReads().kept

        def run(x: torch.Tensor) -> Any:
            with kept():
                return forward(x, *args)

        # The model uses no random numbers, so no generator state is kept.
        return checkpoint(run, x, use_reentrant=False, preserve_rng_state=False, **self._options)


def selective_context() -> Any:
    """Return the context managers of `checkpoint` for forward and for recomputation. The policy is `keep_expensive`."""
    return create_selective_checkpoint_contexts(keep_expensive)


class _Thread(threading.local):
    keeps = True


_thread = _Thread()


@contextmanager
def keeping_nothing() -> Iterator[None]:
    """Let selective checkpointing keep no result of the body, because backward needs none."""
    before, _thread.keeps = _thread.keeps, False
    try:
        yield
    finally:
        _thread.keeps = before


def keep_expensive(_context: Any, operator: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    """Keep the results of the operators in KEPT; recompute everything else."""
    kept = _thread.keeps and str(getattr(operator, "overloadpacket", operator)) in KEPT
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def _overloads(name: str) -> Iterator[Any]:
    namespace, _, operator = name.partition(".")
    found = getattr(getattr(torch.ops, namespace), operator, None)
    if isinstance(found, torch._ops.OpOverloadPacket):
        yield from (getattr(found, overload) for overload in found.overloads())
    elif found is not None:
        yield found


def compiler_for(chosen: Compile) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator like torch.compile, with the settings of `chosen`. Functions are compiled at their first call.

    Raises UserError for an unknown backend.
    """
    known = torch.compiler.list_backends(exclude_tags=())
    if chosen.backend not in known:
        raise UserError(
            f'compile.backend = "{chosen.backend}" is not known to PyTorch; known: {", ".join(known)}'
            + did_you_mean(chosen.backend, known)
        )
    return functools.partial(torch.compile, backend=chosen.backend, fullgraph=True)


def compile_chunks(loss: Any, compiler: Callable[..., Any]) -> None:
    """Compile `loss.chunk`, the computation of one chunk of tokens.

    The loop over chunks is not compiled, because the compiler would unroll it. Raises UserError for a loss without
    chunks.
    """
    if not hasattr(loss, "chunk"):
        raise UserError(f"compile.loss = true does not work with {type(loss).__name__}; use false")
    chunk = compiler(loss.chunk)
    # A detached parameter has no `.grad`, which the compiler might refuse (see `hiding_gradients`). A chunk runs inside
    # an autograd function, so autograd does not need the parameter itself.
    loss.chunk = lambda *args: chunk(*(arg.detach() if isinstance(arg, Tensor) else arg for arg in args))


def hiding_gradients(module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return `forward`, wrapped to hide the gradients of `module` whose dtype differs from their parameter's.

    During the call, `.grad` of such a parameter is None. Afterwards it is restored. Parameters in bfloat16 may
    accumulate gradients in float32 (torch.Tensor.grad_dtype). PyTorch 2.11 to 2.13 refuse to trace such parameters.
    """
    parameters: list[nn.Parameter] = []

    @functools.wraps(forward)
    def hidden(*args: Any) -> Any:
        # At the first call, because data parallelism comes after compilation and replaces parameters.
        if not parameters:
            parameters.extend(module.parameters())
        gradients = [(p, p.grad) for p in parameters if p.grad is not None and p.grad.dtype != p.dtype]
        for parameter, _ in gradients:
            parameter.grad = None
        try:
            return forward(*args)
        finally:
            for parameter, gradient in gradients:
                parameter.grad = gradient

    return hidden


def waiting(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return `forward`, wrapped to wait for its first argument if a collective is still producing it.

    Under a user's tensor-parallel plan the embedding may return an AsyncCollectiveTensor, the result of a running
    collective. Compiled code treats it as a plain tensor and fails in backward.
    """

    @functools.wraps(forward)
    def waited(x: Tensor, *args: Any) -> Any:
        # `AsyncCollectiveTensor.wait` would lose the gradient; a clone waits and keeps it.
        return forward(x.clone() if isinstance(x, AsyncCollectiveTensor) else x, *args)

    return waited


def check_modules(model: Transformer, chosen: ActivationCheckpoint) -> None:
    """Raise UserError if a name in `chosen.modules` is not a child of any block.

    Under the modes none and memory_budget, which ignore the names, do nothing.
    """
    if chosen.mode not in BY_BLOCK:
        return
    known = sorted({name for block in model.layers.values() for name, _ in block.named_children()})
    for name in chosen.modules:
        if name not in known:
            raise UserError(
                f'activation_checkpoint.modules: "{name}" is not a module of a block; the modules are {", ".join(known)}'
                + did_you_mean(name, known)
            )


def _set_memory_budget(layout: Layout) -> None:
    """Set the fraction of activations that the compiler may keep: a PyTorch global, read when a block is compiled.

    Raises UserError if tensor parallelism does not work with a memory budget in this PyTorch.
    """
    chosen = layout.activation_checkpoint
    limited = chosen.mode == "memory_budget"
    if limited and not compat.weigh_meshes_as_nothing() and layout.parallel.tp > 1:
        raise UserError(
            'activation_checkpoint.mode = "memory_budget" does not work with '
            f"parallel.tp = {layout.parallel.tp} under PyTorch {torch.__version__}; "
            'use "selective", or another version of PyTorch'
        )
    torch._functorch.config.activation_memory_budget = chosen.memory_budget if limited else 1.0
