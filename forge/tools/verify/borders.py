"""Borders: inputs and outputs of modules on one rank, with their place in the global batch.

Hooks record the first tensor argument and the outputs of every module, in the order in which forwards end: children before
their parents. So a difference arose in the first module in this order whose output differs while its input agrees.

A rank's part of the global tensor follows from shapes. A rank of cp has two chunks of a sequence of `seq` tokens, and a
rank of tp may have a piece of these. A rank of tp has either all features or heads, or an equal share of them.

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

# Modules whose tensors are sorted by expert: the order depends on the layout.
HIDDEN = (".experts",)


@dataclass(frozen=True)
class BatchPart:
    """A rank's part of the global batch.

    first_row: the rank's first global sample. positions: the positions of its tokens in each sequence. tp: number of pieces
    into which tensor parallelism divides sequences or features. tp_rank: the index of this rank's piece.
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
        """Return the place of a local tensor `[batch, seq, ...]` in the global one; None if shapes do not determine it.

        row: the index of its first sequence on this rank.
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
    """A tensor at a border of the module `name`: `values`, whose first sequence is row `row` on this rank.

    output: True for an output of the module, False for its input. The name ends with the number of the call, unless
    the call is the first in its microbatch.
    """

    name: str
    output: bool
    row: int
    values: Tensor


class Borders:
    """Record the borders of all modules of `parts`. `take` returns the borders recorded since its last call."""

    def __init__(self, parts: Iterable[nn.Module]):
        self._seen: list[Seen] = []
        self._current: list[_Microbatch] = []
        self._handles: list[Any] = []
        for part in parts:
            current = _Microbatch(part)
            self._current.append(current)
            self._handles.append(part.register_forward_pre_hook(current.begin))
            for name, module in part.named_modules():
                if name and type(module).forward is not nn.Module.forward and not _is_hidden(name):
                    # Before the forward: a module may write into its input.
                    self._handles.append(module.register_forward_pre_hook(self._input_hook(name, current)))
                    self._handles.append(module.register_forward_hook(self._output_hook(name, current)))

    def take(self) -> list[Seen]:
        """Return the tensors recorded since the last call, in order, and begin a new step."""
        seen, self._seen = self._seen, []
        for current in self._current:
            current.end_step()
        return seen

    def remove(self) -> None:
        """Record nothing from now on."""
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
    """The latest microbatch in `part`, a model or a stage of a pipeline.

    row: index of its first sequence on this rank. calls: module -> number of calls.
    """

    def __init__(self, part: nn.Module):
        # If this stage has the embedding but does not embed tokens, another stage has made the first call.
        embeds_later = getattr(part, "embedding", None) is not None and not getattr(part, "embeds", True)
        self._elsewhere = {"embedding": 1} if embeds_later else {}
        self.calls: Counter[str] = Counter()
        self.row = self._next_row = 0

    def begin(self, _part: nn.Module, args: tuple[Any, ...]) -> None:
        if _recomputing():
            return
        # A stage's input with attention residuals is [streams, batch, seq, dim].
        rows = args[0].shape[1 if args[0].ndim == 4 else 0]
        self.row, self._next_row = self._next_row, self._next_row + rows
        self.calls = Counter(self._elsewhere)

    def end_step(self) -> None:
        self.row = self._next_row = 0

    def called(self, name: str, output: int = 0) -> str:
        """Return the name of the border of a module's latest call. output: index of the output."""
        name = f"{name}[{output}]" if output else name
        return name if self.calls[module_of(name)] == 1 else f"{name} (call {self.calls[module_of(name)]})"


def call_of(name: str) -> str:
    """Return the name of the input that belongs to the output `name`. All outputs of a call share one input."""
    return re.sub(r"\[\d+\]", "", name)


def parent_of(name: str) -> str:
    """Return the input border of the enclosing module, with the call number of border `name`; "" if no module encloses it."""
    module, call, number = name.partition(" (call ")
    parent = module.rpartition(".")[0]
    return parent + call + number if parent else ""


def module_of(name: str) -> str:
    """Return the module of the border `name`."""
    return name.partition(" (call ")[0].partition("[")[0]


def _local(value: Any) -> Tensor | None:
    """Return a copy of this rank's part of `value`, if it is an activation; otherwise None."""
    if isinstance(value, DTensor):
        if any(placement.is_partial() for placement in value.placements):
            return None
        value = value.to_local()
    if not isinstance(value, Tensor) or value.ndim < 2:
        return None
    return value.detach().clone().cpu()


def _recomputing() -> bool:
    """Return whether a backward is running, so that a forward is a recomputation."""
    return torch._C._current_graph_task_id() != -1


def _is_hidden(name: str) -> bool:
    return any(f"{part}." in f"{name}." for part in HIDDEN)
