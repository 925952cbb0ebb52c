"""How blocks run: recomputed in backward, compiled, and in which dtype. Nothing else replaces the forward of a module.

A forward is replaced, never a module, so parameters keep their names. Hooks of the module itself (FSDP's, and tensor
parallelism's on a child) run outside of the new forward: recomputation does not gather again, and the hooks are in no
graph. From the inside out:

    selective recomputation  the compiler has to see the results that the checkpoint keeps
    compile                  the block as it will run
    full recomputation       nothing inside is kept, so the compiler gains nothing from seeing the checkpoint. With a
                             checkpoint inside the graph, PyTorch 2.13 fails to trace tensor parallelism with SDPA (it
                             saves a DeviceMesh)
    wait                     the first block only: compiled code must not receive the result of a running collective
    cast                     last, so that graph and recomputation see the module's compute dtype

Compilation is block by block: all blocks of a kind share one graph, so depth costs no compile time. A graph break is an
error, never a silent loss of speed. A block with a mixture of experts is several graphs: the attention half, the shared
experts, the router, the experts' activation, and each movement of rows. Between the graphs the host reads the number of
rows for each rank.

Activation checkpointing frees activations after forward and computes them again in backward:

    full           everything inside a block but its input; a third more computation
    selective      only cheap operations; the results of the operators in KEPT are kept. Compiled parts of a mixture
                   of experts are recomputed as a whole
    memory_budget  the compiler chooses, block by block, under a budget for kept memory
    In the first two modes, `every` = n checkpoints every n-th block only, and `modules` only the named children of blocks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
import torch._functorch.config
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map
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
from forge.parallel.layout import Layout
from forge.parallel.modules import has_all_names
from forge.parallel.precision import maximal_subtrees, plan_units
from forge.runtime import compat
from forge.runtime.errors import UserError, did_you_mean

# The limit of graphs for one function; PyTorch's default is 8. The number needed is a product of three: kinds of layers (by
# window), 2 for forwards with and without gradients, and kinds of batches (training's, smaller ones, samples of any length).
# Past the limit a compiled block is an error, and flex_attention, which is compiled by itself on CUDA, would silently hold
# all scores in memory.
GRAPHS = 64

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
    # scales of float8: a few numbers that cost a pass over a whole activation each
    "aten.max",
    "aten.amax",
)
PROFILER_MARKS = ("profiler._record_function_enter_new", "profiler._record_function_exit")


def apply_blocks(model: Transformer, layout: Layout) -> None:
    """Replace forwards of `model` in place, as `activation_checkpoint`, `compile` and `precision` require.

    Raises UserError for a name in activation_checkpoint.modules that is not a child of a block, an unknown compiler,
    compile.loss with a loss that has no chunks, and features missing from this PyTorch.
    """
    _set_memory_budget(layout)
    if has_all_names(model):
        check_modules(model, layout.activation_checkpoint)
    if layout.compile.enabled or layout.compile.loss or torch.cuda.is_available():
        # Attention residuals: one graph for each number of saved streams.
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
    cast_at_borders(model, plan_units(model, layout.precision)[1], layout.compute)


class BlockPolicy:
    """The decision which forwards of a block are recomputed and which are compiled."""

    def __init__(self, layout: Layout):
        self._recomputation = layout.activation_checkpoint
        self._selective = self._recomputation.mode == "selective"
        # In a model with experts, blocks are recomputed by halves, because only the first half of a block with experts
        # can be compiled. Dense blocks of such a model are, too: PyTorch 2.11's compiler drops the second half of a
        # block that is wrapped differently from the next one.
        self._halves = self._selective and layout.model.moe is not None
        self._compiler = compiler_for(layout.compile) if layout.compile.enabled else None

    def wrap(self, block: Any, layer: int) -> None:
        """Replace the forwards of `block`, whose global index is `layer`, by compiled, checkpointed and casting ones.

        The module docstring gives the order, from the inside out.
        """
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
        mixture = isinstance(block.feed_forward, MoE)
        if isinstance(block, Mixed) and not self._selective:
            # A mix needs a graph for each number of saved streams. The branches are compiled apart from the mixes, so all
            # layers share the large graphs of the branches. Under a selective checkpoint, which is inside of the compiled
            # function, the mixes are inside as well.
            of_block = ["attention_branch"] if mixture else ["attention_branch", "ffn_branch"]
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
            # The whole call, so that tensor parallelism's hooks on it are inside.
            call = compiler(shared._call_impl)
            shared._compiled_call_impl = hiding_gradients(shared, call)
        moe: Any = block.feed_forward
        moe.router.route = hiding_gradients(moe.router, compiler(moe.router.route))
        moe.experts.activate = compiler(moe.experts.activate)
        if hasattr(moe.dispatch, "kernels"):
            moe.dispatch.kernels = Kernels(*map(compiler, moe.dispatch.kernels))

    def _compiler_within_a_checkpoint(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Compile `function` inside a selective checkpoint, which recomputes it as a whole.

        The checkpoint must not see the operators of the compiled code, because that code writes into the results of its
        matrix products.
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
    """`forward` under an activation checkpoint, which runs it again in backward. selective: expensive results are kept."""

    def __init__(self, forward: Callable[..., Any], *, selective: bool):
        functools.update_wrapper(self, forward)
        self._forward = forward
        self._options: dict[str, Any] = {"context_fn": selective_context} if selective else {}
        # Selective checkpointing does not allow recomputation more operations than forward had. It counts profiler
        # marks, and FSDP sets more of them in recomputation around a unit inside the block.
        SAC_IGNORED_OPS.update(overload for name in PROFILER_MARKS for overload in _overloads(name))

    def __call__(self, x: torch.Tensor, *args: Any) -> Any:
        forward = self._forward
        # The other arguments enter by closure: under a compiler only tensors may cross into a checkpoint.
        # A compiled forward reads nothing from the device.
        kept = nullcontext if torch.compiler.is_compiling() else HostReads().kept

        def run(x: torch.Tensor) -> Any:
            with kept():
                return forward(x, *args)

        # Nothing draws random numbers, so there is no generator state to keep.
        return checkpoint(run, x, use_reentrant=False, preserve_rng_state=False, **self._options)


def selective_context() -> Any:
    """Return the two context managers of `checkpoint`, for forward and recomputation, by the rule `keep_expensive`."""
    return create_selective_checkpoint_contexts(keep_expensive)


def keep_expensive(_context: Any, operator: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    """Keep the results of the operators in KEPT; recompute everything else."""
    name = str(getattr(operator, "overloadpacket", operator))
    return CheckpointPolicy.MUST_SAVE if name in KEPT else CheckpointPolicy.PREFER_RECOMPUTE


def _overloads(name: str) -> Iterator[Any]:
    namespace, _, operator = name.partition(".")
    found = getattr(getattr(torch.ops, namespace), operator, None)
    if isinstance(found, torch._ops.OpOverloadPacket):
        yield from (getattr(found, overload) for overload in found.overloads())
    elif found is not None:
        yield found


def compiler_for(chosen: Compile) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a function that compiles its argument at its first call. Raises UserError for an unknown compiler."""
    known = torch.compiler.list_backends(exclude_tags=())
    if chosen.backend not in known:
        raise UserError(
            f'compile.backend = "{chosen.backend}" is not known to PyTorch; known: {", ".join(known)}'
            + did_you_mean(chosen.backend, known)
        )
    return functools.partial(torch.compile, backend=chosen.backend, fullgraph=True)


