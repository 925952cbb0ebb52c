"""`Buffered`: the data-parallel engines on contiguous buffers.

    ddp     every rank updates all parameters        one all-reduce per bucket and step
    zero1   each rank updates its part               one reduce-scatter and one all-gather per bucket and step
    zero2   like zero1, with sharded gradients       one reduce-scatter per bucket and microbatch, one all-gather per step

The three engines share one implementation. They differ in the groups over which parameters are sharded and replicated
(plan.py), and in whether gradients are summed before or after accumulation (reduction.py). With dp_replicate > 1
gradients are also summed over the copies of the model or, with parallel.shard_optimizer_over = "dp", sharded over them.

The counterpart of Megatron-Core's DistributedDataParallel with its distributed optimizer (Rajbhandari et al., "ZeRO: Memory
Optimizations Toward Training Trillion Parameter Models", 2020, stages 1 and 2).
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from forge.model import Transformer
from forge.parallel.engines.buffered.buffer import AsyncCollectives, BucketMemory, Buffer, gather_parts
from forge.parallel.engines.buffered.plan import PART_ALIGNMENT, plan_buffers, round_up
from forge.parallel.engines.buffered.reduction import GradientCheck, Reduction
from forge.parallel.layout import Layout
from forge.runtime import compat
from forge.runtime.errors import UserError
from forge.shard import Shard


class Buffered:
    """The `DataParallel` engine on contiguous buffers: ddp, zero1 or zero2, by `parallel.data_parallel`.

    All methods are collective.
    """

    shards: list[Shard]
    copies: dict[Tensor, Tensor]

    def __init__(self, model: Transformer, layout: Layout):
        self._model, self._layout = model, layout
        self.name: str = layout.parallel.data_parallel
        self._plans = plan_buffers(model, layout)

    def allocate(self, device: torch.device) -> None:
        """Allocate the buffers, make the model's parameters views of them, and register the hooks."""
        model, parallel = self._model, self._layout.parallel
        if parallel.symmetric_memory and device.type != "cuda":
            raise UserError("parallel.symmetric_memory = true needs CUDA GPUs; use false")

        # Views of buffers replace the parameters on the meta device.
        originals = dict(model.named_parameters())
        # zero2 sums each microbatch's gradients over the ranks of one copy of the model. Parameters that no other rank
        # shares (all, or only the experts) have no such group. Their gradients stay whole, as in zero1, and need no
        # temporary copy.
        first = 1 if parallel.data_parallel == "zero2" else 0
        self.buffers = [
            Buffer(
                plan,
                originals,
                device,
                microbatch_groups=plan.groups.shard[:first],
                symmetric_memory=parallel.symmetric_memory,
            )
            for plan in self._plans
        ]
        buckets = [memory for buffer in self.buffers for memory in buffer.buckets]
        placed = {placed.name: placed.parameter for memory in buckets for placed in memory.parameters}
        _replace_parameters(model, {originals[name]: parameter for name, parameter in placed.items()})
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, torch.empty_like(buffer, device=device))
        _forbid_moving(model)
        shards = {s.name: s for buffer in self.buffers for s in buffer.shards(self._layout.meshes)}
        self.shards = [shards[name] for name in originals]
        self.copies = {p: copy for buffer in self.buffers for p, copy in buffer.copies.items()}

        # Backward finishes a bucket with the gradient of the bucket's first parameter in the order of forward. The
        # buckets of all buffers are reduced in the order of these gradients, and gathered in the reverse order.
        order = {name: place for place, name in enumerate(originals)}
        buckets.sort(key=lambda memory: -min(order[placed.name] for placed in memory.parameters))
        stream = compat.side_stream(device)
        check = None if parallel.check_gradients == "none" else GradientCheck(parallel.check_gradients)
        self._reduction = Reduction(
            buckets,
            device,
            overlap=parallel.overlap_gradients,
            stream=stream,
            check=check,
            symmetric_memory=parallel.symmetric_memory,
        )
        self._gathering = Gathering(
            buckets[::-1],
            _needs(model, {parameter: name for name, parameter in placed.items()}),
            overlap=parallel.overlap_parameters,
            stream=stream,
        )
        self._fingerprints = Fingerprints(self.buffers)

    def begin_microbatch(self, *, last: bool) -> None:
        """Prepare for a backward. Raises RuntimeError if gradients of an earlier step have not been zeroed."""
        self._reduction.begin(last=last)

    def take_weight_gradients(self, *, last: bool) -> None:
        """Move weight gradients into the buffers, after a pipeline schedule has computed them separately.

        No hook reports these gradients. They are reduced when the remaining buckets are launched.
        """
        self._reduction.place_gradients()

    def start_gradient_sync(self) -> None:
        """Launch the reductions of all buckets that backward has not launched."""
        self._reduction.launch_rest()

    def finish_gradient_sync(self) -> None:
        self._reduction.finish()
        self._gathering.wait()
        if self._layout.check_replicas:
            self._fingerprints.add()

    def zero_gradients(self) -> None:
        self._reduction.forget()

    def after_update(self, copied: Collection[Tensor] = ()) -> None:
        self._gathering.after_update(copied)

    def finish_parameter_sync(self) -> None:
        """Gather every compute parameter of the model from the master copies."""
        self._gathering.finish()

    def replicated_tensors(self) -> Iterator[tuple[str, Tensor, dist.ProcessGroup]]:
        """Yield (name, fingerprint, group) for each weight.

        The fingerprint, an int64 scalar, covers the weight's values since the last call and its current values. All
        ranks of `group` must have the same fingerprint.
        """
        self.finish_parameter_sync()
        self._fingerprints.add()
        return self._fingerprints.take()

    def memory(self) -> dict[str, int]:
        """Return the bytes of device memory on this rank, by kind.

        `buckets`: temporary buckets, allocated only during backward.
        """
        return {
            "parameters": sum(buffer.compute.nbytes for buffer in self.buffers),
            "masters": sum(buffer.masters.nbytes for buffer in self.buffers if buffer.masters is not None),
            "gradients": sum(buffer.gradients.nbytes for buffer in self.buffers),
            "buckets": self._reduction.temporary.nbytes,
        }

    def accumulation_memory_summary(self) -> str:
        whole = sum(buffer.gradients.nbytes for buffer in self.buffers if not buffer.sharded_gradients)
        if not any(buffer.sharded_gradients for buffer in self.buffers):
            return (
                f"gradients are reduced once per step: every rank holds {whole / 2**20:.1f} MiB of gradients"
            )
        kept = f"the gradients ({whole / 2**20:.1f} MiB) of parameters that no other rank shares"
        but = f", except {kept}" if whole else ""
        return f"each microbatch's gradient is reduced at once and held sharded{but}"


