"""`Buffered`: the data-parallel engines on contiguous buffers.

    ddp     every rank optimises everything          one all-reduce per bucket and step
    zero1   each rank optimises its part             one reduce-scatter and one all-gather per bucket and step
    zero2   and keeps gradients of its part only     one reduce-scatter per bucket and microbatch, one all-gather per step

zero2 is zero1 for parameters that a rank shares with no other: all of them, or experts that no two ranks have.

The counterpart of Megatron-Core's DistributedDataParallel with its distributed optimizer (Rajbhandari et al., "ZeRO:
Memory Optimizations Toward Training Trillion Parameter Models", 2020, stages 1 and 2). With dp_replicate > 1 gradients
are summed over the copies as well, or shared over them too (parallel.shard_optimizer_over = "dp").
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from forge import compat
from forge.errors import UserError
from forge.model import Transformer
from forge.parallel.buffered.buffer import Buffer
from forge.parallel.buffered.check import GradientCheck
from forge.parallel.buffered.communication import Groups
from forge.parallel.buffered.fingerprints import Fingerprints
from forge.parallel.buffered.gathering import Gathering
from forge.parallel.buffered.plan import plan_buffers
from forge.parallel.buffered.pool import Pool
from forge.parallel.buffered.reduction import Entry, InPlace, Reduction, Scattered
from forge.parallel.expert import parameter_kinds
from forge.parallel.layout import Layout
from forge.shard import Shard


class Buffered:
    """ddp, zero1 or zero2 on `model`, as `parallel.data_parallel` says. A `DataParallel`; its methods are collective."""

    shards: list[Shard]

    def __init__(self, model: Transformer, layout: Layout):
        self._model, self._layout = model, layout
        self._plans = plan_buffers(model, layout)

    def allocate(self, device: torch.device) -> None:
        """Memory for the buffers, into which the model's parameters now point; and the hooks."""
        model, parallel = self._model, self._layout.parallel
        names = {name: parameter for name, parameter in model.named_parameters()}
        kinds = {name: parameter_kinds(model).get(parameter, "dense") for name, parameter in names.items()}
        if parallel.symmetric_memory and device.type != "cuda":
            raise UserError("parallel.symmetric_memory = true needs CUDA cards; use false")

        def allocating(groups: Groups) -> Any:
            return compat.communication_memory(device, groups, symmetric=parallel.symmetric_memory)

        self.buffers = [
            Buffer(
                plan,
                names,
                device,
                # With nobody to share with they would be copied for nothing.
                sharded_gradients=parallel.data_parallel == "zero2" and bool(plan.axes.scatter),
                allocating=allocating,
            )
            for plan in self._plans
        ]
        placed = {held.name: held.parameter for b in self.buffers for m in b.buckets for held in m.held}
        _replace_parameters(model, {names[name]: parameter for name, parameter in placed.items()})
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, torch.empty_like(buffer, device=device))
        _forbid_moving(model)

        self._fingerprints = Fingerprints(self.buffers)
        order = {name: place for place, name in enumerate(names)}
        shards = {s.name: s for b in self.buffers for s in b.shards(kinds, self._layout.meshes)}
        self.shards = [shards[name] for name in names]
        # Backward is done with a bucket when it is done with the parameter that forward needs first.
        entries: list[Entry] = [
            Scattered(buffer, memory) if buffer.sharded_gradients else InPlace(buffer, memory)
            for buffer in self.buffers
            for memory in buffer.buckets
        ]
        entries.sort(key=lambda entry: -min(order[held.name] for held in entry.memory.held))
        stream = compat.side_stream(device)
        self._reduction = self._make_reduction(entries, device, stream)
        self._gathering = Gathering(
            [(entry.memory, entry.buffer.plan.axes) for entry in reversed(entries)],
            _needs(model, {parameter: name for name, parameter in placed.items()}),
            prefetch=parallel.prefetch,
            overlap=parallel.overlap_parameters,
            stream=stream,
        )

    def _make_reduction(
        self, entries: list[Entry], device: torch.device, stream: torch.cuda.Stream | None
    ) -> Reduction:
        parallel = self._layout.parallel
        self.pool = Pool([entry.borrowed_nbytes for entry in entries if entry.borrowed_nbytes], device)
        check = None if parallel.check_gradients == "none" else GradientCheck(parallel.check_gradients)
        return Reduction(entries, self.pool, overlap=parallel.overlap_gradients, stream=stream, check=check)

    def begin_microbatch(self, *, last: bool) -> None:
        """Raises RuntimeError if gradients of an earlier step have not been zeroed."""
        self._reduction.begin(last=last)

    def take_weight_gradients(self, *, last: bool) -> None:
        """They are where backward would have put them, and are sent with what no hook reports."""

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Forward and backward passes inside add up gradients (zero2 reduces each); the one after is the step's last."""
        hook = self._model.register_forward_pre_hook(lambda *_: self.begin_microbatch(last=False))
        try:
            yield
        finally:
            hook.remove()
        self.begin_microbatch(last=True)

    def start_gradient_sync(self) -> None:
        """Launch the reduction of every bucket that backward has not launched."""
        self._reduction.launch_rest()

    def finish_gradient_sync(self) -> None:
        self._reduction.finish()
        if self._layout.check_replicas:
            self._fingerprints.add()

    def scale_gradients(self, factor: float | Tensor) -> None:
        """Multiply what has been added up so far, on this rank."""
        for buffer in self.buffers:
            buffer.gradients.mul_(factor)

    def zero_gradients(self) -> None:
        for buffer in self.buffers:
            buffer.gradients.zero_()
        self._reduction.forget()

    def after_update(self) -> None:
        self._gathering.follow()

    def start_parameter_sync(self) -> None:
        """Launch the gathering of every bucket that does not follow its masters yet."""
        self._gathering.start()

    def finish_parameter_sync(self) -> None:
        """The model computes with what its shards hold, in every parameter."""
        self._gathering.finish()

    def disable_forward_pre_hooks(self) -> None:
        """Gather now, and from now on in `after_update`: for whoever calls parts of the model without their hooks."""
        self._gathering.disable_hooks()

    def enable_forward_pre_hooks(self) -> None:
        """Gather beside forward again, as from the start."""
        self._gathering.enable_hooks()

    def replicated_tensors(self) -> Iterator[tuple[str, Tensor, dist.ProcessGroup]]:
        """Fingerprints of what several ranks have computed with alike since this was last asked, and will next.

        Name, an integer, and the ranks on which it should be the same.
        """
        self.finish_parameter_sync()
        self._fingerprints.add()
        return self._fingerprints.take()

    def memory(self) -> dict[str, int]:
        """Bytes on this rank. `buckets`: the temporary ones, which are there during backward only."""
        return {
            "parameters": sum(buffer.compute.nbytes for buffer in self.buffers),
            "masters": sum(buffer.masters.nbytes for buffer in self.buffers if buffer.masters is not None),
            "gradients": sum(buffer.gradients.nbytes for buffer in self.buffers),
            "buckets": self.pool.nbytes,
        }

    def accumulation_memory_summary(self) -> str:
        whole = sum(buffer.gradients.nbytes for buffer in self.buffers if not buffer.sharded_gradients)
        sharded = any(buffer.sharded_gradients for buffer in self.buffers)
        if not sharded:
            return f"gradients are reduced once per step: every rank holds {whole / 2**20:.1f} MiB of them"
        but = f", but for {whole / 2**20:.1f} MiB of parameters that no other rank shares" if whole else ""
        return f"each microbatch's gradient is reduced at once and held sharded{but}"


