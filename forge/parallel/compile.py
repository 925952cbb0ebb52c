"""torch.compile, block by block: one graph that all blocks of a kind share, so depth costs no compile time.

A graph that would break is an error, never a silent loss of speed. Of a block with a mixture of experts the attention
half is one graph and the shared experts are another: how many rows go to an expert is known only when they do, so
routing and dispatch are not compiled. Which forwards are compiled: forge/parallel/blocks.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from forge.config.layout import Compile
from forge.errors import UserError, did_you_mean

# Graphs of one function; PyTorch's own limit is 8. Kinds of layers (by window), times with and without a gradient, times
# batches as in training, smaller ones and samples of any length, are more; past the limit a compiled block is an error,
# and flex_attention, which is compiled by itself on CUDA, would silently hold every score.
GRAPHS = 64


def compiler_for(chosen: Compile) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return what compiles a function, at its first call. Raises UserError for a compiler that PyTorch does not know."""
    known = torch.compiler.list_backends(exclude_tags=())
    if chosen.backend not in known:
        raise UserError(
            f'compile.backend = "{chosen.backend}" is not known to PyTorch; known: {", ".join(known)}'
            + did_you_mean(chosen.backend, known)
        )
    return functools.partial(torch.compile, backend=chosen.backend, fullgraph=True)


def compile_chunks(loss: Any, compiler: Callable[..., Any]) -> None:
    """Compile what `loss` computes per chunk of tokens: the loop itself is outside, or it would be unrolled.

    Raises UserError for a loss without chunks.
    """
    if not hasattr(loss, "chunk"):
        raise UserError(f"compile.loss = true does not go with {type(loss).__name__}; use false")
    loss.chunk = _detaching(compiler(loss.chunk))


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

    Under a user's plan of tensor parallelism the embedding may return an AsyncCollectiveTensor, a promise of a
    collective's result; compiled code takes it for a plain tensor and fails in backward.
    """

    @functools.wraps(forward)
    def waited(x: Tensor, *args: Any) -> Any:
        # `AsyncCollectiveTensor.wait` would lose the gradient; a clone waits and keeps it.
        return forward(x.clone() if isinstance(x, AsyncCollectiveTensor) else x, *args)

    return waited
