"""All code that depends on the device, the communication backend or the version of PyTorch."""

from __future__ import annotations

import functools
import inspect
import platform
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
import torch._functorch.config
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _functional_collectives as collectives
from torch.distributed.fsdp import FSDPModule

from forge.runtime.errors import UserError

# PyTorch 2.13 renamed these two functions; 2.11 has only the old names. Called as (x, axis, group) and (x, "sum", axis,
# group). Neither function waits for the result.
all_gather_single: Callable[..., Tensor] = (
    getattr(collectives, "all_gather_single", None) or collectives.all_gather_tensor
)
reduce_scatter_single: Callable[..., Tensor] = (
    getattr(collectives, "reduce_scatter_single", None) or collectives.reduce_scatter_tensor
)

# Called as (output `[n]`, input `[ranks * n]`, op=..., group=...). The name depends on the version, too.
reduce_scatter: Callable[..., Any] = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)


def reduce_scatter_into(part: Tensor, whole: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Start a reduce-scatter of `whole` `[ranks * n]` into `part` `[n]`, which may be a view of `whole`. Collective."""
    return reduce_scatter(part, whole, group=group, async_op=True)


def all_gather_into(whole: Tensor, part: Tensor, group: dist.ProcessGroup | None = None) -> dist.Work:
    """Start an all-gather of `part` `[n]` into `whole` `[ranks * n]`; `part` may be a view of `whole`.

    Collective. group None: all ranks.
    """
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return gather(whole, part, group=group, async_op=True)


def side_stream(device: torch.device) -> torch.cuda.Stream | None:
    """Return a CUDA stream for work that overlaps computation; None on the CPU, where threads do such work."""
    return torch.cuda.Stream(device) if device.type == "cuda" else None


@contextmanager
def communication_memory(
    device: torch.device, groups: Sequence[dist.ProcessGroup], *, symmetric: bool
) -> Iterator[None]:
    """Allocate the CUDA tensors of the body in NCCL symmetric memory. Every rank of `groups` registers this memory.

    NCCL's kernels then need fewer multiprocessors. With `symmetric`, the function needs CUDA and is collective. Without
    `symmetric`, it does nothing. Raises UserError if NCCL cannot allocate such memory on the GPU.
    """
    if not (symmetric and groups):
        yield
        return
    backends: list[Any] = [group._get_backend(device) for group in groups]
    if not backends[0].supports_tensor_alloc(device):
        raise UserError(
            "parallel.symmetric_memory = true needs GPUs with multicast (NVLink and NVSwitch), which "
            f"{torch.cuda.get_device_name(device)} on this machine does not have; use false"
        )
    pool = torch.cuda.MemPool(backends[0].mem_allocator)
    _POOLS.append(pool)
    with torch.cuda.use_mem_pool(pool, device):
        yield
    for backend in backends:
        backend.register_mem_pool(pool, symm=True)


# Pools of symmetric memory, kept until the process ends.
_POOLS: list[Any] = []


def training_device(local_rank: int) -> torch.device:
    """Return this process's training device: GPU `local_rank` if CUDA is available, else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", local_rank)
    return torch.device("cpu")


def communication_backend(device: torch.device) -> str:
    """Return the process-group backend for tensors on `device`. It always includes gloo, for objects."""
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"


def split_group(world: dist.ProcessGroup, sets: list[list[int]], backend: str | None) -> dist.ProcessGroup:
    """Split `world` into groups with the ranks in `sets`, all at once. Return this rank's group. Collective.

    `world` must have an NCCL communicator. backend: the part of `world`'s backend for the groups, e.g. "cuda:nccl"; None:
    the whole backend. PyTorch 2.11 always uses the whole backend.
    """
    options: dict[str, Any] = {}
    if backend is not None and "backend" in inspect.signature(dist.split_group).parameters:
        options["backend"] = backend
    group = dist.split_group(world, sets, **options)
    assert isinstance(group, dist.ProcessGroup)  # `sets` contain every rank
    return group


def all_gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All-gather `x` `[n, ...]` in rank order: `[ranks * n, ...]`. Collective. Backward reduce-scatters the gradient."""
    # PyTorch 2.13 renamed the function; 2.11 has only the old name.
    name = "all_gather_single_autograd"
    gather = getattr(collectives, name, None) or collectives.all_gather_tensor_autograd
    return gather(x.contiguous(), 0, group)


def all_to_all(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All-to-all: send `x[r]` of x `[ranks, ...]` to rank r; `result[r]` is from rank r.

    Collective. Backward is another all-to-all.
    """
    return collectives.all_to_all_single_autograd(x.contiguous(), None, None, group)


def pass_on(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Send `x` to the next rank of the ring and return the `x` of the previous rank. Collective. Not differentiable.

    Does not wait: the first use of the result waits.
    """
    rank, ranks = group.rank(), group.size()
    sends, receives = [0] * ranks, [0] * ranks
    sends[(rank + 1) % ranks] = receives[(rank - 1) % ranks] = x.shape[0]
    return collectives.all_to_all_single(x.contiguous(), receives, sends, group)


def start_all_to_all(
    x: Tensor, group: dist.ProcessGroup, receives: list[int] | None = None, sends: list[int] | None = None
) -> Callable[[], Tensor]:
    """Start an `all_to_all`. Return a function that waits and returns the result. Not differentiable.

    Calls the operator directly: under FakeTensorMode, PyTorch's function would wait at once, and the planner (--plan)
    would see no overlap.
    """
    equal = [x.shape[0] // group.size()] * group.size()
    start = torch.ops._c10d_functional.all_to_all_single
    coming = start(x.contiguous(), receives or equal, sends or equal, group.group_name)
    return functools.partial(collectives.wait_tensor, coming)


def arrived(x: Tensor) -> Tensor:
    """Wait until `x` can be used, and return it. Not differentiable.

    x: a plain tensor or the result of a functional collective.
    """
    return x.wait() if isinstance(x, collectives.AsyncCollectiveTensor) else x


def fsdp_parameter_groups(model: FSDPModule) -> list[Any]:
    """Return the parameter groups of all FSDP2 units of the root `model`. Call after its first forward."""
    return [group for state in model._get_fsdp_state()._state_ctx.all_states for group in _groups(state)]


def fsdp_parameters(unit: FSDPModule) -> list[nn.Parameter]:
    """Return the sharded parameters of the FSDP2 unit `unit`, without those of units inside it."""
    return [member.sharded_param for group in _groups(unit._get_fsdp_state()) for member in group.fsdp_params]


def _groups(state: Any) -> list[Any]:
    # In PyTorch 2.13 a unit may have several groups, in 2.11 at most one.
    groups = getattr(state, "_fsdp_param_groups", None)
    return [group for group in ([state._fsdp_param_group] if groups is None else groups) if group is not None]


def finish_gathers(unit: FSDPModule) -> None:
    """Wait for the prefetched parameters of an FSDP2 unit that no forward has used, so that `reshard` frees them.

    `reshard` alone would leave the gather pending, and the next forward would use its old values.
    """
    for group in _groups(unit._get_fsdp_state()):
        group.wait_for_unshard()


def end_fsdp_backward(model: FSDPModule) -> None:
    """Run FSDP2's end-of-backward work for the root `model`, with the flags now set on `model`."""
    model._get_fsdp_state()._root_post_backward_final_callback()


@torch.enable_grad()
def backward_starts_at_functions() -> bool:
    """Return whether a backward can start at a torch.autograd.Function inside a graph. PyTorch 2.11 cannot do this."""
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


def release_pinned_memory() -> None:
    """Return PyTorch's unused pinned host memory to the system, if this version of PyTorch can."""
    release = getattr(torch._C, "_host_emptyCache", None)
    if release is not None and torch.cuda.is_available():
        release()


def keep_buffers_of_compiled_backward() -> None:
    """Make retain_graph=True work for backwards through compiled functions, e.g. flex_attention.

    Call before the functions are compiled.
    """
    import torch._functorch.config

    torch._functorch.config.donated_buffer = False


def share_memory(group: dist.ProcessGroup) -> None:
    """Give the ranks of `group` access to each other's symmetric memory, for asynchronous tensor parallelism.

    Collective. PyTorch 2.13 and 2.14 deprecate this call. Yet their compilers overlap matrix products with collectives
    only in groups registered by this call.
    """
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        enable_symm_mem_for_group(group.group_name)


def weigh_meshes_as_nothing() -> bool:
    """Make the compiler's memory budget count the device meshes of tensor parallelism as zero bytes.

    Since PyTorch 2.12, meshes are among the values saved for backward. PyTorch 2.13 has a setting for their size. Return
    False under PyTorch 2.12, which lacks this setting; otherwise True.
    """
    key = "unsafe_treat_script_objects_as_zero_size"
    if hasattr(torch._functorch.config, key):
        setattr(torch._functorch.config, key, True)
        return True
    return not torch.__version__.startswith("2.12.")


def raise_timeouts(seconds: float) -> None:
    """Raise the collective timeout of every existing process group to at least `seconds`.

    Needed because new groups have PyTorch's default timeout (10 minutes for NCCL), not the first group's.
    """
    wanted = timedelta(seconds=seconds)
    # PyTorch 2.14 has a public name for this function.
    set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
    for group in list(dist.distributed_c10d._world.pg_map):
        for device in group._device_types:
            options = getattr(group._get_backend(device), "options", None)
            if options is not None and options._timeout < wanted:
                set_timeout(wanted, group)


def flight_record() -> bytes | None:
    """Return PyTorch's flight record of this process's latest collectives, a pickle for `torchfrtrace`.

    None if this build of PyTorch has no flight recorder.
    """
    import torch._C._distributed_c10d as c10d

    # NCCL and gloo keep separate records. With CUDA, NCCL's collectives are the ones that hang.
    name = "_dump_nccl_trace" if torch.cuda.is_initialized() else "_dump_fr_trace"
    dump = getattr(c10d, name, None)
    return None if dump is None else dump()


def versions() -> dict[str, str]:
    """Return the versions of Python and of the run's libraries."""
    found = {"python": platform.python_version(), "torch": torch.__version__}
    for package in ("forge", "numpy"):
        with suppress(PackageNotFoundError):  # not installed: run from a source tree
            found[package] = version(package)
    return found


def forget_meshes() -> None:
    """Clear DTensor's sharding cache, which holds meshes.

    Meshes of the same ranks and axis names are equal. After new process groups are created, the cache could otherwise
    return an equal mesh with the earlier groups.
    """
    from torch.distributed.tensor import debug

    clear = getattr(debug, "_clear_sharding_prop_cache", None)
    if clear is not None:
        clear()


def meeting_store() -> dist.Store:
    """Return a new connection to the rendezvous store, for use by another thread."""
    store: Any = dist.distributed_c10d._get_default_store()
    return store.clone()
