"""The one owner of meshes: which ranks share parameters, a sequence, a matrix product, the loss.

    parameters   (pp, dp_replicate, dp_shard x cp, tp)      what dense DTensors live on
    experts      (pp, dp_replicate, ep_shard, ep)           what DTensors of experts live on
    data         (pp, dp_replicate, dp_shard, cp, tp)       who reads which samples and which part of them

All are views of the same ranks in the same order; tp is the fastest axis, so that its ranks are neighbours on one node,
and ep_shard * ep = dp_shard * cp * tp. Meshes and groups are made once and kept under a name here; nothing slices them
by axis name later. Axes of size 1 stay, so that no code asks whether an axis exists, and issue no collective.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from forge.config import Degrees


@dataclass(frozen=True)
class Meshes:
    """Meshes and groups of this rank.

    fsdp: the mesh that fully_shard takes, (dp_shard x cp), with dp_replicate in front of it where there are replicas.
    fsdp_experts: the same for experts, (ep_shard) or (dp_replicate, ep_shard). tp, ep: the 1-D meshes of tensor and
    expert parallelism. cp: the ranks that share a sequence; sequence: those and the ranks that tensor parallelism adds
    (cp x tp). loss: the ranks whose losses and token counts add up to those of the global batch (dp x cp). stage: all
    ranks that hold parts of the same layers (dp x cp x tp). pp: the ranks of one pipeline, which a microbatch passes.
    pipeline: those and the ranks whose losses add up (pp x dp x cp). copies: for the mesh axes over which a parameter is
    replicated, the ranks that hold the same elements.
    """

    degrees: Degrees
    fsdp: DeviceMesh
    fsdp_experts: DeviceMesh
    tp: DeviceMesh
    ep: DeviceMesh
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


def make_meshes(degrees: Degrees, device_type: str) -> Meshes:
    """Make all meshes and groups. Collective over all ranks; `degrees` have been checked against the world size before."""

    def view(**axes: int) -> DeviceMesh:
        return init_device_mesh(device_type, tuple(axes.values()), mesh_dim_names=tuple(axes))

    d = degrees
    parameters = view(pp=d.pp, dp_replicate=d.dp_replicate, dp_shard_cp=d.dp_shard * d.cp, tp=d.tp)
    experts = view(pp=d.pp, dp_replicate=d.dp_replicate, ep_shard=d.ep_shard, ep=d.ep)
    data = view(pp=d.pp, dp_replicate=d.dp_replicate, dp_shard=d.dp_shard, cp=d.cp, tp=d.tp)
    replicated = d.dp_replicate > 1
    loss = parameters["dp_replicate", "dp_shard_cp"]._flatten("dp_cp").get_group()
    stage = parameters["dp_replicate", "dp_shard_cp", "tp"]._flatten("stage").get_group()
    pipeline = loss
    if d.pp > 1:
        pipeline = parameters["pp", "dp_replicate", "dp_shard_cp"]._flatten("pp_dp_cp").get_group()
    return Meshes(
        degrees=degrees,
        fsdp=parameters["dp_replicate", "dp_shard_cp"] if replicated else parameters["dp_shard_cp"],
        fsdp_experts=experts["dp_replicate", "ep_shard"] if replicated else experts["ep_shard"],
        tp=parameters["tp"],
        ep=experts["ep"],
        cp=data.get_group("cp"),
        sequence=data["cp", "tp"]._flatten("cp_tp").get_group(),
        loss=loss,
        stage=stage,
        pp=parameters.get_group("pp"),
        pipeline=pipeline,
        copies={
            ("dp_replicate",): parameters.get_group("dp_replicate"),
            ("tp",): parameters.get_group("tp"),
            ("dp_replicate", "tp"): parameters["dp_replicate", "tp"]._flatten("dp_replicate_tp").get_group(),
            ("dp_replicate", "dp_shard_cp"): loss,
            ("dp_replicate", "dp_shard_cp", "tp"): stage,
            ("dp_replicate", "ep_shard"): experts["dp_replicate", "ep_shard"]._flatten("edp").get_group(),
        },
        data_rank=data.get_local_rank("dp_replicate") * d.dp_shard + data.get_local_rank("dp_shard"),
    )
