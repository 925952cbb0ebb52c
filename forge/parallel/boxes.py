"""Which box of a global tensor a rank holds: arithmetic on DTensors' placements, for this rank or any other."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn
from torch.distributed.tensor import DTensor

from forge.shard import Box


def own_box(parameter: DTensor, at: Mapping[str, int] | None = None) -> Box:
    """Return the one box of the global tensor that this rank holds, or the rank `at` these places, by mesh axis.

    FSDP2 splits what tensor parallelism has split before, although its axis comes first in the mesh: where both split
    the same dimension (`_StridedShard`), outer mesh axes divide what inner ones leave. So each axis divides the box,
    the last axis first, into equal pieces, rounded up, as torch.chunk does.
    """
    offsets, sizes = [0] * parameter.ndim, list(parameter.shape)
    mesh = parameter.device_mesh
    for axis in reversed(range(mesh.ndim)):
        placement = parameter.placements[axis]
        if placement.is_replicate():
            continue
        dim: int = placement.dim  # type: ignore[attr-defined]
        piece = -(-sizes[dim] // mesh.size(axis))
        place = mesh.get_local_rank(axis) if at is None else at[(mesh.mesh_dim_names or ())[axis]]
        start = min(piece * place, sizes[dim])
        offsets[dim] += start
        sizes[dim] = min(piece, sizes[dim] - start)
    local = parameter.to_local()
    assert at is not None or tuple(sizes) == tuple(local.shape) or not local.numel()
    return Box(tuple(offsets), tuple(sizes))


def local_box(parameter: nn.Parameter, at: Mapping[str, int] | None = None) -> Box:
    """Return the box of the parameter that tensor or expert parallelism gives to a rank; `at` as for `own_box`."""
    if isinstance(parameter, DTensor):
        return own_box(parameter, at)
    return Box((0,) * parameter.ndim, tuple(parameter.shape))
