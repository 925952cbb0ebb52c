"""`FakeRank`: one rank of a planned run, on fake tensors (shapes without memory).

A fake rank runs the real model, layout, optimizer and step. Its process group is fake: collectives return at once.
"""

from __future__ import annotations

import functools
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.testing._internal.distributed.fake_pg import FakeStore

from forge.batch import Batch
from forge.checkpoint.tensors import writes
from forge.config import Config, Degrees
from forge.model.router import Router
from forge.model.split_product import linear
from forge.observe.memory_report import MemoryReport
from forge.optim import build_optimizer
from forge.parallel.build import build_parallel_model
from forge.parallel.dispatch import AllToAllDispatcher, NodeDispatcher, part_sizes
from forge.parallel.mesh import make_meshes
from forge.parallel.offload import LEAST, HostMemory, offloads
from forge.parallel.pipeline import PipelinedModel
from forge.parallel.step.gradients import report_gradients
from forge.runtime import compat
from forge.runtime.errors import UserError
from forge.shard import local
from forge.tools.plan.attention import on_gpu, use_fused_norms
from forge.tools.plan.float8 import use_plain_products
from forge.tools.plan.links import visited_nodes
from forge.tools.plan.places import known_everywhere
from forge.tools.plan.trace import Moment, Trace
from forge.train.state import all_tensors
from forge.train.step import apply_gradients, compute_gradients

CPU = torch.device("cpu")


@contextmanager
def fake_ranks(rank: int, world: int) -> Iterator[None]:
    """Make a fake default process group for the body: this process is `rank` of `world`. No other process exists."""
    compat.forget_meshes()
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
        compat.forget_meshes()


def _send(*args: Any, **kwargs: Any) -> Any:
    """Send a message like `dist.isend`, but report completion at once.

    The fake process group never reports completion, and the sender keeps a tensor until its send completes. Without this
    function all sent tensors would count as live for the whole step.
    """
    work: Any = dist.isend(*args, **kwargs)
    return SimpleNamespace(wait=work.wait, is_completed=lambda: True)


