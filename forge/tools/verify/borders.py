"""Borders: the inputs and outputs of modules on one rank, with their place in the global batch.

Forward hooks record the first argument and the outputs of every module. Outputs are in the order in which forwards end, so
children come before their parents. The origin of a difference is the first module in this order with an equal input and a
different output.

The shape of a local tensor tells which part of the global tensor it is. A cp rank has two chunks of each sequence, and a tp
rank may have a slice of these chunks. A tp rank has either all features (or heads), or an equal share of them.

A module called several times per microbatch has one border per call: `embedding`, then `embedding (call 2)`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from forge.parallel.context import SequenceSplit
from forge.parallel.mesh import Meshes
from forge.tools.verify.pieces import TensorPlace

# Modules without borders. Their tensors have one dimension for batch and sequence, so a rank's part has no known place.
HIDDEN = ".experts."


@dataclass(frozen=True)
class BatchPart:
    """The part of the global batch on one rank.

    first_row: index of the rank's first sequence in the global batch. positions: positions of the rank's tokens in each
    sequence, before tensor parallelism splits them. tp: number of tensor-parallel ranks. tp_rank: this rank's index
    among them.
    """

    first_row: int
    positions: tuple[int, ...]
    tp: int = 1
    tp_rank: int = 0

    @classmethod
    def of(cls, meshes: Meshes, batch: int, seq: int) -> BatchPart:
        """Return this rank's part of a global batch of `batch` sequences of `seq` tokens."""
        split = SequenceSplit(meshes.cp)
        positions = split.indices(seq, torch.device("cpu")).tolist()
        first = meshes.data_rank * (batch // meshes.data_ranks)
        return cls(first, tuple(positions), meshes.tp.size(), meshes.tp.get_local_rank())

    def place(self, row: int, local: torch.Size, whole: torch.Size) -> TensorPlace | None:
        """Return the place of a local tensor `[batch, seq, ...]` in the global tensor; None if shapes do not determine it.

        row: index of the tensor's first sequence among this rank's sequences. local, whole: shapes of the local and of
        the global tensor.
        """
        if len(local) != len(whole) or len(local) < 2 or local[0] > whole[0]:
            return None
        begin = self.first_row + row
        positions = self.positions
        if local[1] * self.tp == len(self.positions):
            positions = self.positions[self.tp_rank * local[1] :][: local[1]]
        elif local[1] != len(self.positions):
            return None
        features = []
        for mine, all_of_them in zip(local[2:], whole[2:], strict=True):
            if mine not in (all_of_them, all_of_them / self.tp):
                return None
            start = 0 if mine == all_of_them else mine * self.tp_rank
            features.append(slice(start, start + mine))
        return (slice(begin, begin + local[0]), positions, *features)


@dataclass(frozen=True)
class Seen:
    """An input or output of a module on this rank.

    name: of the module; the second and later calls in a microbatch add ` (call N)`. output: True for an output of the
    module, False for its input. row: index of the first sequence of `values` among this rank's sequences.
    """

    name: str
    output: bool
    row: int
    values: Tensor


class Borders:
    """Record the inputs and outputs of all modules in `parts`, with forward hooks. `take` returns the recording."""

    def __init__(self, parts: Iterable[nn.Module]):
        self._seen: list[Seen] = []
        self._current: list[_Microbatch] = []
        self._handles: list[Any] = []
        for part in parts:
            current = _Microbatch(part)
            self._current.append(current)
            self._handles.append(part.register_forward_pre_hook(current.begin))
            for name, module in part.named_modules():
                hidden = HIDDEN in f"{name}."
                if name and type(module).forward is not nn.Module.forward and not hidden:
                    # Record the input before the forward, because a module may write into its input.
                    self._handles.append(module.register_forward_pre_hook(self._input_hook(name, current)))
                    self._handles.append(module.register_forward_hook(self._output_hook(name, current)))

    def take(self) -> list[Seen]:
        """Return the tensors recorded since the last call of `take`, in order, and begin a new step."""
        seen, self._seen = self._seen, []
        for current in self._current:
            current.end_step()
        return seen

    def remove(self) -> None:
        """End the recording: remove the forward hooks."""
        for handle in self._handles:
            handle.remove()

    def _input_hook(self, name: str, current: _Microbatch) -> Callable[..., None]:
        def hook(_module: nn.Module, args: tuple[Any, ...]) -> None:
            if _recomputing():
                return
            current.calls[name] += 1
            if args and (given := _local(args[0])) is not None:
                if name == "head" and given.ndim == 4:
                    # Multi-token prediction stacks the hidden states of its modules: [modules, batch, seq, dim].
                    given = given.permute(1, 2, 0, 3)
                self._seen.append(Seen(current.called(name), False, current.row, given))

        return hook

    def _output_hook(self, name: str, current: _Microbatch) -> Callable[..., None]:
        def hook(_module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if _recomputing():
                return
            rows = args[0].shape if args and isinstance(args[0], Tensor) and args[0].ndim == 3 else None
            for number, one in enumerate(output if isinstance(output, tuple | list) else (output,)):
                found = _local(one)
                if found is None:
                    continue
                if rows is not None and found.shape[0] == rows[:2].numel():
                    found = found.unflatten(0, rows[:2])
                self._seen.append(Seen(current.called(name, number), True, current.row, found))

        return hook


class _Microbatch:
    """The current microbatch of `part`, a model or a pipeline stage.

    row: index of the microbatch's first sequence on this rank. calls: module -> number of calls in this microbatch.
    """

    def __init__(self, part: nn.Module):
        # A stage may hold the embedding only for multi-token prediction. Its first call there is the model's second call.
        embeds_later = getattr(part, "embedding", None) is not None and not getattr(part, "embeds", True)
        self._elsewhere = {"embedding": 1} if embeds_later else {}
        self.calls: Counter[str] = Counter()
        self.row = self._next_row = 0

    def begin(self, _part: nn.Module, args: tuple[Any, ...]) -> None:
        if _recomputing():
            return
        # With attention residuals, a stage's input is [streams, batch, seq, dim].
        rows = args[0].shape[1 if args[0].ndim == 4 else 0]
        self.row, self._next_row = self._next_row, self._next_row + rows
        self.calls = Counter(self._elsewhere)

    def end_step(self) -> None:
        self.row = self._next_row = 0

    def called(self, name: str, output: int = 0) -> str:
        """Return `Seen.name` for the latest call of module `name`.

        output: index of the output; 0: the first output, or the input.
        """
        name = f"{name}[{output}]" if output else name
        return name if self.calls[module_of(name)] == 1 else f"{name} (call {self.calls[module_of(name)]})"


def call_of(name: str) -> str:
    """Return the `Seen.name` of an input, given the name of an output of the same call.

    All outputs of a call share one input. The name of an output may add an index, e.g. `[1]`.
    """
    return re.sub(r"\[\d+\]", "", name)


def parent_of(name: str) -> str:
    """Return the `Seen.name` of the enclosing module, with the call number of `name`; "" for a top-level module."""
    module, call, number = name.partition(" (call ")
    parent = module.rpartition(".")[0]
    return parent + call + number if parent else ""


def module_of(name: str) -> str:
    """Return the name of the module in a `Seen.name`, i.e. `name` without call number and output index."""
    return name.partition(" (call ")[0].partition("[")[0]


def _local(value: Any) -> Tensor | None:
    """Return a CPU copy of this rank's part of `value`.

    Return None for a tensor of fewer than two dims, for a DTensor with partial sums, and for a `value` of another type.
    """
    if isinstance(value, DTensor):
        if any(placement.is_partial() for placement in value.placements):
            return None
        value = value.to_local()
    if not isinstance(value, Tensor) or value.ndim < 2:
        return None
    return value.detach().clone().cpu()


def _recomputing() -> bool:
    """Return whether a backward is running. If so, a forward is a recomputation by activation checkpointing."""
    return torch._C._current_graph_task_id() != -1
