"""Orthogonalisation by matrix products only: approximates the nearest (semi-)orthogonal matrix.

Each step maps every singular value s of X to a s + b s^3 + c s^5 and keeps the singular vectors:
X <- a X + (b G + c G^2) X with G = X X^T. Jordan et al., "Muon: an optimizer for hidden layers in neural networks", 2024.
"""

from __future__ import annotations

from itertools import repeat
from typing import Literal, TypeAlias

import torch
from torch import Tensor

Method: TypeAlias = Literal["newton_schulz", "polar_express"]

# The same coefficients in every step; singular values end between about 0.7 and 1.2, not at 1.
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
# Amsel et al., "The Polar Express", 2025 (arXiv:2505.16932): optimal for each step if singular values start above 1e-3.
# Later steps repeat the last coefficients.
POLAR_EXPRESS = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
    (1.875, -1.25, 0.375),
)
# The paper's margin for rounding. Without it, a singular value just above 1 would grow.
ROOM = 1.01
LEAST_NORM = 1e-7


def orthogonalize_(matrices: Tensor, steps: int, method: Method = "newton_schulz") -> Tensor:
    """Orthogonalise matrices `[n, rows, columns]` in place, in their dtype, and return them. A zero matrix stays zero."""
    # A GPU computes all matrices in one batched product. A CPU computes the matrices of a batch one after another anyway.
    # In a loop over matrices, temporaries stay in the cache, and a plain product is faster than a batch of one.
    for some in [matrices] if matrices.is_cuda else matrices.unbind():
        _iterate_(some, _coefficients(steps, method), ROOM if method == "polar_express" else 1.0)
    return matrices


def _iterate_(matrices: Tensor, coefficients: list[tuple[float, float, float]], room: float) -> None:
    """Apply one polynomial per step, in place. matrices: `[n, rows, columns]`, or one matrix `[rows, columns]`.

    Matrices are first divided by their Frobenius norm times `room`. coefficients: (a, b, c) of each step.
    """
    tall = matrices.shape[-2] > matrices.shape[-1]
    add_product = torch.addmm if matrices.ndim == 2 else torch.baddbmm
    norm = torch.linalg.vector_norm(matrices, dim=(-2, -1), keepdim=True)
    x = matrices / (norm * room).clamp_(min=LEAST_NORM)
    for number, (a, b, c) in enumerate(coefficients, start=1):
        # Use the smaller of the two Gram matrices; the result is the same from either side.
        gram = x.mT @ x if tall else x @ x.mT
        polynomial = add_product(gram, gram, gram, beta=b, alpha=c)
        out = matrices if number == len(coefficients) else None
        x = add_product(x, *((x, polynomial) if tall else (polynomial, x)), beta=a, out=out)


def _coefficients(steps: int, method: Method) -> list[tuple[float, float, float]]:
    if method == "newton_schulz":
        return [NEWTON_SCHULZ] * steps
    *first, last = POLAR_EXPRESS
    safe = [(a / ROOM, b / ROOM**3, c / ROOM**5) for a, b, c in first]
    return [*safe, *repeat(last, max(0, steps - len(safe)))][:steps]