class FakeRank:
    """The model and optimizer of one rank. Construct and use a FakeRank inside `fake_ranks`.

    load: tokens received by this rank's experts, as a multiple of an equal share.
    card: plan attention, norms and routers as on a GPU. optimizer: False leaves out the optimizer's state and work.
    """

    def __init__(
        self,
        config: Config,
        degrees: Degrees,
        load: float = 1.0,
        card: bool = False,
        optimizer: bool = True,
    ):
        self.config, self.degrees = config, degrees
        self.trace = Trace()
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.meshes = make_meshes(degrees, CPU.type)
        with _explained():
            # The build starts from meta tensors. Only the allocation of local parameters runs under the fake mode.
            attention = on_gpu if card else None
            self.model = build_parallel_model(
                config, self.meshes, CPU, values=_leave, attention=attention, memory=self._watched
            )
            shards = known_everywhere(self.model.shards, self.model._engines, degrees)
            with self._watched():
                self.optimizer: Any = _NoOptimizer()
                if optimizer:
                    self.optimizer = build_optimizer(shards, config.optimizer, self.meshes.stage)
        if isinstance(self.model, PipelinedModel):
            self.model.isend = _send
            if self.model.tied is not None:
                tied: Any = self.model.tied
                tied.sum_gradients = self._in_update(tied.sum_gradients)
        self.trace.watch(self.model.parts)
        for part in self.model.parts:
            use_plain_products(part)
            if card:
                use_fused_norms(part)
                for offload in offloads(part):
                    offload.memory = PlannedHostMemory(self.trace)
            for module in part.modules():
                if card and isinstance(module, Router):
                    module.multiply = functools.partial(linear, on_gpu=True)
                dispatch = getattr(module, "dispatch", None)
                if isinstance(dispatch, AllToAllDispatcher):
                    dispatch.sizes = functools.partial(_loads, self._rows(dispatch.parts), load)
                elif isinstance(dispatch, NodeDispatcher):
                    dispatch.sizes = functools.partial(
                        _node_loads, self._rows(dispatch.parts), self._share_of_nodes(), load
                    )

    def state_bytes(self) -> dict[str, int]:
        """Return the bytes of this rank's memory by kind, as in the memory report, but without activations."""
        report = MemoryReport(CPU)
        report.count_state(self.model.memory(), self.optimizer.tensors())
        return report.bytes

    def buckets(self) -> int:
        """Return the number of buckets of an engine with buffers (ddp, zero1, zero2); 0 for fsdp2."""
        buffers = [buffer for engine in self.model._engines for buffer in getattr(engine, "buffers", ())]
        return sum(len(buffer.buckets) for buffer in buffers)

    def saved_bytes(self) -> tuple[int, int]:
        """Return the bytes of host memory for a save, and the bytes of this rank's tensors in a checkpoint.

        The second number counts whole tensors, i.e. also their shards on other ranks.
        """
        host = whole = 0
        for name, (shard, values) in all_tensors(self.model, self.optimizer).items():
            host += local(values).nbytes if writes(name, shard) else 0
            whole += shard.global_shape.numel() * values.dtype.itemsize
        return host, whole

    def _in_update(self, work: Callable[[], None]) -> Callable[[], None]:
        """Return `work` with its messages recorded in the update: they are sent once in a step."""

        def moved() -> None:
            self.trace.moment = Moment("update")
            work()

        return moved

    def offloaded_bytes(self) -> int:
        """Return the bytes of host memory allocated for offloaded activations."""
        memories = {offload.memory for part in self.model.parts for offload in offloads(part)}
        return sum(getattr(memory, "bytes", 0) for memory in memories)

    def step(self, microbatches: int) -> None:
        """Run one optimizer step with `microbatches` microbatches, as in `Trainer.step`."""
        with _explained(), self._watched():
            self.trace.begin()
            batch, model = self._batch(microbatches), self.model
            sums = compute_gradients(model, batch)
            self.trace.moment = Moment("update")
            report = report_gradients(model.shards, sums.objective, stop=False)
            optimizer, train = self.config.optimizer, self.config.train
            apply_gradients(model, self.optimizer, report, optimizer.lr, train.grad_clip_norm)

    def update(self, microbatches: int) -> None:
        """Run only the optimizer's part of a step, with fake gradients.

        As in a full step, a batch of `microbatches` microbatches is in memory.
        """
        with _explained(), self._watched():
            self.trace.begin()
            self.trace.moment = Moment("update")
            batch = self._batch(microbatches)  # a step holds its batch to the end
            for shard in self.model.shards:
                if shard.parameter.grad is None:
                    shard.parameter.grad = torch.empty_like(shard.parameter)
            if hasattr(self.optimizer, "bound_logits"):
                self.optimizer.bound_logits(self.model.largest_logits)
            self.optimizer.step(self.config.optimizer.lr, torch.zeros(()))
            self.model.zero_gradients()
            del batch

    def batch_bytes(self, microbatches: int) -> int:
        """Return the bytes of a batch of `microbatches` microbatches, and with cp also of this rank's slices of the batch.

        The batch and the slices stay allocated for a whole step.
        """
        with self._fake:
            batch = self._batch(1)
            (whole,) = batch.microbatches(self.model.micro_batch_size)
            part = self.model._split.local_part(whole)
        values = [*vars(batch).values(), *vars(part).values()]
        tensors = [x for x in values if isinstance(x, Tensor)]
        storages = {storage._cdata: storage for storage in (x.untyped_storage() for x in tensors)}
        return microbatches * sum(storage.nbytes() for storage in storages.values())

    def _batch(self, microbatches: int) -> Batch:
        train = self.config.train
        shape = (microbatches * train.micro_batch_size, train.seq_len)
        documents = torch.zeros(shape, dtype=torch.int32) if self.config.data.document_mask else None
        tokens, labels = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.int64)
        return Batch(tokens, labels, documents=documents)

    @contextmanager
    def _watched(self) -> Iterator[None]:
        with self._fake, self.trace:
            yield

    def _rows(self, parts: int) -> list[int]:
        """Return, for each of `parts` parts of a microbatch, the number of rows this rank sends to a layer's experts."""
        moe, train = self.config.model.moe, self.config.train
        assert moe is not None
        tokens = train.micro_batch_size * train.seq_len // (self.degrees.cp * self.degrees.tp)
        return [own * moe.top_k for own in part_sizes(tokens, parts)]

    def _share_of_nodes(self) -> float:
        """Return the number of rows sent to nodes, divided by the number of rows sent to experts.

        A row is sent once to each node that holds any of its experts (`visited_nodes`).
        """
        moe = self.config.model.moe
        return 1.0 if moe is None else visited_nodes(moe, self.degrees.ep_nodes) / moe.top_k