def _needs(model: Transformer, names: dict[nn.Parameter, str]) -> Iterator[tuple[nn.Module, list[str]]]:
    """Modules of the model in the order of forward, and the parameters that each needs."""
    parts = [model.embedding, *model.layers.values(), model.norm, model.head]
    needs = [(part, [names[p] for p in part.parameters()]) for part in parts if part is not None]
    of_parts = {name for _, own in needs for name in own}
    # A tied embedding is the head, too, and that is not called as a module; where another stage embeds it is not called
    # at all.
    tied = {"embedding.weight"} if model.config.tie_embeddings else set()
    yield model, [name for name in names.values() if name not in of_parts or name in tied]
    yield from needs


def _replace_parameters(model: nn.Module, new: dict[nn.Parameter, nn.Parameter]) -> None:
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            module.register_parameter(name, new[parameter])


def _forbid_moving(model: nn.Module) -> None:
    """Whatever would put other memory in the place of the buffers, or write past the masters, is an error."""

    def move(*_: Any, **__: Any) -> NoReturn:
        raise RuntimeError(
            "parameters are views of contiguous buffers and cannot be moved or cast: set the device before the model is "
            "built, and precision.compute and precision.storage in the config"
        )

    def load(*_: Any) -> NoReturn:
        raise RuntimeError(
            "load_state_dict() would write past the master copies of the parameters: load into the shards of the "
            "parallel model, then call its after_update()"
        )

    for module in model.modules():
        module._apply = move  # type: ignore[method-assign]
        module.register_load_state_dict_pre_hook(load)
