"""Count the parameters and FLOPs of a built model. The model may contain users' module classes."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class ParameterCounts:
    """The number of parameters of a model. active: the parameters used by one token, including the whole embedding."""

    total: int
    active: int


def parameter_counts(model: nn.Module) -> ParameterCounts:
    """Count the parameters of `model`, which may be on the meta device.

    A module's attribute `idle_parameters` is the number of its parameters that a token does not use, e.g. of experts
    not chosen.
    """
    total = sum(parameter.numel() for parameter in model.parameters())
    idle = sum(getattr(module, "idle_parameters", 0) for module in model.modules())
    return ParameterCounts(total, total - idle)


def flops_per_token(module: nn.Module, seq_len: int) -> float:
    """Return the FLOPs of forward and backward per token, counting only matrix products.

    A module's method `flops_per_token(seq_len)` counts the module and all its submodules. Modules without this method
    are counted by `matrix_flops`. Document masks do not reduce the count, and recomputation does not increase it.
    """
    method = getattr(module, "flops_per_token", None)
    return matrix_flops(module, seq_len) if method is None else method(seq_len)


def matrix_flops(module: nn.Module, seq_len: int) -> float:
    """Return the FLOPs per token: 6 per element of the module's own matrices, plus the FLOPs of its submodules.

    Per element, forward has a multiply and an add, and backward twice as many. Elements that a token does not use
    (`idle_parameters`), parameters with fewer than two dimensions (norms, biases) and look-ups do not count.
    """
    own = (
        0
        if isinstance(module, nn.Embedding)
        else sum(p.numel() for p in module.parameters(False) if p.ndim > 1)
    )
    used = own - getattr(module, "idle_parameters", 0)
    return 6 * used + sum(flops_per_token(child, seq_len) for child in module.children())


def mean_keys(seq_len: int, window: int) -> float:
    """Return the mean number of visible keys per token: the mean of min(i + 1, window) over a sequence.

    window 0: no limit.
    """
    reach = min(window or seq_len, seq_len)
    return (reach * (reach + 1) / 2 + (seq_len - reach) * reach) / seq_len
