"""The experts of a layer: SwiGLU for groups of rows, each group with its own weights."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# (rows `[n, in]`, weights `[groups, in, out]`, offs=int32 `[groups]`, the end of each group's rows) -> `[n, out]`.
# The public name is younger than the operator.
_grouped_mm: Callable[..., Tensor] = getattr(F, "grouped_mm", None) or torch._grouped_mm


class Experts(nn.Module):
    """All experts of a layer; one weight for each projection, gate and up fused.

    w13 `[n_experts, 2 * hidden_dim, dim]`: the gate's rows, then up's. w2 `[n_experts, dim, hidden_dim]`.
    """

    def __init__(self, n_experts: int, dim: int, hidden_dim: int):
        super().__init__()
        self.w13 = nn.Parameter(torch.empty(n_experts, 2 * hidden_dim, dim))
        self.w2 = nn.Parameter(torch.empty(n_experts, dim, hidden_dim))

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """rows `[n, dim]` sorted by expert, counts int64 `[n_experts]` of rows per expert -> `[n, dim]`.

        The output and the gradient of rows past the last counted one are undefined.
        """
        return grouped_swiglu(rows, self.w13, self.w2, counts)


def grouped_swiglu(rows: Tensor, w13: Tensor, w2: Tensor, counts: Tensor) -> Tensor:
    """w2[e](silu(gate) * up) with gate, up = w13[e] row, for each row of each expert e; shapes as in `Experts`."""
    gate, up = grouped_linear(rows, w13, counts).chunk(2, -1)
    return grouped_linear(F.silu(gate) * up, w2, counts)


def grouped_linear(rows: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """rows `[n, in]` in groups of `counts` int64 `[groups]`, weight `[groups, out, in]` -> `[n, out]`.

    One grouped product, without a host sync. Its gradient must not be an expanded tensor.
    For inputs that the kernels do not support (float64, row sizes that are no multiple of 16 bytes, no rows) a loop over
    the groups, with a host sync.
    """
    aligned = all(side * rows.element_size() % 16 == 0 for side in weight.shape[1:])
    if aligned and rows.dtype != torch.float64 and rows.shape[0] > 0:
        return _grouped_mm(rows, weight.transpose(-2, -1), offs=counts.cumsum(0).to(torch.int32))
    sizes = counts.tolist()
    parts = rows.split([*sizes, rows.shape[0] - sum(sizes)])
    products = [F.linear(part, own) for part, own in zip(parts[:-1], weight.unbind(), strict=True)]
    return torch.cat([*products, rows.new_zeros(parts[-1].shape[0], weight.shape[1])])