def _needs(model: Transformer, names: dict[nn.Parameter, str]) -> Iterator[tuple[nn.Module, list[str]]]:
    """Yield (module, names of the parameters to gather before the module runs), in the order of forward."""
    parts = [model.embedding, *model.layers.values(), model.norm, model.head]
    needs = [(part, [names[p] for p in part.parameters()]) for part in parts if part is not None]
    of_parts = {name for _, own in needs for name in own}
    # A tied embedding is also the head. The head's product does not call the embedding module, so a hook on the model
    # itself waits for the embedding.
    tied = {"embedding.weight"} if model.config.tie_embeddings else set()
    yield model, [name for name in names.values() if name not in of_parts or name in tied]
    yield from needs


def _replace_parameters(model: nn.Module, new: dict[nn.Parameter, nn.Parameter]) -> None:
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            module.register_parameter(name, new[parameter])


def _forbid_moving(model: nn.Module) -> None:
    """Make `model.to`, `model.load_state_dict` and similar methods raise RuntimeError.

    Moving or casting would take parameters out of the buffers. Loading would bypass the master copies.
    """

    def move(*_: Any, **__: Any) -> NoReturn:
        raise RuntimeError(
            "parameters are views of contiguous buffers and cannot be moved or cast. Choose the device before the model "
            "is built, and dtypes by precision.compute and precision.storage"
        )

    def load(*_: Any) -> NoReturn:
        raise RuntimeError(
            "load_state_dict() would bypass the master copies of the parameters: load into the shards of the "
            "parallel model, then call its after_update()"
        )

    for module in model.modules():
        module._apply = move  # type: ignore[method-assign]
        module.register_load_state_dict_pre_hook(load)


