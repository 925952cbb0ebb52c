"""What differs between devices, back-ends and PyTorch versions; nothing else in forge asks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch._functorch.config
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as collectives
from torch.distributed.fsdp import FSDPModule

# 2.13 renamed these two; 2.11 has the old names only. (x, axis, group) and (x, "sum", axis, group), both without waiting.
all_gather_single: Callable[..., Tensor] = (
    getattr(collectives, "all_gather_single", None) or collectives.all_gather_tensor
)
reduce_scatter_single: Callable[..., Tensor] = (
    getattr(collectives, "reduce_scatter_single", None) or collectives.reduce_scatter_tensor
)


def reduce_scatter_into(part: Tensor, whole: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Sum `whole` `[ranks * n]` over the ranks of `group` into `part` `[n]`, which may be a view of it; does not wait."""
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return scatter(part, whole, group=group, async_op=True)


def all_gather_into(whole: Tensor, part: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Every rank's `part` `[n]` into `whole` `[ranks * n]`, of which `part` may be a view; does not wait."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return gather(whole, part, group=group, async_op=True)


def side_stream(device: torch.device) -> torch.cuda.Stream | None:
    """A CUDA stream for what goes on beside the computation; None on the CPU, which has threads for that."""
    return torch.cuda.Stream(device) if device.type == "cuda" else None


@contextmanager
def communication_memory(
    device: torch.device, groups: Sequence[dist.ProcessGroup], *, symmetric: bool
) -> Iterator[None]:
    """What is allocated inside is known to NCCL as symmetric memory, at the same place on every rank of `groups`.

    Its kernels then need fewer multiprocessors. Needs CUDA, and is collective, if `symmetric`; else nothing happens.
    """
    if not (symmetric and groups):
        yield
        return
    backends: list[Any] = [group._get_backend(device) for group in groups]
    pool = torch.cuda.MemPool(backends[0].mem_allocator)
    _POOLS.append(pool)
    with torch.cuda.use_mem_pool(pool, device):
        yield
    for backend in backends:
        backend.register_mem_pool(pool, symm=True)


# Pools of symmetric memory; they end with the process.
_POOLS: list[Any] = []


def training_device(local_rank: int) -> torch.device:
    """The device that this process trains on: its own CUDA card if the machine has any, else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", local_rank)
    return torch.device("cpu")


def communication_backend(device: torch.device) -> str:
    """Process-group back-end for tensors on `device`; control messages always travel over gloo."""
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"


def all_gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Every rank's `x` `[n, ...]`, in rank order: `[ranks * n, ...]`. In backward the gradients are reduce-scattered."""
    # 2.13 renamed the function; 2.11 has the old name only.
    name = "all_gather_single_autograd"
    gather = getattr(collectives, name, None) or collectives.all_gather_tensor_autograd
    return gather(x.contiguous(), 0, group)


def all_to_all(
    x: Tensor,
    group: dist.ProcessGroup,
    receives: list[int] | None = None,
    sends: list[int] | None = None,
) -> Tensor:
    """x `[ranks, ...]`: `x[r]` goes to rank r, and the result's `[r]` came from there. Its own inverse, in backward too.

    With `sends` and `receives` of x `[sum(sends), ...]` the first sends[0] go to rank 0, ...; `[sum(receives), ...]` by rank.
    """
    return collectives.all_to_all_single_autograd(x.contiguous(), receives, sends, group)


def pass_on(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """`x` of the rank before this one, while this one's goes to the next, in a circle; has no gradient.

    Does not wait: the first use of the result does.
    """
    rank, ranks = group.rank(), group.size()
    sends, receives = [0] * ranks, [0] * ranks
    sends[(rank + 1) % ranks] = receives[(rank - 1) % ranks] = x.shape[0]
    return collectives.all_to_all_single(x.contiguous(), receives, sends, group)


def fsdp_parameter_groups(model: FSDPModule) -> list[Any]:
    """FSDP2's groups of parameters that are gathered together, of all units of `model`, a root that has been called."""
    states = model._get_fsdp_state()._state_ctx.all_states
    return [group for state in states for group in _groups_of(state)]


def _groups_of(state: Any) -> list[Any]:
    # 2.13 has several in a unit, 2.11 one at most.
    groups = getattr(state, "_fsdp_param_groups", None)
    return [group for group in ([state._fsdp_param_group] if groups is None else groups) if group is not None]


def end_fsdp_backward(model: FSDPModule) -> None:
    """Do what FSDP2 does at the end of a backward of `model`, a root, by the flags that have been set for it."""
    model._get_fsdp_state()._root_post_backward_final_callback()


@torch.enable_grad()
def backward_starts_at_functions() -> bool:
    """Whether a backward can start inside of a graph, at a torch.autograd.Function; PyTorch 2.11 cannot."""
    x = torch.ones((), requires_grad=True)
    node: Any = _Same.apply(x).grad_fn
    try:
        torch.autograd.grad([torch.autograd.graph.GradientEdge(node, 0)], [x], [torch.ones(())])
    except RuntimeError:
        return False
    return True


class _Same(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad


def weigh_meshes_as_nothing() -> bool:
    """Let the compiler weigh what a backward may keep where meshes of tensor parallelism are among it, as from 2.12 on.

    2.13 has to be told so. False under 2.12, which always refuses.
    """
    key = "unsafe_treat_script_objects_as_zero_size"
    if hasattr(torch._functorch.config, key):
        setattr(torch._functorch.config, key, True)
        return True
    return not torch.__version__.startswith("2.12.")


def raise_timeouts(seconds: float) -> None:
    """Let no process group that exists fail a collective which has waited for less than `seconds`.

    New groups take PyTorch's default, 10 minutes on NCCL, whatever the first one was made with.
    """
    wanted = timedelta(seconds=seconds)
    for group in list(dist.distributed_c10d._world.pg_map):
        for device in group._device_types:
            options = getattr(group._get_backend(device), "options", None)
            if options is not None and options._timeout < wanted:
                dist.distributed_c10d._set_pg_timeout(wanted, group)


def flight_record() -> bytes | None:
    """PyTorch's record of the latest collectives of this process, a pickle for `torchfrtrace`; None where it keeps none."""
    import torch._C._distributed_c10d as c10d

    # NCCL and gloo keep records of their own; where there is a card, what hangs is NCCL's.
    name = "_dump_nccl_trace" if torch.cuda.is_initialized() else "_dump_fr_trace"
    dump = getattr(c10d, name, None)
    return None if dump is None else dump()


def meeting_store() -> dist.Store:
    """A connection of its own to the store through which the ranks met, for use by another thread."""
    store: Any = dist.distributed_c10d._get_default_store()
    return store.clone()
