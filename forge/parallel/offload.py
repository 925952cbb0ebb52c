"""Activation offload: tensors that autograd saves in a block wait for backward in host memory.

After a block's forward, a side stream copies the storages saved by the block to pinned buffers. The next block runs
meanwhile, and frees the storages at its end. Backward fetches a block's storages while the block after it computes:

    forward    compute 0   compute 1   compute 2          backward   compute 2   compute 1   compute 0
    copies                 0 out       1 out              copies     1 in        0 in

The last block's storages are still on the device when its backward begins, so they are not fetched. The host never waits:
streams wait for events. The compute stream owns all memory, so the allocator frees it as without offload.

Each storage is copied once, although autograd may save several views of it, e.g. of queries and keys, and consecutive
blocks may save the same storage, e.g. a mask. Parameters (including those gathered by FSDP2), tensor subclasses other
than DTensor, and storages smaller than LEAST stay on the device.
"""

from __future__ import annotations

import functools
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor

from forge.runtime import compat

# The smallest storage worth a copy on a GPU, in bytes. On a CPU every storage is copied.
LEAST = 1 << 20
PLAIN = (Tensor, FakeTensor)


class HostMemory:
    """Host buffers of offloaded storages, and the stream of all copies. On a CPU: no stream, unpinned buffers.

    Buffers are reused. A buffer's size is a power of two, because the number of rows of an expert changes in every step;
    PyTorch rounds the sizes of pinned buffers likewise. A buffer is free as soon as its tensor is no longer needed. A copy
    from it may still be running: the next copy waits, because one stream runs all copies in order. PyTorch's cache of
    pinned memory does not know this order: it would allocate more buffers while the host is ahead of the device.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.least = LEAST if device.type == "cuda" else 0
        self._stream = compat.side_stream(device)
        self._free: dict[int, list[Any]] = defaultdict(list)

    def take(self, size: int) -> Any:
        """Return a buffer uint8 of at least `size` bytes."""
        rounded = 1 << (size - 1).bit_length()
        free = self._free[rounded]
        return free.pop() if free else self.allocate(rounded)

    def allocate(self, size: int) -> Any:
        """Allocate a buffer uint8 `[size]`."""
        return torch.empty(size, dtype=torch.uint8, pin_memory=self._stream is not None)

    def give_back(self, buffer: Any) -> None:
        """Let a later `take` return `buffer`."""
        self._free[buffer.nbytes].append(buffer)

    def forget(self) -> None:
        """Release all free buffers, because later storages have other sizes."""
        self._free.clear()
        compat.release_pinned_memory()

    def copy(self, pairs: Iterable[tuple[Any, Any]]) -> torch.cuda.Event | None:
        """Copy the second tensor of each pair into the first, after the work issued so far. Return an event for `wait`."""
        if self._stream is None:
            for target, source in pairs:
                target.copy_(source)
            return None
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
        return self._stream.record_event()

    def wait(self, event: torch.cuda.Event | None) -> None:
        """Make the compute stream wait for copies. event: from `copy`; None: nothing to wait for."""
        if event is not None:
            torch.cuda.current_stream(self.device).wait_event(event)


class SavedStorage:
    """A storage saved for backward: uint8 `[size]` on the device, in a host buffer, or both.

    copied: event of the latest copy.
    """

    def __init__(self, memory: HostMemory, on_device: Tensor):
        self._memory = memory
        self.size = on_device.numel()
        self.on_device: Tensor | None = on_device
        self.on_host: Any = None
        self._buffer: Any = None  # contains on_host
        self.copied: torch.cuda.Event | None = None

    def reserve(self) -> None:
        """Take a host buffer for the storage."""
        self._buffer = self._memory.take(self.size)
        self.on_host = self._buffer[: self.size]

    def wait(self) -> None:
        """Make the compute stream wait for the latest copy."""
        self._memory.wait(self.copied)
        self.copied = None

    def __del__(self) -> None:
        self.wait()  # the compute stream may reuse the memory on the device at once
        if self._buffer is not None:
            self._memory.give_back(self._buffer)


class View(NamedTuple):
    """The object that autograd keeps in place of a saved tensor.

    place: size, stride and offset of the tensor in the storage.
    """

    block: SavedBlock
    storage: SavedStorage
    dtype: torch.dtype
    place: tuple[Any, ...]


class Distributed(NamedTuple):
    """The object that autograd keeps in place of a DTensor."""

    local: View
    options: dict[str, Any]


class SavedBlock:
    """The storages saved by one forward of a block. Only the block's Views keep this object and its storages alive.

    before: the SavedBlock of the previous block. is_weight: takes a storage's key and returns whether a parameter uses
    this storage.
    """

    def __init__(self, memory: HostMemory, before: SavedBlock | None, is_weight: Callable[[int], bool]):
        self._memory, self._is_weight = memory, is_weight
        self._before = weakref.ref(before) if before is not None else lambda: None
        # Until `store`, the previous block's storages stay on the device.
        self._of_before = dict(before.storages) if before is not None else {}
        self.storages: weakref.WeakValueDictionary[int, SavedStorage] = weakref.WeakValueDictionary()

    def pack(self, tensor: Tensor) -> Tensor | View | Distributed:
        """Return the object that autograd keeps in place of `tensor`: `tensor` itself if it stays on the device."""
        if isinstance(tensor, AsyncCollectiveTensor):
            # The operator that saves the result of a collective waits for it too.
            tensor = tensor.trigger_wait()
        if isinstance(tensor, DTensor):
            kept = self.pack(tensor._local_tensor)
            layout = {"device_mesh": tensor.device_mesh, "placements": tensor.placements}
            whole = {"shape": tensor.shape, "stride": tensor.stride()}
            return Distributed(kept, layout | whole) if isinstance(kept, View) else tensor
        if type(tensor) not in PLAIN or tensor.device != self._memory.device:
            return tensor
        own = tensor.untyped_storage()
        key, size = own._cdata, own.nbytes()
        storage = self.storages.get(key) or self._of_before.get(key)
        if storage is None:
            if size < max(self._memory.least, 1) or self._is_weight(key):
                return tensor
            flat = tensor.detach().as_strided((size // tensor.itemsize,), (1,), 0)
            storage = SavedStorage(self._memory, flat.view(torch.uint8))
        self.storages[key] = storage
        return View(self, storage, tensor.dtype, (tensor.shape, tensor.stride(), tensor.storage_offset()))

    def store(self) -> None:
        """Start copies to the host, and free the previous block's storages on the device."""
        new = [storage for storage in self.storages.values() if storage.on_host is None]
        for storage in new:
            storage.reserve()
        self._copy(new, lambda storage: (storage.on_host, storage.on_device))
        for key in self._of_before.keys() - self.storages.keys():
            self._of_before[key].wait()
            self._of_before[key].on_device = None
        self._of_before = {}

    def fetch(self) -> None:
        """Start copies to the device, for storages that are only on the host."""
        missing = [storage for storage in self.storages.values() if storage.on_device is None]
        for storage in missing:
            storage.on_device = torch.empty(storage.size, dtype=torch.uint8, device=self._memory.device)
        self._copy(missing, lambda storage: (storage.on_device, storage.on_host))

    def fetch_before(self) -> None:
        """Fetch the previous block's storages. Later calls do nothing."""
        before = self._before()
        self._before = lambda: None
        if before is not None:
            before.fetch()

    def _copy(self, storages: list[SavedStorage], pair: Callable[[SavedStorage], tuple[Any, Any]]) -> None:
        if storages:
            copied = self._memory.copy(map(pair, storages))
            for storage in storages:
                storage.copied = copied


