"""All device meshes and process groups: the ranks sharing parameters, a sequence, a matrix product, the loss.

    parameters   (pp, dp_replicate, dp_shard x cp, tp)      mesh of dense DTensors
    experts      (pp, dp_replicate, ep_shard, ep)           mesh of experts' DTensors; ep = ep_node x ep_local
    data         (pp, dp_replicate, dp_shard, cp, tp)       the part of the batch read by each rank

All are views of the same ranks in the same order, and ep_shard * ep = dp_shard * cp * tp. tp is the fastest axis, so
its ranks are neighbours on one node. `make_meshes` makes all meshes and groups once; no other code slices meshes by
axis name. Axes of size 1 stay, so no code tests whether an axis exists. Such axes share one group and issue no
collective.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from forge.config import Degrees
from forge.runtime import compat

# Along these axes a layer's computation waits for other ranks.
_IN_LAYERS = frozenset(("tp", "ep", "ep_node", "ep_local", "cp"))


@dataclass(frozen=True)
class Meshes:
    """Meshes and groups of this rank.

    fsdp          mesh for fully_shard: (dp_shard x cp), preceded by dp_replicate if dp_replicate > 1
    fsdp_experts  mesh for units of experts: (ep_shard) or (dp_replicate, ep_shard)
    tp, ep        1-D meshes of tensor and expert parallelism
    ep_local      ranks of ep on this rank's node
    ep_node       ranks of ep with this rank's index in ep_local, one per node
    cp            ranks sharing a sequence
    sequence      cp and tp ranks: all ranks sharing a sequence under sequence parallelism
    loss          ranks whose losses and token counts add up to the global batch (dp x cp)
    stage         all ranks with parts of the same layers (dp x cp x tp)
    pp            ranks of one pipeline
    pipeline      pp and loss ranks (pp x dp x cp)
    copies        mesh axes over which a parameter is replicated -> group of ranks with the same elements
    data_rank     index of this rank's part of the global batch, 0 ... data_ranks - 1
    """

    degrees: Degrees
    fsdp: DeviceMesh
    fsdp_experts: DeviceMesh
    tp: DeviceMesh
    ep: DeviceMesh
    ep_node: dist.ProcessGroup
    ep_local: dist.ProcessGroup
    cp: dist.ProcessGroup
    sequence: dist.ProcessGroup
    loss: dist.ProcessGroup
    stage: dist.ProcessGroup
    pp: dist.ProcessGroup
    pipeline: dist.ProcessGroup
    copies: dict[tuple[str, ...], dist.ProcessGroup]
    data_rank: int

    @property
    def data_ranks(self) -> int:
        return self.degrees.dp


def make_meshes(degrees: Degrees, device_type: str, *, offloaded: bool = False) -> Meshes:
    """Make all meshes and groups.

    Collective over all ranks. `degrees` must match the world size. offloaded: parameters are on the CPU
    (parallel.cpu_offload), so every group also needs gloo.
    """
    d, groups = degrees, _Groups(offloaded)
    parameters = _View(groups, pp=d.pp, dp_replicate=d.dp_replicate, dp_shard_cp=d.dp_shard * d.cp, tp=d.tp)
    # Optimizers exchange objects over this group, so it needs gloo. It is made first, because a later request for the
    # same ranks returns the group made first.
    stage = parameters.group("dp_replicate", "dp_shard_cp", "tp", on_cpu=True)
    experts = _View(groups, pp=d.pp, dp_replicate=d.dp_replicate, ep_shard=d.ep_shard, ep=d.ep)
    within = _View(
        groups,
        pp=d.pp,
        dp_replicate=d.dp_replicate,
        ep_shard=d.ep_shard,
        ep_node=d.ep_nodes,
        ep_local=d.ep // d.ep_nodes,
    )
    data = _View(groups, pp=d.pp, dp_replicate=d.dp_replicate, dp_shard=d.dp_shard, cp=d.cp, tp=d.tp)
    dense_mesh, expert_mesh = parameters.mesh(device_type), experts.mesh(device_type)
    replicated = d.dp_replicate > 1
    loss = parameters.group("dp_replicate", "dp_shard_cp")
    return Meshes(
        degrees=degrees,
        fsdp=dense_mesh["dp_replicate", "dp_shard_cp"] if replicated else dense_mesh["dp_shard_cp"],
        fsdp_experts=expert_mesh["dp_replicate", "ep_shard"] if replicated else expert_mesh["ep_shard"],
        tp=dense_mesh["tp"],
        ep=expert_mesh["ep"],
        ep_node=within.group("ep_node"),
        ep_local=within.group("ep_local"),
        cp=data.group("cp"),
        sequence=data.group("cp", "tp"),
        loss=loss,
        stage=stage,
        pp=parameters.group("pp"),
        pipeline=parameters.group("pp", "dp_replicate", "dp_shard_cp"),
        copies={
            ("dp_replicate",): parameters.group("dp_replicate"),
            ("tp",): parameters.group("tp"),
            ("dp_replicate", "tp"): parameters.group("dp_replicate", "tp"),
            ("dp_replicate", "dp_shard_cp"): loss,
            ("dp_replicate", "dp_shard_cp", "tp"): stage,
            ("dp_replicate", "ep_shard"): experts.group("dp_replicate", "ep_shard"),
        },
        data_rank=dist.get_rank() // (d.cp * d.tp) % d.dp,
    )


class _View:
    """All ranks as a grid with named axes; the last axis is the fastest."""

    def __init__(self, groups: _Groups, **axes: int):
        self._axes = tuple(axes)
        self._ranks = torch.arange(math.prod(axes.values())).view(tuple(axes.values()))
        self._groups = groups

    def mesh(self, device_type: str) -> DeviceMesh:
        groups = [self.group(axis) for axis in self._axes]
        return DeviceMesh.from_group(groups, device_type, mesh=self._ranks, mesh_dim_names=self._axes)

    def group(self, *axes: str, on_cpu: bool = False) -> dist.ProcessGroup:
        """Return the group of ranks that differ from this rank only along the given axes.

        Collective. on_cpu: see `new_group`.
        """
        places = [self._axes.index(axis) for axis in axes]
        last = self._ranks.movedim(places, list(range(-len(places), 0)))
        sets = last.reshape(-1, math.prod(last.shape[-len(places) :])).tolist()
        return self._groups.one_of(sets, in_layers=_IN_LAYERS.issuperset(axes), on_cpu=on_cpu)


class _Groups:
    """Makes one process group per set of ranks and reuses it, because a group costs connections, memory and start-up time.

    The operations of a group run one after another. Groups used inside layers (`in_layers`: tp, ep, cp) are therefore
    separate from FSDP's background groups on the same ranks.
    """

    def __init__(self, all_on_cpu: bool) -> None:
        self._all_on_cpu = all_on_cpu
        self._made: dict[tuple[bool, str], dist.ProcessGroup] = {}

    def one_of(self, sets: list[list[int]], in_layers: bool, on_cpu: bool) -> dist.ProcessGroup:
        """Return the process group of the set that contains this rank. sets: a partition of all ranks.

        Collective. The first call for a partition makes the groups.
        """
        world, size = dist.group.WORLD, len(sets[0])
        assert world is not None
        in_layers = in_layers and size > 1
        if len(sets) == 1 and not in_layers:
            return world
        key = (in_layers, str(sets))
        if key not in self._made:
            self._made[key] = new_group(world, sets, on_cpu=on_cpu or self._all_on_cpu)
        return self._made[key]


def new_group(world: dist.ProcessGroup, sets: list[list[int]], *, on_cpu: bool) -> dist.ProcessGroup:
    """Make a group for each of `sets`, a partition of all ranks; return this rank's group.

    Collective. on_cpu: add gloo to NCCL, for objects and CPU tensors. Gloo connects every pair of ranks in a group: for
    hundreds of ranks this takes long and needs many sockets.
    """
    if world.bound_device_id is not None:  # NCCL splits the world communicator into all sets at once
        return compat.split_group(world, sets, None if on_cpu else "cuda:nccl")
    own = next(ranks for ranks in sets if dist.get_rank() in ranks)
    # Without local synchronisation, every rank would have to take part in making every set's group.
    group = dist.new_group(own, use_local_synchronization=True)
    assert group is not None
    return group