@dataclass(frozen=True)
class PlannedBuffer:
    """A buffer of `nbytes` bytes that exists only in a plan."""

    nbytes: int

    def __getitem__(self, part: slice) -> PlannedBuffer:
        return PlannedBuffer(part.stop)


class PlannedHostMemory(HostMemory):
    """Host memory for plans. It allocates nothing: `bytes` sums the buffers' sizes, and `copy` counts copied bytes."""

    def __init__(self, trace: Trace):
        super().__init__(CPU)
        self.least = LEAST
        self.bytes = 0
        self._trace = trace

    def allocate(self, size: int) -> Any:
        """Return a buffer for `size` bytes. Add its size to `bytes`."""
        self.bytes += size
        return PlannedBuffer(size)

    def copy(self, pairs: Iterable[tuple[Any, Any]]) -> None:
        """Count the bytes of `pairs`."""
        self._trace.copied[self._trace.moment] += sum(target.nbytes for target, _ in pairs)


class _NoOptimizer:
    """An optimizer without state and without work."""

    def tensors(self) -> Iterator[Any]:
        return iter(())

    def step(self, *_: Any) -> None: ...


def _leave(*_: Any) -> None:
    """Skip the initialization of parameters, because fake tensors have no values."""


def _loads(
    rows: list[int], load: float, leaving: Tensor, _arriving: Tensor
) -> list[tuple[list[int], list[int]]]:
    """Return two lists for each part: rows sent to each rank, and rows received from each rank.

    rows: for each part, the number of rows that this rank sends, divided equally among the ranks. load: received rows,
    as a multiple of an equal share. leaving: rows per expert, `[ranks, parts, local experts]`; only the number of ranks
    is read.
    """
    ranks = leaving.shape[0]
    sends = [part_sizes(own, ranks) for own in rows]
    return [(own, [round(load * own[0])] * ranks) for own in sends]


def _node_loads(
    rows: list[int],
    share: float,
    load: float,
    to_nodes: Tensor,
    _from: Tensor,
    leaving: Tensor,
    _arriving: Tensor,
) -> list[tuple[list[int], list[int], list[int], list[int]]]:
    """Return four lists for each part: rows sent to and received from each node, then the same for the ranks of a node.

    rows: for each part, the number of rows that this rank sends to experts. share: from `FakeRank._share_of_nodes`.
    load: rows received from the ranks of a node, as a multiple of an equal share.
    """
    nodes, ranks = to_nodes.shape[0], leaving.shape[0]
    found = []
    for own in rows:
        sends, here = part_sizes(round(share * own), nodes), part_sizes(own, ranks)
        found.append((sends, [sends[0]] * nodes, here, [round(load * here[0])] * ranks))
    return found


@contextmanager
def _explained() -> Iterator[None]:
    """Raise UserError if the body reads the values of a fake tensor. The message names the source line of the read."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise UserError(
                f"--plan: {_where(error)} reads values of a tensor ({error.func}), but a plan has only shapes. Avoid "
                f"`.item()`, `.tolist()`, `if` on a tensor, and shapes that depend on values; or run without --plan"
            ) from error


def _where(error: BaseException) -> str:
    """Return FILE:LINE of the innermost frame outside of PyTorch and the planner."""
    folders = {Path(torch.__file__).parent, Path(__file__).parent}
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if folders.isdisjoint(Path(frame.filename).parents)
    ]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "the model"