class Gathering:
    """Gathers the compute weights of `buckets`, given in the order of forward, from the master copies.

    The next forward runs meanwhile. All gathers are launched in the order of forward, as soon as the masters are updated. A
    later launch would save no memory, because buckets are always allocated. A pre-forward hook of each submodule waits for
    the submodule's buckets. So every forward, in training, evaluation or generation, computes with the latest parameters.

    needs: modules of the model, each with the names of the parameters to gather before its forward. overlap: True: gather
    during forward. False: gather everything and wait, as soon as the masters have changed.
    """

    def __init__(
        self,
        buckets: Sequence[BucketMemory],
        needs: Iterable[tuple[nn.Module, Iterable[str]]],
        *,
        overlap: bool,
        stream: torch.cuda.Stream | None,
    ):
        self._buckets, self._stream, self._overlap = buckets, stream, overlap
        # Buckets are launched in order and arrive in order. self._arrived: number of arrived buckets.
        self._launched: list[AsyncCollectives] = []
        self._arrived = 0
        self._changed, self._begun = True, False
        # Parameters whose compute weights the optimizer has already written.
        self._copied: Collection[Tensor] = ()
        # Between steps a checkpoint may be loaded into the master copies. If a bucket's master is a view of `compute`, a
        # running gather would overwrite the loaded values (gloo writes back the values that it has read). The first
        # such bucket and all later ones are therefore not gathered before the next forward.
        in_place = [bool(m.plan.groups.shard) and m.master is m.own for m in buckets]
        self._early = in_place.index(True) if True in in_place else len(buckets)

        number = {placed.name: n for n, memory in enumerate(buckets) for placed in memory.parameters}
        for module, names in needs:
            last = max((number[name] for name in names), default=-1)
            if last >= 0:
                module.register_forward_pre_hook(functools.partial(self._before_forward, last))

    def after_update(self, copied: Collection[Tensor]) -> None:
        """Record that the master copies have changed, and launch the first gathers.

        copied: parameters whose compute weights the update has already written on this rank.
        """
        self.wait()
        self._changed, self._copied = True, copied
        if not self._begun:
            return  # other values may be loaded before the first forward
        if self._overlap:
            self._restart()
            self._launch(self._early)
        else:
            self.finish()

    def wait(self) -> None:
        """Wait for the running gathers. Call before writing the master copies or their compute weights."""
        self._wait_for(len(self._launched) - 1)

    def finish(self) -> None:
        """Gather all buckets and wait. Every compute parameter of the model then equals its master copy. Collective."""
        self._gather(len(self._buckets) - 1)

    def _before_forward(self, last: int, _module: nn.Module, _inputs: object) -> None:
        self._gather(last if self._overlap else len(self._buckets) - 1)

    def _gather(self, last: int) -> None:
        """Launch all gathers. Wait for the buckets 0 to `last`."""
        if self._changed:
            self._restart()
        elif self._arrived > last:
            return
        self._launch(len(self._buckets))
        self._wait_for(last)

    def _restart(self) -> None:
        """Copy the master copies into this rank's part of each bucket, and mark all buckets to be gathered again.

        A bucket is not copied if its master is a view of the part, or if the optimizer has already written the part.
        The first call is collective: it broadcasts the master copies, so replicas begin equal.
        """
        if not self._begun:
            # Replicas of a part begin with the values of the group's first rank.
            for memory in self._buckets:
                for group in memory.plan.groups.replicate:
                    dist.broadcast(memory.master, group=group, group_src=0)
            self._copied = ()
        self._begun = True
        for memory in self._buckets:
            if memory.master is not memory.own and not memory.is_copied(self._copied):
                memory.own.copy_(memory.master)
        self._launched, self._arrived, self._changed = [], 0, False

    def _launch(self, number: int) -> None:
        """Launch the gathers of the first `number` buckets, except those already launched."""
        for memory in self._buckets[len(self._launched) : number]:
            gather = gather_parts(memory.compute, memory.plan.groups.shard)
            self._launched.append(AsyncCollectives(gather, self._stream))

    def _wait_for(self, last: int) -> None:
        for collectives in self._launched[self._arrived : last + 1]:
            collectives.finish()
        self._arrived = max(self._arrived, last + 1)


class Fingerprints:
    """Fingerprints of each step's weights, to check that ranks have computed with equal weights.

    A flipped bit in one rank's weights corrupts the gradients of one step. The next gather overwrites the bit, so a
    comparison of the weights at a save does not detect it. Therefore each step adds up the bits of its weights, in one
    pass.
    """

    # Odd, so that multiplying by it modulo 2^64 loses nothing (the multiplier of Knuth's MMIX generator).
    MULTIPLIER = 6364136223846793005

    def __init__(self, buffers: Sequence[Buffer]):
        self._weights: list[tuple[str, Tensor, dist.ProcessGroup]] = []
        for buffer in buffers:
            group = buffer.plan.groups.same_weights
            if group.size() == 1:
                continue
            for slot in (slot for bucket in buffer.plan.buckets for slot in bucket.slots):
                # Including the zeros after the slot, which fill its last 64-bit word.
                values = buffer.compute[slot.start :][: round_up(slot.stop - slot.start, PART_ALIGNMENT)]
                self._weights.append((slot.name, values.view(torch.int64), group))
        self._sums: Tensor | int = 0

    def add(self) -> None:
        """Add the bits of the current weights to the fingerprints. Does not synchronise with the device."""
        if self._weights:
            sums = torch.stack([words.sum() for _, words, _ in self._weights])
            self._sums = self._sums * self.MULTIPLIER + sums

    def take(self) -> Iterator[tuple[str, Tensor, dist.ProcessGroup]]:
        """Yield (name, fingerprint of all steps since the last `take`, group).

        Ranks of a group should have equal fingerprints.
        """
        sums, self._sums = self._sums, 0
        for number, (name, _, group) in enumerate(self._weights):
            assert isinstance(sums, Tensor), "nothing was added"
            yield f"weights.{name}", sums[number], group
