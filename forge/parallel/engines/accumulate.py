"""Accumulation of FSDP2's reduced gradients over microbatches, in one launch per unit.

FSDP2 reduces a unit's gradients into one flat tensor, and makes each parameter's gradient a view of it. For a later
microbatch FSDP2 adds parameter by parameter. `SummingReduceScatter` adds the flat tensors instead. A sum of views is
the view of the sum, so all values stay equal.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from forge.runtime import compat
from forge.shard import local


class SummingReduceScatter:
    """A reduce-scatter for `FSDPModule.set_custom_reduce_scatter`. Its output includes earlier microbatches' gradients.

    The earlier gradients are then cleared, so FSDP2 does not add them again. If they are not views of one flat tensor
    with the output's dtype and size, FSDP2 adds them instead. This happens if the storage dtype differs from the
    reduction dtype, or if a parameter got no gradient in a microbatch.

    adds: False under replicas. FSDP2 then keeps sums over microbatches itself, until it reduces them over the replicas. Only
    a module called twice in the last microbatch has earlier gradients, and these are already reduced.
    """

    def __init__(self, unit: FSDPModule, *, adds: bool = True):
        self._unit, self._adds = unit, adds

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return an uninitialised tensor."""
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Reduce input `[ranks * n]` over `group` into output `[n]`, and add the earlier gradients to the output.

        FSDP2 calls this method on the stream on which it allocates gradients.
        """
        assert not async_op
        compat.reduce_scatter(output_tensor, input_tensor, op=op, group=group)
        if not self._adds:
            return
        parameters = compat.fsdp_parameters(self._unit)
        earlier = _flat([parameter.grad for parameter in parameters], output_tensor)
        if earlier is not None:
            output_tensor += earlier
            for parameter in parameters:
                parameter.grad = None


def _flat(gradients: list[Tensor | None], like: Tensor) -> Tensor | None:
    """Return the flat tensor of which all `gradients` are views; None if there is none, or if it does not fit `like`.

    FSDP2 makes a unit's gradients views of one flat tensor. The tensor fits if it has the dtype, device and size of
    `like`. Both then hold the same parameters.
    """
    views = [local(gradient) for gradient in gradients if gradient is not None]
    if len(views) < len(gradients) or any(
        view.dtype != like.dtype or view.device != like.device for view in views
    ):
        return None
    storages = [view.untyped_storage() for view in views]
    if storages[0].nbytes() != like.nbytes or len({storage.data_ptr() for storage in storages}) > 1:
        return None
    return views[0].as_strided(like.shape, (1,), 0)
