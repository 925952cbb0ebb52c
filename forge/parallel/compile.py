"""torch.compile, block by block: one graph that all blocks of a kind share, so depth costs no compile time.

The forward of a block is compiled, not the block: parameters keep their names, and the hooks of data parallelism,
which comes later, stay outside of the graph. A graph that would break is an error, never a silent loss of speed.
Of a block with a mixture of experts the attention half is one graph and the shared experts are another: how many rows
go to an expert is known only when they do, so routing and dispatch are not compiled.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from forge.errors import UserError, did_you_mean
from forge.model import MoE, Transformer
from forge.parallel.activation import Recomputed
from forge.parallel.layout import Layout
from forge.parallel.order import take_step

# Graphs of one function; PyTorch's own limit is 8. Kinds of layers (by window), times with and without a gradient, times
# batches as in training, smaller ones and samples of any length, are more; past the limit a compiled block is an error,
# and flex_attention, which is compiled by itself on CUDA, would silently hold every score.
GRAPHS = 64


def apply_compile(model: Transformer, layout: Layout) -> None:
    """Compile the blocks and the loss of `model` as `compile` says, in place; at its first use, not here.

    Raises UserError for a compiler that PyTorch does not know, or a loss that has nothing to compile.
    """
    take_step(model, "compile")
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, GRAPHS)
    chosen = layout.compile
    if not (chosen.enabled or chosen.loss):
        return
    known = torch.compiler.list_backends(exclude_tags=())
    if chosen.backend not in known:
        raise UserError(
            f'compile.backend = "{chosen.backend}" is not known to PyTorch; known: {", ".join(known)}'
            + did_you_mean(chosen.backend, known)
        )
    compiled = functools.partial(torch.compile, backend=chosen.backend, fullgraph=True)
    if chosen.enabled:
        blocks: list[Any] = list(model.layers.values())
        for block in blocks:
            if isinstance(block.feed_forward, MoE):
                block.attend = hiding_gradients(block, compiled(block.attend))
                shared: Any = block.feed_forward.shared
                if shared is not None:
                    # The whole call, so that what tensor parallelism hooked onto it is inside.
                    shared.compile(**compiled.keywords)
                    shared._compiled_call_impl = hiding_gradients(shared, shared._compiled_call_impl)
            elif isinstance(block.forward, Recomputed) and block.forward.whole:
                # Nothing of it is kept, so the compiler gains nothing from seeing the checkpoint; and inside one PyTorch
                # 2.13 fails to trace tensor parallelism with SDPA (it saves a DeviceMesh for backward).
                block.forward.forward = hiding_gradients(block, compiled(block.forward.forward))
            else:
                block.forward = hiding_gradients(block, compiled(block.forward))
        if blocks:
            blocks[0].forward = waiting(blocks[0].forward)
    if chosen.loss:
        loss: Any = model.loss
        # What it computes per chunk of tokens: the loop itself is outside, or it would be unrolled.
        if not hasattr(loss, "chunk"):
            raise UserError(f"compile.loss = true does not go with {type(loss).__name__}; use false")
        loss.chunk = _detaching(compiled(loss.chunk))


def hiding_gradients(module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    """`forward` that finds no gradients of another dtype on the parameters of `module`; afterwards they are there again.

    Parameters in bfloat16 may add up gradients in float32 (torch.Tensor.grad_dtype); PyTorch 2.11 to 2.13 refuse to trace
    them.
    """
    parameters: list[nn.Parameter] = []

    @functools.wraps(forward)
    def hidden(*args: Any) -> Any:
        if not parameters:  # not before: data parallelism, which comes after compilation, replaces them
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


def _detaching(chunk: Callable[..., Any]) -> Callable[..., Any]:
    """`chunk` of parameters without their gradients, as `hiding_gradients`; it runs inside an autograd function anyway."""
    return lambda *args: chunk(*(arg.detach() if isinstance(arg, Tensor) else arg for arg in args))


def waiting(forward: Callable[..., Any]) -> Callable[..., Any]:
    """`forward` with a first argument that has arrived.

    Under tensor parallelism the embedding returns an AsyncCollectiveTensor, a promise of a collective's result;
    compiled code takes it for a plain tensor and fails in backward.
    """

    @functools.wraps(forward)
    def waited(x: Tensor, *args: Any) -> Any:
        return forward(_Arrived.apply(x) if isinstance(x, AsyncCollectiveTensor) else x, *args)

    return waited


class _Arrived(torch.autograd.Function):
    """The promised tensor. `AsyncCollectiveTensor.wait` by itself would leave the gradient behind."""

    @staticmethod
    def forward(ctx: Any, x: AsyncCollectiveTensor) -> Tensor:
        return x.wait()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad
