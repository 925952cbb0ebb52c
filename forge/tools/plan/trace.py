"""`Trace`: record live memory, collectives and operators of a step.

A storage is live from its allocation by an operator until its last reference is gone. It counts with its current size,
because FSDP frees and restores gathered parameters by resizing their storage. Memory inside a kernel is not recorded.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type
from torch.utils._pytree import tree_iter

from forge.model import Transformer
from forge.parallel.float8.gathering import GatheredWeight, ShardedWeight
from forge.tools.plan.collectives import Collective, collective_of
from forge.tools.plan.work import Work, work_of

# Kinds of memory, in this order: allocated before the first step; gathered parameters and buffers of collectives;
# results of reduce-scatters; attention masks; logits and loss; all other allocations inside a step.
KINDS = ("state", "gathered", "gradients", "masks", "loss", "activations")


GROUPED_PRODUCT = torch.ops.aten._grouped_mm.default
WRAPPERS = (ShardedWeight, GatheredWeight)
DEVICE = torch.ops.prim.device.default
WAIT = torch.ops._c10d_functional.wait_tensor.default


@dataclass(frozen=True)
class Moment:
    """A point of a step. phase: forward, backward, or a period outside of both. part: the submodule, e.g. a layer."""

    phase: str = "building"
    part: str = ""
    microbatch: int = 0

    def __str__(self) -> str:
        if not self.part:
            return self.phase
        return f"{self.phase} of {self.part}, microbatch {self.microbatch + 1}"


@dataclass
class Peak:
    """The largest live memory. size: bytes. moment: when. kinds: kind of memory -> bytes."""

    size: int = 0
    moment: Moment = Moment()
    kinds: dict[str, int] = field(default_factory=dict)

    def with_more(self, kind: str, size: int) -> Peak:
        """Return a copy of the peak with `size` more bytes of kind `kind`."""
        return Peak(self.size + size, self.moment, self.kinds | {kind: self.kinds.get(kind, 0) + size})


class Trace(TorchDispatchMode):
    """A dispatch mode that records memory, collectives and operators of a step. Enter it after `FakeTensorMode`.

    live: kind of memory -> bytes live at present. calls: (moment, collective), in the order of the calls.
    """

    def __init__(self) -> None:
        super().__init__()
        self.moment = Moment()
        self.live: Counter[str] = Counter()
        self.peaks: dict[tuple[str, str], Peak] = {}
        """(phase, submodule) -> its peak, since `begin`."""
        self.calls: list[tuple[Moment, Collective]] = []
        self.copied: Counter[Moment] = Counter()
        """moment -> bytes copied to host memory and back by activation offload."""
        self.work: Counter[tuple[Moment, Work]] = Counter()
        """(moment, work of an operator) -> number of calls. Views and allocations are left out."""
        self.kept = 0
        """Bytes that the forward of a microbatch through the first stage keeps for backward. Minimum over microbatches.

        With activation offload, the device keeps only the last block, and only of the latest microbatch.
        """
        self._forwards: Counter[Transformer] = Counter()
        self.before = 0
        """Live bytes at the start of the step."""
        self._total = self._activations_before = 0
        self._kind_of: dict[int, str] = {}
        self._size_of: dict[int, int] = {}
        self._resize: Any = None
        self._in_flight: dict[int, tuple[int, Counter[Work]]] = {}
        """Storage of an unfinished collective's result -> (index of the collective in `calls`, operators since the call)."""

    def begin(self) -> None:
        """Begin a step: clear the recorded peaks, collectives and operators."""
        self.moment, self.calls, self.kept = Moment("begin"), [], 0
        self.work.clear()
        self.copied.clear()
        self._in_flight.clear()
        self._forwards.clear()
        self.peaks.clear()
        self.before = self._total
        self._note_peak()

    @property
    def peak(self) -> Peak:
        """The largest of all peaks of the step."""
        return max(self.peaks.values(), key=lambda peak: peak.size)

    def watch(self, parts: Sequence[Transformer]) -> None:
        """Add hooks to `parts`, one model per stage. The hooks set `moment` to the current phase and submodule."""
        parts[0].register_forward_hook(self._end_of_first_forward)
        for part in parts:
            part.register_forward_pre_hook(self._new_microbatch, prepend=True)
            ends = {"embedding": part.embedding, "norm": part.norm, "head": part.head}
            layers = {f"layers.{name}": layer for name, layer in part.layers.items()}
            for name, module in {**ends, **layers}.items():
                if module is not None:
                    self._watch_module(name, module)

    def _new_microbatch(self, part: Any, _inputs: Any) -> None:
        self.moment = Moment("forward", "masks", self._forwards[part])
        self._forwards[part] += 1
        self._activations_before = self._activations()

    def _end_of_first_forward(self, *_: Any) -> None:
        kept = self._activations() - self._activations_before
        self.kept = min(self.kept or kept, kept)

    def _activations(self) -> int:
        return sum(self.live[kind] for kind in ("masks", "loss", "activations"))

    def _watch_module(self, name: str, module: nn.Module) -> None:
        def enter(_module: nn.Module, _inputs: Any) -> None:
            self.moment = Moment("forward", name, self.moment.microbatch)

        def leave(_module: nn.Module, _inputs: Any, output: Any) -> None:
            backward = Moment("backward", name, self.moment.microbatch)
            if isinstance(output, Tensor) and output.requires_grad:
                output.register_hook(lambda _: setattr(self, "moment", backward))
            if name == "embedding":
                self.moment = Moment("forward", "masks", self.moment.microbatch)

        module.register_forward_pre_hook(enter, prepend=True)
        module.register_forward_hook(leave, prepend=True)

    def __enter__(self) -> Any:
        self._resize = torch.UntypedStorage.resize_
        trace, resize = self, self._resize

        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            trace._resized(storage)
            return result

        torch.UntypedStorage.resize_ = resized  # type: ignore[method-assign, assignment]
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(is_traceable_wrapper_subclass_type(kind) or kind in WRAPPERS for kind in types):
            return NotImplemented  # the subclass unwraps itself, and calls this mode again with plain tensors
        if func is DEVICE and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # a shortcut past FakeTensorMode for half of all calls
        found = collective_of(func, args, kwargs)
        if found is not None:
            self.calls.append((self.moment, found))
            if func.namespace == "c10d":
                self._take_part(found.kind, args)
        compute = _grouped_product if func is GROUPED_PRODUCT and isinstance(args[0], FakeTensor) else func
        output = compute(*args, **(kwargs or {}))
        if func is WAIT:
            self._arrived(args[0])
        elif found is None:
            done = work_of(func, args, output)
            if done is not None:
                self.work[self.moment, done] += 1
                for _, meanwhile in self._in_flight.values():
                    meanwhile[done] += 1
        elif func.namespace == "_c10d_functional" and isinstance(output, Tensor):
            self._in_flight[output.untyped_storage()._cdata] = len(self.calls) - 1, Counter()
        for tensor in tree_iter(output):
            if isinstance(tensor, Tensor):
                self._made(tensor.untyped_storage(), self._kind())
        return output

    def _arrived(self, result: Tensor) -> None:
        """End the collective with this result: store the operators called since its call in `Collective.meanwhile`."""
        place, meanwhile = self._in_flight.pop(result.untyped_storage()._cdata, (None, Counter()))
        if place is not None and meanwhile:
            moment, call = self.calls[place]
            self.calls[place] = moment, replace(call, meanwhile=tuple(meanwhile.items()))

    def _kind(self) -> str:
        moment = self.moment
        if moment.phase == "building":
            return "state"
        if moment.part == "masks":
            return "masks"
        return "loss" if moment.part in ("head", "norm") else "activations"

    def _take_part(self, kind: str, args: Any) -> None:
        """Count the buffers of a collective as `gathered` memory. The result of a reduce-scatter counts as `gradients`."""
        tensors = [leaf for leaf in tree_iter(args) if isinstance(leaf, Tensor)]
        for number, tensor in enumerate(tensors):
            summed = kind == "reduce_scatter" and number == 0
            self._count_as("gradients" if summed else "gathered", tensor.untyped_storage()._cdata)

    def _made(self, storage: torch.UntypedStorage, kind: str) -> None:
        key = storage._cdata
        if key in self._size_of:
            return
        self._kind_of[key], self._size_of[key] = kind, 0
        weakref.finalize(storage, self._freed, key)
        self._set_size(key, storage.nbytes())

    def _resized(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        self._made(storage, "gathered")
        self._count_as("gathered", key)
        self._set_size(key, storage.nbytes())

    def _freed(self, key: int) -> None:
        self._set_size(key, 0)
        del self._kind_of[key], self._size_of[key]

    def _count_as(self, kind: str, key: int) -> None:
        old = self._kind_of.get(key)
        # A collective's buffer allocated before the step stays state, e.g. a bucket of gradients or a shard.
        if old is not None and old not in ("state", kind):
            size = self._size_of[key]
            self.live[old] -= size
            self.live[kind] += size
            self._kind_of[key] = kind

    def _set_size(self, key: int, size: int) -> None:
        grown = size - self._size_of[key]
        self._size_of[key] = size
        self.live[self._kind_of[key]] += grown
        self._total += grown
        if grown > 0:
            self._note_peak()

    def _note_peak(self) -> None:
        place = self.moment.phase, self.moment.part
        if place not in self.peaks or self._total > self.peaks[place].size:
            self.peaks[place] = Peak(self._total, self.moment, dict(self.live))


def _grouped_product(a: Tensor, b: Tensor, offs: Tensor, *_: Any, **__: Any) -> Tensor:
    """Return the fake result of a grouped product.

    a `[n, in]`, b `[groups, in, out]` -> `[n, out]`. a `[out, n]`, b `[n, in]`, in groups -> `[groups, out, in]`.
    Replaces PyTorch's own function for fake tensors. That function refuses inputs that the kernels accept: dtypes other
    than bfloat16 (PyTorch 2.13), rows that are not a multiple of 16 bytes, and the stride 0 of `PlainProducts`.
    """
    groups = [offs.numel()] if b.ndim == 2 else []
    return a.new_empty([*groups, a.shape[0], b.shape[-1]])