def compile_chunks(loss: Any, compiler: Callable[..., Any]) -> None:
    """Compile the computation of one chunk of tokens in `loss`. The loop over chunks stays outside: it would be unrolled.

    Raises UserError for a loss without chunks.
    """
    if not hasattr(loss, "chunk"):
        raise UserError(f"compile.loss = true does not work with {type(loss).__name__}; use false")
    chunk = compiler(loss.chunk)
    # A detached parameter has no `.grad`, which the compiler might refuse (see `hiding_gradients`). A chunk runs inside an
    # autograd function, so nothing is lost.
    loss.chunk = lambda *args: chunk(*(arg.detach() if isinstance(arg, Tensor) else arg for arg in args))


def hiding_gradients(module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a `forward` that, while it runs, removes gradients of another dtype from the parameters of `module`.

    Parameters in bfloat16 may accumulate gradients in float32 (torch.Tensor.grad_dtype). PyTorch 2.11 to 2.13 refuse to
    trace such parameters.
    """
    parameters: list[nn.Parameter] = []

    @functools.wraps(forward)
    def hidden(*args: Any) -> Any:
        if (
            not parameters
        ):  # at the first call: data parallelism, which comes after compilation, replaces them
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
    """Return a `forward` that waits for its first argument before it runs.

    Under a user's plan of tensor parallelism the embedding may return an AsyncCollectiveTensor, a promise of a collective's
    result. Compiled code takes it for a plain tensor and fails in backward.
    """

    @functools.wraps(forward)
    def waited(x: Tensor, *args: Any) -> Any:
        # `AsyncCollectiveTensor.wait` would lose the gradient; a clone waits and keeps it.
        return forward(x.clone() if isinstance(x, AsyncCollectiveTensor) else x, *args)

    return waited


def cast_at_borders(model: nn.Module, dtypes: dict[nn.Parameter, torch.dtype], policy: torch.dtype) -> None:
    """Make each maximal subtree of `model` whose compute dtype is not `policy` cast its inputs and outputs.

    dtypes: compute dtype of each parameter. policy: compute dtype of all other modules. The subtree gets floating-point
    arguments in its own dtype and returns results in `policy`. A module whose class sets `exact_output` returns its own
    dtype. `model` itself never casts: it takes tokens and returns losses.
    """
    for child in model.children():
        for subtree, compute in maximal_subtrees(child, dtypes):
            if compute != policy:
                outside = None if getattr(subtree, "exact_output", False) else policy
                subtree.forward = casting(subtree.forward, compute, outside)


def casting(
    forward: Callable[..., Any], inside: torch.dtype, outside: torch.dtype | None
) -> Callable[..., Any]:
    """Return a `forward` that casts floating-point arguments to `inside` and results to `outside` (None: no cast)."""

    @functools.wraps(forward)
    def cast(*args: Any) -> Any:
        output = forward(*(_to(arg, inside) for arg in args))
        return output if outside is None else tree_map(lambda leaf: _to(leaf, outside), output)

    return cast


def _to(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def check_modules(model: Transformer, chosen: ActivationCheckpoint) -> None:
    """Raise UserError if `chosen.modules` is used and has a name that is not a child of any block of `model`."""
    if chosen.mode not in ("full", "selective"):
        return
    known = sorted({name for block in model.layers.values() for name, _ in block.named_children()})
    for name in chosen.modules:
        if name not in known:
            raise UserError(
                f'activation_checkpoint.modules: "{name}" is not a module of a block; the modules are {", ".join(known)}'
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
