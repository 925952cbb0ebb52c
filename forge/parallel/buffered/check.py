"""Look at each bucket's gradients before they are mixed with those of other ranks, for `parallel.check_gradients`."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from forge.errors import FAILED, UserError

# A bucket's norm differs by a factor of a few from step to step, ten at a bad batch.
IMPLAUSIBLE = 1000.0


class GradientCheck:
    """Raises UserError (exit 1) that names parameter and rank. Waits for the device at every bucket.

    finite: a gradient is NaN or infinite. plausible: that, or a bucket's norm is `IMPLAUSIBLE` times the largest that
    it has had.
    """

    def __init__(self, level: Literal["finite", "plausible"]):
        self._level = level
        self._largest: dict[str, float] = {}

    def __call__(self, gradients: Sequence[tuple[str, Tensor]]) -> None:
        """`gradients` of one bucket, by the names of their parameters."""
        norms = torch.stack(torch._foreach_norm([gradient for _, gradient in gradients])).tolist()
        for (name, _), norm in zip(gradients, norms, strict=True):
            if not isfinite(norm):
                raise UserError(_problem(name, "is not finite"), exit_code=FAILED)
        first, norm = gradients[0][0], sum(norm**2 for norm in norms) ** 0.5
        largest = self._largest.get(first, 0.0)
        if self._level == "plausible" and largest and norm > IMPLAUSIBLE * largest:
            worst = max(zip(norms, gradients, strict=True), key=lambda pair: pair[0])[1][0]
            text = f"is implausible: its bucket's norm is {norm:.3g}, and was {largest:.3g} at most before"
            raise UserError(_problem(worst, text), exit_code=FAILED)
        self._largest[first] = max(norm, largest)


def _problem(name: str, what: str) -> str:
    return (
        f"the gradient of {name} {what}, on rank {dist.get_rank()}, before it was summed over ranks. Look at that rank's "
        f"data and card, lower optimizer.lr, or set parallel.check_gradients = none"
    )