def unpack(kept: Tensor | View | Distributed) -> Tensor:
    """Return the tensor that was passed to `SavedBlock.pack`.

    The first call in a block fetches the previous block's storages.
    """
    if isinstance(kept, Tensor):
        return kept
    if isinstance(kept, Distributed):
        return DTensor.from_local(unpack(kept.local), run_check=False, **kept.options)
    if kept.storage.on_device is None:
        kept.block.fetch()
    kept.storage.wait()
    kept.block.fetch_before()
    assert kept.storage.on_device is not None
    return kept.storage.on_device.view(kept.dtype).as_strided(*kept.place)


class Offload:
    """Offloads the tensors saved by wrapped forwards. Backward fetches blocks in the reverse order of forward calls."""

    def __init__(self) -> None:
        self.memory: HostMemory | None = None
        self._latest: SavedBlock | None = None

    def forget(self) -> None:
        """Release the free host buffers. Call between steps, before activations of other sizes are offloaded."""
        if self.memory is not None:
            self.memory.forget()

    def wrap(self, module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return `forward`, a forward of `module`, wrapped to offload the tensors that autograd saves in it."""

        @functools.wraps(forward)
        def offloaded(x: Tensor, *args: Any) -> Any:
            self.memory = self.memory or HostMemory(x.device)
            saved = SavedBlock(self.memory, self._latest, functools.partial(is_weight, module))
            with torch.autograd.graph.saved_tensors_hooks(saved.pack, unpack):
                output = forward(x, *args)
            saved.store()
            self._latest = saved
            return output

        offloaded.offload = self  # type: ignore[attr-defined]
        return offloaded


def offloads(model: nn.Module) -> set[Offload]:
    """Return the `Offload` objects of all wrapped forwards in `model`."""
    return {m.forward.offload for m in model.modules() if hasattr(m.forward, "offload")}


def is_weight(module: nn.Module, key: int) -> bool:
    """Return whether `key` is the storage of a parameter of `module`.

    The answer holds only at this moment, because FSDP2 replaces parameters during a forward.
    """
    return any(key == own for parameter in module.parameters() for own in _storages(parameter))


def _storages(tensor: Tensor) -> Iterator[int]:
    """Yield the keys of a tensor's storages. A DTensor has the storage of its local tensor."""
    if hasattr(tensor, "__tensor_flatten__"):
        for name in tensor.__tensor_flatten__()[0]:
            yield from _storages(getattr(tensor, name))
    elif type(tensor) in (*PLAIN, nn.Parameter):
        yield tensor.untyped_storage()._cdata
