"""The gated delta rule by the Triton kernels of flash-linear-attention (fla), if installed.

Forward is one custom operator and its gradient another, so a compiler sees single nodes and needs only their shapes.

fla separates documents by `cu_seqlens`, whose length depends on the data. Passing `cu_seqlens` would synchronise host
and device once per layer, and the compiler would see new shapes. Instead, the first token of a document has a decay of
exp(RESET), nearly 0. fla accepts any decay, because no exponent in its kernels is above 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

_found = find_spec("fla")
# A folder named fla without an __init__.py is found too, but has no origin.
INSTALLED = _found is not None and _found.origin is not None
try:
    _triton = tuple(int(part) for part in version("triton").split(".")[:3])
except (PackageNotFoundError, ValueError):
    _triton = ()
# These versions of Triton compile fla's backward for decays per head incorrectly on Hopper (fla's issue 640).
WRONG_ON_HOPPER = (3, 4, 0) <= _triton < (3, 7, 1)
# exp(-50) = 2e-22. Log decays are summed over the tokens of a chunk, so a larger magnitude would cost precision.
RESET = -50.0
WIDEST_KEY = 256


def is_for_kernels(k: Tensor, v: Tensor, log_decay: Tensor) -> bool:
    """Return whether fla's kernels can be used: fla is installed, and the values `v` are bfloat16 on CUDA.

    fla refuses keys `k` with more than 256 elements per head.

    Also return False for decays per head on a Hopper GPU if Triton compiles their backward incorrectly
    (WRONG_ON_HOPPER), because fla refuses them.
    """
    if not (INSTALLED and v.is_cuda and v.dtype == torch.bfloat16 and k.shape[-1] <= WIDEST_KEY):
        return False
    refused = WRONG_ON_HOPPER and log_decay.shape[-1] == 1
    return not (refused and torch.cuda.get_device_properties(v.device).major == 9)


def fused_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    resets: Tensor | None = None,
    state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute `recurrent_delta_rule` with fla's kernels.

    Outputs have the dtype of v. The last state has the dtype of `log_decay`.
    """
    if resets is not None:
        log_decay = log_decay.masked_fill(resets[..., None, None], RESET)
    if state is None:
        state = log_decay.new_zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3])
    return _operator(q.to(v.dtype), k.to(v.dtype), v, log_decay, beta, state)


@torch.library.custom_op("forge::fused_delta_rule", mutates_args=())
def _operator(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    out, last = kernel_for(log_decay)(q, k, v, log_decay, beta, state)
    return out.contiguous(), last.contiguous()


@_operator.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    return v.new_empty(v.shape), state.new_empty(state.shape)


@torch.library.custom_op("forge::fused_delta_rule_backward", mutates_args=())
def _gradient(
    grad: Tensor,
    grad_last: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    state: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of the inputs. Runs forward again, because an operator cannot keep the graph of its forward."""
    with _autograd():
        inputs = [x.detach().requires_grad_() for x in (q, k, v, log_decay, beta, state)]
        results = kernel_for(log_decay)(*inputs)
        grads = torch.autograd.grad(results, inputs, (grad, grad_last))
    first, second, third, fourth, fifth, sixth = (x.contiguous() for x in grads)
    return first, second, third, fourth, fifth, sixth


@_gradient.register_fake
def _(grad: Tensor, grad_last: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in inputs)


def _keep(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: Tensor, grad_last: Tensor) -> tuple[Tensor, ...]:
    return _gradient(grad, grad_last, *ctx.saved_tensors)


_operator.register_autograd(_backward, setup_context=_keep)


@contextmanager
def _autograd() -> Iterator[None]:
    """Enable autograd in the body. PyTorch disables it inside an operator's implementation."""
    keys = torch._C.DispatchKey
    with ExitStack() as stack:
        for key in (keys.AutogradFunctionality, keys.ADInplaceOrView):
            stack.enter_context(torch._C._SetExcludeDispatchKeyGuard(key, False))
        stack.enter_context(torch.enable_grad())
        yield


def kernel_for(log_decay: Tensor) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return fla's function for decays per channel or per head, called with (q, k, v, log_decay, beta, state)."""
    # Imported at the first use, because fla imports Triton, which takes seconds.
    if log_decay.shape[-1] > 1:
        from fla.ops.kda import chunk_kda as chunked
    else:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule as chunked

    def call(
        q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor
    ) -> tuple[Tensor, Tensor]:
        decays = log_decay if log_decay.shape[-1] > 1 else log_decay.squeeze(-1)
        out, last = chunked(q, k, v, decays, beta, scale=1.0, initial_state=state, output_final_state=True)
        return out, last

    return call
