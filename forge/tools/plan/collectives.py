"""Collectives observed in PyTorch's dispatcher: kind, bytes and ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

from forge.parallel.mesh import Meshes
from forge.tools.plan.work import Work

NAMES = {
    "_allgather_base_": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "allreduce_": "all_reduce",
    "all_reduce": "all_reduce",
    "alltoall_base_": "all_to_all",
    "all_to_all_single": "all_to_all",
    "recv_": "recv",
    "broadcast_": "broadcast",
}
_NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
# Operators of these namespaces that send nothing: they wait for a collective or wrap its result.
_NOT_SENT = ("wait_tensor", "_wrap_tensor_autograd")


@dataclass(frozen=True)
class Collective:
    """One call of a collective. size: bytes of its largest tensor. A ring of n ranks moves (n - 1) / n of these bytes."""

    kind: str
    size: int
    group: str = ""
    background: bool = False
    """True if the collective is asynchronous and the trace does not see the wait for it, as for FSDP's collectives."""
    meanwhile: tuple[tuple[Work, int], ...] = ()
    """(operator, number of its calls) for the operators between the collective's call and the wait for its result."""

    @property
    def overlaps(self) -> bool:
        """Whether matrix products or attention run during the collective."""
        return self.background or any(work.flops for work, _ in self.meanwhile)


def collective_of(func: Any, args: Any, kwargs: Any = None) -> Collective | None:
    """Return the collective called by the operator `func`; None if `func` is not a collective.

    NAMES has the collective's kind. For an operator missing in NAMES, the kind is the operator's name.
    """
    if func.namespace not in _NAMESPACES or (name := func._overloadpacket.__name__) in _NOT_SENT:
        return None
    leaves = tree_leaves((args, kwargs or {}))
    size = max((leaf.nbytes for leaf in leaves if isinstance(leaf, torch.Tensor)), default=0)
    if name == "all_gather_into_tensor" and func.namespace != "c10d":
        size *= args[1]  # the arguments lack the result, which is group-size times as large as the input
    return Collective(NAMES.get(name, name), size, _group_name(leaves), func.namespace == "c10d")


def _group_name(leaves: list[Any]) -> str:
    for leaf in reversed(leaves):  # the last string of a functional collective is the group's name
        if isinstance(leaf, str):
            return leaf
        if isinstance(leaf, torch.ScriptObject):
            try:
                return dist.ProcessGroup.unbox(leaf).group_name
            except RuntimeError:  # a ReduceOp
                continue
    return ""


def axes_of(meshes: Meshes) -> dict[str, str]:
    """Return a dict from a process group's name to its mesh axis.

    If several axes share a group, the first in the list `named` counts.
    """
    d = meshes.degrees
    fsdp = "dp_shard" if d.cp == 1 else "dp_shard x cp"
    named: list[tuple[str, Any]] = [
        ("tp", meshes.tp.get_group()),
        ("ep", meshes.ep.get_group()),
        ("ep over nodes", meshes.ep_node),
        ("ep in a node", meshes.ep_local),
        ("cp", meshes.cp),
        ("pp", meshes.pp),
        (fsdp, meshes.fsdp.get_group(meshes.fsdp.ndim - 1)),
        ("dp_replicate", meshes.copies[("dp_replicate",)]),
        ("data", meshes.loss),
        ("all", dist.group.WORLD),
        ("ep_shard", meshes.fsdp_experts.get_group(meshes.fsdp_experts.ndim - 1)),
        ("cp x tp", meshes.sequence),
        ("stage", meshes.stage),
        ("pp x data", meshes.pipeline),
        *((" x ".join(axes), group) for axes, group in meshes.copies.items()),
    ]
    axes: dict[str, str] = {}
    for axis, group in named:
        if group is not None:
            axes.setdefault(group.group_name, axis)
    return axes
