"""A backward in two halves: the gradient of a stage's input, on which other stages wait, and later those of its weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight


class HalfDone:
    """The weights' half that is still to do: the graph from each weight up to where the input's gradient came by."""

    def __init__(self, groups: list[dict[str, Any]]):
        self._groups = groups

    def finish(self, parameters: Sequence[nn.Parameter]) -> None:
        """Add the weights' gradients to `parameters`, which are those of `backward_to_input`."""
        stage_backward_weight(iter(parameters), self._groups)


def backward_to_input(
    output: Tensor, gradient: Tensor | None, x: Tensor, parameters: Sequence[nn.Parameter]
) -> tuple[Tensor, HalfDone]:
    """The gradient with respect to `x`, a leaf, and what is left to do. `gradient`: of `output`; None if it is a scalar."""
    given = None if gradient is None else [gradient]
    (found,), groups = stage_backward_input([output], given, [x], iter(parameters))
    x.grad = None
    assert found is not None
    return found, HalfDone(groups)
