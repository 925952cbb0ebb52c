"""The experts of a layer: a feed-forward applied to groups of rows, with separate weights for each group."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from forge.model import host
from forge.model.feed_forward import SWIGLU, Activation
from forge.model.norm import promoted

# (rows `[n, in]`, weights `[groups, in, out]`, offs=the end of each group's rows, int32 `[groups]`) -> `[n, out]`.
# Older PyTorch versions have only the private name.
_grouped_mm: Callable[..., Tensor] = getattr(F, "grouped_mm", None) or torch._grouped_mm


class Experts(nn.Module):
    """All experts of a layer. Each projection stacks the weights of all experts; gate and up are fused.

    w13 `[n_experts, inputs * hidden_dim, dim]`, for an activation with `inputs` inputs: the gate's rows, then up's.
    w2 `[n_experts, dim, hidden_dim]`. With `bias` also w13_bias `[n_experts, inputs * hidden_dim]` and w2_bias
    `[n_experts, dim]`.
    """

    # If the experts' dtype differs from their block's, this method casts the rows, after dispatch.
    casts_in = "compute"

    def __init__(
        self, n_experts: int, dim: int, hidden_dim: int, activation: Activation = SWIGLU, bias: bool = False
    ):
        super().__init__()
        self.activation = activation
        # (fused projections `[n, inputs * hidden_dim]`) -> `[n, hidden_dim]`. An extension point: compilation replaces
        # it.
        self.activate: Callable[[Tensor], Tensor] = functools.partial(apply_activation, activation=activation)
        # The grouped product, with the signature of `grouped_linear`. An extension point: float8 replaces it.
        self.multiply: Callable[..., Tensor] = grouped_linear
        width = activation.inputs * hidden_dim
        self.w13 = nn.Parameter(torch.empty(n_experts, width, dim))
        self.w2 = nn.Parameter(torch.empty(n_experts, dim, hidden_dim))
        self.w13_bias = nn.Parameter(torch.empty(n_experts, width)) if bias else None
        self.w2_bias = nn.Parameter(torch.empty(n_experts, dim)) if bias else None

    def forward(self, x: Tensor, experts: Tensor, weights: Tensor, dispatch: Callable[..., Tensor]) -> Tensor:
        """Return for each token of x `[tokens, dim]` the weighted sum of its experts' outputs, `[tokens, dim]`.

        experts int64 and weights `[tokens, top_k]`. dispatch: a `Dispatcher` (forge/model/dispatch.py). It may compute
        the rows in several parts. It runs inside this call, so that FSDP gathers the experts' weights once for all parts.
        """
        held = self.held()
        return dispatch(x, experts, weights, lambda rows, groups: self.compute(rows, groups, held))

    def held(self) -> tuple[Tensor | None, ...]:
        """Return w13, w2 and the two biases of the experts on this rank; None for a missing bias."""
        return self.w13, self.w2, self.w13_bias, self.w2_bias

    def compute(
        self, rows: Tensor, groups: RowGroups, held: tuple[Tensor | None, ...] | None = None
    ) -> Tensor:
        """rows `[n, dim]` sorted by expert, one group for each expert on this rank -> `[n, dim]`.

        Output and gradient are undefined for rows past the last group. held: the result of `held()`, if known.
        """
        w13, w2, w13_bias, w2_bias = held or self.held()
        projected = self.multiply(rows, w13, groups, w13_bias)
        return self.multiply(self.activate(projected), w2, groups, w2_bias)


def apply_activation(projected: Tensor, activation: Activation) -> Tensor:
    """projected `[n, inputs * hidden_dim]` -> `[n, hidden_dim]`."""
    return activation.function(*projected.chunk(activation.inputs, -1))


class RowGroups:
    """Consecutive groups of rows. More rows may follow the last group.

    counts: number of rows of each group, int64 `[groups]`. ends: the end of each group, int32 `[groups]`.
    """

    def __init__(self, counts: Tensor, ends: Tensor | None = None):
        self.counts = counts
        self.ends = counts.cumsum(0, dtype=torch.int32) if ends is None else ends

    @functools.cached_property
    def sizes(self) -> list[int]:
        """Return the counts on the host.

        The first access synchronises with the device; all products of a layer share the result.
        """
        (sizes,) = host.read(self.counts)
        return list(sizes)


def grouped_linear(rows: Tensor, weight: Tensor, groups: RowGroups, bias: Tensor | None = None) -> Tensor:
    """rows `[n, in]` in `groups`, weight `[groups, out, in]`, bias `[groups, out]` -> `[n, out]`.

    One grouped product, without a host sync. The gradient of the result must not be an expanded tensor. If there is no
    kernel for the product (see `has_kernel`), the host reads the group sizes and loops over the groups.
    """
    if bias is not None:
        return grouped_linear(rows, weight, groups) + bias_of_rows(rows, bias, groups)
    if rows.shape[0] == 0:
        # This rank received no tokens. The product with all experts is empty, and its gradients are zero.
        return F.linear(rows, weight.flatten(0, 1))[:, : weight.shape[1]]
    if has_kernel(rows, weight):
        return _grouped_mm(rows, weight.transpose(-2, -1), offs=groups.ends)
    parts = rows.split([*groups.sizes, rows.shape[0] - sum(groups.sizes)])
    products = [F.linear(part, own) for part, own in zip(parts[:-1], weight.unbind(), strict=True)]
    return torch.cat([*products, rows.new_zeros(parts[-1].shape[0], weight.shape[1])])


def grouped_outer(left: Tensor, right: Tensor, groups: RowGroups) -> Tensor:
    """left `[n, out]`, right `[n, in]`, both in `groups` -> left^T right of each group, `[groups, out, in]`."""
    n_groups = groups.counts.numel()
    if left.shape[0] == 0:
        return left.new_zeros(n_groups, left.shape[1], right.shape[1])
    if has_kernel(left, left) and has_kernel(right, right):
        return _grouped_mm(left.mT, right, offs=groups.ends)
    rest = left.shape[0] - sum(groups.sizes)
    parts = (rows.split([*groups.sizes, rest])[:-1] for rows in (left, right))
    return torch.stack([own.mT @ other for own, other in zip(*parts, strict=True)])


def has_kernel(rows: Tensor, weight: Tensor) -> bool:
    """Return whether PyTorch computes the grouped product without a host sync.

    The size of a row must be a multiple of 16 bytes. On CUDA there is a kernel only for bfloat16 on Hopper (9.x) and
    Blackwell (10.x). Other products, and each of their gradients, synchronise with the device.
    """
    aligned = all(side * rows.element_size() % 16 == 0 for side in weight.shape[1:])
    if rows.is_cuda:
        return aligned and rows.dtype == torch.bfloat16 and _capability(rows.device)[0] in (9, 10)
    return aligned and rows.dtype != torch.float64


_capability = functools.cache(torch.cuda.get_device_capability)


def bias_of_rows(rows: Tensor, bias: Tensor, groups: RowGroups) -> Tensor:
    """bias `[groups, out]` -> for each row the bias of its group, `[n, out]`; zeros past the last group.

    The look-up is in the wider of float32 and the bias's dtype, because its backward sums the gradients of a group's rows.
    The result has the dtype of `rows`. Gradients past the last group are ignored.
    """
    index = torch.arange(rows.shape[0], device=rows.device)
    # Rows past the last group have index `groups`, the padding.
    group = torch.searchsorted(groups.ends, index, right=True)
    padded = F.pad(bias, (0, 0, 0, 1)).to(promoted(bias.dtype))
    return padded.index_select(0, group).to(rows.dtype)
