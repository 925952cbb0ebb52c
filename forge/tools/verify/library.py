"""Compare a plain PyTorch module under another library's parallelism with the module in one process.

`make_model()` returns the module, and `parallelize(module)` applies the parallelism. docs/guides/verify-libraries.md has
the requirements of both functions. Both runs make the same steps on the same tokens, in float64, over gloo on this machine.
Parameters, gradients and checkpoints are compared as whole tensors, on every rank. Activations are compared as local parts.
"""

from __future__ import annotations

import logging
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from forge.runtime.errors import UserError
from forge.runtime.imports import load_function
from forge.shard import local
from forge.tools.verify.borders import BatchPart, Borders, Seen
from forge.tools.verify.compare import Comparison, compare_rank, elements, merge
from forge.tools.verify.layouts import Case
from forge.tools.verify.pieces import TensorKey, TensorPiece
from forge.tools.verify.pieces import whole as whole_piece
from forge.tools.verify.ranks import RankFailed, run_ranks
from forge.tools.verify.record import RankRecord, RankStep, WholeRecord
from forge.tools.verify.report import last_line, outcome_json
from forge.tools.verify.run import Outcome, limit_s, outcome_of

BATCH, SEQ, SEED = 8, 32, 0
# Components of parameter names added by PyTorch's wrappers.
WRAPPERS = ("module", "_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)
Optimizers: TypeAlias = list[torch.optim.Optimizer]


@dataclass
class Parallelized:
    """The result of `parallelize`: the local part of the module on this rank.

    model: the module, or this rank's pipeline stages. The modules of stages keep the names of the whole model.
    data_rank, data_ranks: this rank reads part `data_rank` of `data_ranks` equal parts of the batch's sequences.
    positions: positions of this rank's tokens in each sequence, to locate activations; None: all.
    tp_rank, tp_ranks: this rank has part `tp_rank` of `tp_ranks` parts of features or sequence, to locate activations.
    forward_backward: called with tokens and labels, int64 `[sequences of this data rank, seq]`. Leaves complete gradients
        in `.grad`. Returns this rank's mean loss, or None on a rank without a loss. None: cross-entropy of `model(tokens)`.
    optimizer: one per module of `model`; None: `make_optimizer` applied to each module's parameters.
    clip: called with the limit of the global norm. Clips the gradients and returns their global norm before clipping.
        None: torch.nn.utils.clip_grad_norm_.
    whole: called with a parameter's name and a tensor sharded like this parameter. Returns the whole tensor. Collective.
        None: tensors count as whole. DTensors are always gathered by `full_tensor()` instead.
    checkpoint: True if torch.distributed.checkpoint can save and load the module and its optimizers. False: compare none.
    """

    model: nn.Module | Sequence[nn.Module]
    data_rank: int = 0
    data_ranks: int = 1
    positions: Sequence[int] | None = None
    tp_rank: int = 0
    tp_ranks: int = 1
    forward_backward: Callable[[Tensor, Tensor], Tensor | None] | None = None
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None
    clip: Callable[[float], Tensor] | None = None
    whole: Callable[[str, Tensor], Tensor] | None = None
    checkpoint: bool = True

    @property
    def parts(self) -> list[nn.Module]:
        """The modules on this rank."""
        return [self.model] if isinstance(self.model, nn.Module) else list(self.model)


@dataclass(frozen=True)
class LibraryRequest:
    """Import paths of the user's three functions, and the number of steps. make_optimizer: empty to use AdamW."""

    make_model: str
    parallelize: str
    make_optimizer: str = ""
    steps: int = 3


def verify_library(
    request: LibraryRequest, worlds: Sequence[int], end: Callable[[Outcome], None]
) -> list[Outcome]:
    """Compare the parallelised module, on each number of processes in `worlds`, with the module in one process.

    Call `end` with each result. Raises UserError if a path cannot be imported, or if the module fails in one process.
    """
    for option, path in (
        ("--module", request.make_model),
        ("--parallelize", request.parallelize),
        ("--make-optimizer", request.make_optimizer),
    ):
        if path:
            _load(option, path)
    with tempfile.TemporaryDirectory(prefix="forge-verify-") as home:
        reference = Path(home) / "reference"
        try:
            ((order, expected),) = run_ranks(_alone, 1, request, reference, timeout=limit_s(1))
        except RankFailed as error:
            raise UserError(
                f"{request.make_model}: the reference in one process fails: {last_line(str(error))}"
            ) from None
        outcomes = []
        for world in worlds:
            began, case = time.monotonic(), Case((("processes", world),))
            folder = str(Path(home) / f"layout-{world}")
            try:
                found = run_ranks(_together, world, request, reference, folder, timeout=limit_s(world))
                outcome = outcome_of(case, merge(found, expected), order, time.monotonic() - began)
            except RankFailed as error:
                outcome = Outcome(case, "failed", time.monotonic() - began, error=str(error))
            outcomes.append(outcome)
            end(outcome)
        return outcomes


def notes_on(outcomes: Sequence[Outcome]) -> list[str]:
    """Return one line for each layout whose checkpoint was not compared."""
    without = [one.case.name for one in outcomes if one.status != "failed" and "saved" not in one.largest]
    return [f"{name}: no checkpoint was compared (Parallelized.checkpoint is False)" for name in without]


def library_json(request: LibraryRequest, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Return the results as the JSON object of `verify.py --module ... --json`."""
    return {
        "module": request.make_model,
        "parallelize": request.parallelize,
        "equal": all(one.status == "equal" for one in outcomes),
        "compared": sum(one.status != "failed" for one in outcomes),
        "notes": notes_on(outcomes),
        "layouts": [outcome_json(one) for one in outcomes],
    }


def _load(option: str, path: str) -> Callable[..., Any]:
    try:
        return load_function(path)
    except ValueError as error:
        raise UserError(f"{option} {path}: {error}") from None


def _make(request: LibraryRequest) -> tuple[nn.Module, Callable[[Any], torch.optim.Optimizer]]:
    """Return the module and the function that makes its optimizer. Raises ValueError if the module has no `vocab_size`.

    The module is in float64. Its initial values are equal on every rank.
    """
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore", module=r"torch\.")
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(SEED)
    model = load_function(request.make_model)().double()
    if not isinstance(getattr(model, "vocab_size", None), int):
        raise ValueError(
            f"{type(model).__name__} has no attribute vocab_size, the number of tokens that it knows"
        )
    make = load_function(request.make_optimizer) if request.make_optimizer else _adamw
    return model, make


def _adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def _batches(model: Any, steps: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (tokens, labels) of each step, equal on every rank. Both are int64 `[BATCH, seq]`."""
    generator = torch.Generator().manual_seed(SEED)
    seq = getattr(model, "seq_len", SEQ)
    for _ in range(steps):
        tokens = torch.randint(model.vocab_size, (BATCH, seq + 1), generator=generator)
        yield tokens[:, :-1], tokens[:, 1:]


def _alone(_rank: int, _world: int, request: LibraryRequest, file: Path) -> tuple[list[str], dict]:
    """Run the request's module in one process. Write its tensors to `file`, as the reference of the distributed run.

    Return the names of the submodules in computation order, and a dict (step, tensor) -> number of elements.
    """
    model, make = _make(request)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError(f"{type(model).__name__} has no parameters to train")
    run = _ModuleRun(Parallelized(model), make, dict(model.named_parameters()), limit=None)
    ranks = run.record(list(_batches(model, request.steps)), str(file) + "-checkpoint", None)
    steps = [{key: pieces[0].values for key, pieces in step.pieces.items()} for step in ranks.steps]
    for whole, step in zip(steps, ranks.steps, strict=True):
        whole |= {("output" if one.output else "input", one.name): one.values for one in step.seen}
    for key in list(steps[-1]):
        if key[0] in ("resumed", "continued"):
            del steps[-1][key]
    steps[-2] |= {("loaded", name): value for (kind, name), value in steps[-2].items() if kind == "parameter"}
    order = [one.name for one in ranks.steps[1].seen if one.output]
    record = WholeRecord(steps, order)
    torch.save((record, run.limit), file)
    return order, elements(record)


def _together(rank: int, _world: int, request: LibraryRequest, file: Path, folder: str) -> Comparison:
    """Run the parallelised module and compare this rank with the reference in `file`. Collective."""
    model, make = _make(request)
    shapes = dict(model.named_parameters())
    batches = list(_batches(model, request.steps))
    result = load_function(request.parallelize)(model)
    done = Parallelized(result) if isinstance(result, nn.Module) else result
    if not isinstance(done, Parallelized):
        kind = type(done).__name__
        raise TypeError(
            f"{request.parallelize} returned a {kind}; needed: a module, or forge.tools.verify.Parallelized"
        )
    reference, limit = torch.load(file, weights_only=False)
    run = _ModuleRun(done, make, shapes, limit)
    own = folder if done.checkpoint else None
    record = run.record(batches, own, str(file) + "-checkpoint" if done.checkpoint else None)
    return compare_rank(reference, rank, record)


class _ModuleRun:
    """The steps of one module on this rank.

    shapes: name -> parameter in one process, for its shape. limit: of the gradient norm; None: half of the first step's norm.
    """

    def __init__(self, done: Parallelized, make: Any, shapes: dict[str, nn.Parameter], limit: float | None):
        self.done, self.limit = done, limit
        self._shapes = {_plain(name): tuple(parameter.shape) for name, parameter in shapes.items()}
        given = done.optimizer
        if given is None:
            self.optimizers: Optimizers = [make(part.parameters()) for part in done.parts]
        else:
            self.optimizers = [given] if isinstance(given, torch.optim.Optimizer) else list(given)
        self._borders: Borders | None = Borders(done.parts)

    def record(
        self, batches: Sequence[tuple[Tensor, Tensor]], own: str | None, other: str | None
    ) -> RankRecord:
        """Run all steps and return this rank's recording. Collective.

        own: folder in which to save a checkpoint before the last step; None: save none. other: folder of the reference's
        checkpoint; None: load none. The last step is repeated from each of these checkpoints.
        """
        record = RankRecord([RankStep(self._pieces("initial", self._parameters()))])
        for number, batch in enumerate(batches, start=1):
            record.steps.append(self._step(*batch))
            if own is not None and number == len(batches) - 1:
                dcp.save(self._state(), checkpoint_id=own)
                if dist.get_rank() == 0:
                    record.steps[-1].pieces |= _read_whole(own)
        if self._borders is not None:
            self._borders.remove()
            self._borders = None
        for kind, folder in (("resumed", own), ("continued", other)):
            if folder is not None:
                self._load(folder)
                if kind == "continued":
                    record.steps[-2].pieces |= self._pieces("loaded", self._parameters())
                again = self._step(*batches[-1]).pieces
                record.steps[-1].pieces |= {(kind, f"{of} {name}"): p for (of, name), p in again.items()}
        return record

    def _step(self, tokens: Tensor, labels: Tensor) -> RankStep:
        done, step = self.done, RankStep()
        rows, rest = divmod(len(tokens), done.data_ranks)
        if rest:
            raise ValueError(
                f"data_ranks = {done.data_ranks} does not divide the batch of {len(tokens)} sequences"
            )
        first = rows * done.data_rank
        of_rank = slice(first, first + rows)
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        loss = (done.forward_backward or self._forward_backward)(tokens[of_rank], labels[of_rank])
        if self._borders is not None:
            step.seen = _of_batch(self._borders.take(), rows)
            positions = tuple(range(tokens.shape[1]) if done.positions is None else done.positions)
            step.part = BatchPart(first, positions, done.tp_ranks, done.tp_rank)
        step.pieces["loss", "cross-entropy"] = [_scalar(_mean_over_ranks(loss))]
        grads = ((n, p, torch.zeros_like(p) if p.grad is None else p.grad) for n, p, _ in self._parameters())
        step.pieces |= self._pieces("gradient", grads)
        if self.limit is None:
            self.limit = 0.5 * float(self._clip(float("inf")))
        step.pieces["norm", "gradient"] = [_scalar(self._clip(self.limit))]
        for optimizer in self.optimizers:
            optimizer.step()
        step.pieces |= self._pieces("parameter", self._parameters())
        return step

    def _forward_backward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        (model,) = self.done.parts
        loss = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())
        loss.backward()
        return loss.detach()

    def _clip(self, limit: float) -> Tensor:
        if self.done.clip is not None:
            return self.done.clip(limit)
        parameters = [parameter for part in self.done.parts for parameter in part.parameters()]
        return torch.nn.utils.clip_grad_norm_(parameters, limit)

    def _parameters(self) -> Iterator[tuple[str, nn.Parameter, Tensor]]:
        """Yield (name, parameter, parameter) for all trained parameters, as needed by the argument `tensors` of `_pieces`."""
        for part in self.done.parts:
            for name, parameter in part.named_parameters():
                if parameter.requires_grad:
                    yield _plain(name), parameter, parameter

    def _pieces(self, kind: str, tensors: Any) -> dict[TensorKey, list[TensorPiece]]:
        """Gather whole tensors and return them under `kind`. Collective.

        tensors: (name, parameter, tensor sharded like the parameter). Raises ValueError if the module in one process has
        no such name or another shape.
        """
        found = {}
        for name, _, tensor in tensors:
            tensor = tensor.detach()
            if self.done.whole is not None and not isinstance(tensor, DTensor):
                tensor = self.done.whole(name, tensor)
            values = (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()
            if name not in self._shapes:
                raise ValueError(
                    f"the parallelised module has a parameter {name}, which the module in one process does not have"
                )
            if tuple(values.shape) != self._shapes[name]:
                shapes = f"{tuple(values.shape)} on a rank and {self._shapes[name]} in one process"
                raise ValueError(
                    f"{kind} {name} has shape {shapes}; return Parallelized(whole=...) with a function that assembles "
                    "the whole tensor"
                )
            found[kind, name] = [whole_piece(values)]
        return found

    def _state(self) -> dict[str, Any]:
        """Return the state of all modules and optimizers on this rank, under global names."""
        state: dict[str, dict[str, Any]] = {"model": {}, "optimizer": {}}
        for part, optimizer in zip(self.done.parts, self.optimizers, strict=True):
            state["model"] |= get_model_state_dict(part)
            state["optimizer"] |= get_optimizer_state_dict(part, optimizer, options=OPTIONS)
        return state

    def _load(self, folder: str) -> None:
        """Load the checkpoint in `folder`. Collective. Floating-point tensors missing from the checkpoint become NaN."""
        state = self._state()
        for of in state.values():
            for value in of.values():
                if isinstance(value, Tensor) and value.is_floating_point():
                    local(value.detach()).fill_(torch.nan)
        dcp.load(state, checkpoint_id=folder)
        for part, optimizer in zip(self.done.parts, self.optimizers, strict=True):
            set_model_state_dict(part, state["model"], options=StateDictOptions(strict=False))
            set_optimizer_state_dict(part, optimizer, state["optimizer"], options=OPTIONS)


def _of_batch(seen: Sequence[Seen], rows: int) -> list[Seen]:
    """Return `seen` without warm-up calls, without wrappers in the names, and with `Seen.row` filled in.

    A warm-up call is an extra forward of PyTorch's pipelines before the first step, to infer shapes. rows: number of this
    rank's sequences. If a module has more than `rows` recorded sequences, the first ones belong to warm-up calls.
    """
    found: list[Seen] = []
    extra = Counter({key: -rows for key in ((one.name, one.output) for one in seen)})
    for one in seen:
        extra[one.name, one.output] += len(one.values)
    row: Counter[tuple[str, bool]] = Counter()
    for one in seen:
        key = one.name, one.output
        if extra[key] > 0:
            extra[key] -= len(one.values)
            continue
        found.append(replace(one, name=_plain(one.name), row=row[key]))
        row[key] += len(one.values)
    return found


def _read_whole(folder: str) -> dict[TensorKey, list[TensorPiece]]:
    """Return all floating-point tensors of a checkpoint, unsharded, under kind `saved`. Not collective."""
    metadata = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    wholes: dict[str, Any] = {
        name: torch.full(entry.size, torch.nan, dtype=entry.properties.dtype)
        for name, entry in metadata.items()
        if isinstance(entry, TensorStorageMetadata) and entry.properties.dtype.is_floating_point
    }
    dcp.load(wholes, checkpoint_id=folder, no_dist=True)
    return {("saved", name): [whole_piece(values)] for name, values in wholes.items()}


def _mean_over_ranks(loss: Tensor | None) -> Tensor:
    """Return the mean of `loss` over the ranks that have a loss, float64 `[]`. Collective: an all-reduce over all ranks."""
    own = torch.zeros(2, dtype=torch.float64)
    if loss is not None:
        own[0], own[1] = loss.detach(), 1.0
    dist.all_reduce(own)
    return own[0] / own[1]


def _scalar(value: Tensor) -> TensorPiece:
    whole = value.full_tensor() if isinstance(value, DTensor) else value
    return TensorPiece(torch.as_tensor(whole).detach().clone().double(), ())


def _plain(name: str) -> str:
    """Return the module name `name` without components added by wrappers (WRAPPERS)."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)
