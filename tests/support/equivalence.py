"""Three training steps on any layout against three steps of a plain, undistributed model in one process.

Float64 everywhere, so that only the mathematics can differ. After each step: the loss, every gradient, the global norm,
the state of every router. After three steps of SGD: every parameter. SGD, because AdamW divides the gradient's scale away
and so hides wrong ones.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from forge.config import Config, parse_toml_text
from forge.data.loader import Batch
from forge.shard import Shard
from forge.verify.pieces import Key, part_of
from forge.verify.plain import plain_model, record_plain
from forge.verify.ranks import run_ranks
from forge.verify.record import PLAIN, RankRecord, Settings, Twist, batches, record_on_rank

__all__ = ["PLAIN", "Twist", "plain_model"]

STEPS, LR, MAX_NORM, TOLERANCE = 3, 0.5, 0.3, 1e-9

TINY = """
[model]
dim = 32
n_layers = 3
n_heads = 4
n_kv_heads = 2
ffn_dim = 48
vocab_size = 67
{model}
[parallel]
{parallel}
[precision]
storage = "float64"
compute = "float64"
reduce = "float64"
[data]
sources = [{{path = "synthetic", weight = 1.0}}]
document_mask = true
[train]
steps = 3
seq_len = 80
global_batch_size = 8
micro_batch_size = {micro}
z_loss_coef = 0.01
loss_chunk_tokens = 32
"""


@dataclass
class Trace:
    """What a run computed: per step the loss, norm and gradients (before clipping), and the parameters at the end.

    routers: per step the balancing state after it and, as `layers.N`, the row of the step's report.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: list[dict[str, torch.Tensor]] = field(default_factory=list)
    parameters: dict[str, torch.Tensor] = field(default_factory=dict)
    routers: list[dict[str, torch.Tensor]] = field(default_factory=list)

    def add(self, step: dict[Key, torch.Tensor]) -> None:
        """Add what a step computed, as whole tensors."""
        kinds: dict[str, dict[str, torch.Tensor]] = defaultdict(dict)
        for (kind, name), tensor in step.items():
            kinds[kind][name] = tensor
        self.losses.append(kinds["loss"]["cross-entropy"].item())
        self.norms.append(kinds["norm"]["gradient"].item())
        self.gradients.append(kinds["gradient"])
        self.routers.append(kinds["router"])
        self.parameters = kinds["parameter"]


def tiny_config(*, parallel: str = "", model: str = "", micro: int = 1) -> str:
    return TINY.format(parallel=parallel, model=model, micro=micro)


class Descent:
    """Plain stochastic gradient descent."""

    def __init__(self, shards: list[Shard], _config: Config, _group: Any):
        self._shards = shards

    def step(self, lr: float, skip: torch.Tensor) -> None:
        for shard in self._shards:
            if shard.grad is not None:
                shard.data.sub_(lr * shard.grad)

    def tensors(self) -> Iterator[tuple[str, Shard, torch.Tensor]]:
        return iter(())

    def state(self) -> dict[str, Any]:
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        pass


def settings(config: Config, twist: Twist) -> Settings:
    return Settings(config.train.steps, LR, MAX_NORM, Descent, twist)


def reference(text: str, twist: Twist = PLAIN) -> Trace:
    """The whole global batch in one forward of a plain module, clipped by PyTorch, plain SGD."""
    trace = Trace()
    for step in record_plain(text, settings(parse_toml_text(text), twist)).steps[1:]:
        trace.add(step)
    return trace


def layout(text: str, world: int, twist: Twist = PLAIN) -> Trace:
    """The same three steps through `build_parallel_model` on `world` ranks; all ranks must agree on loss and norm."""
    traces = run_ranks(layout_on_rank, world, text, twist)
    for trace in traces[1:]:
        assert trace.losses == traces[0].losses and trace.norms == traces[0].norms, "ranks disagree"
    return traces[0]


def layout_on_rank(rank: int, world: int, text: str, twist: Twist = PLAIN) -> Trace:
    """On rank 0 everything as whole tensors, on other ranks losses and norms only. Collective."""
    own = record_on_rank(rank, world, text, settings(parse_toml_text(text), twist))
    everyone: list[Any] = [None] * world
    dist.gather_object(own, everyone if rank == 0 else None)
    trace = Trace()
    for number, mine in enumerate(own.steps[1:], start=1):
        scalars = {key: pieces[0].values for key, pieces in mine.pieces.items() if key[0] in ("loss", "norm")}
        trace.add((_put_together(everyone, number) if rank == 0 else {}) | scalars)
    return trace


def _put_together(ranks: list[RankRecord], number: int) -> dict[Key, torch.Tensor]:
    """Whole tensors of the pieces that ranks count; the state of routers, which is whole on every rank, must be equal."""
    sizes: dict[Key, list[int]] = {}
    for record in ranks:
        for key, pieces in record.steps[number].pieces.items():
            for piece in pieces:
                ends = [part.stop if isinstance(part, slice) else 1 + max(part) for part in piece.place]
                sizes[key] = [max(pair) for pair in zip(sizes.get(key, ends), ends, strict=True)]
    wholes: dict[Key, torch.Tensor] = {}
    for record in ranks:
        for key, pieces in record.steps[number].pieces.items():
            for piece in pieces:
                if key[0] == "router":
                    found = wholes.setdefault(key, piece.values)
                    assert torch.equal(found, piece.values), "routers disagree"
                elif piece.counted:
                    here = wholes.setdefault(key, torch.zeros(sizes[key], dtype=piece.values.dtype))
                    # Added: an element that two ranks count is wrong.
                    part_of(here, piece.place).add_(piece.values)
    return wholes


def whole(shard: Shard, values: torch.Tensor) -> torch.Tensor:
    """The global tensor of which `values` (laid out like `shard.data`) are this rank's part. Collective."""
    out = torch.zeros(shard.global_shape, dtype=values.dtype)
    _place(shard, values, out)
    dist.all_reduce(out)
    return out


def _place(shard: Shard, values: torch.Tensor, out: torch.Tensor) -> None:
    """Write the pieces that this rank counts into a global tensor."""
    for box, piece in shard.pieces(values):
        if shard.counted:
            out[tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))] = piece


def wholes(shards: list[Shard], values: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """`whole` of every parameter of the model, by name, though ranks may hold different ones. Collective."""
    own = {shard.name: (shard, value) for shard, value in zip(shards, values, strict=True)}
    assert len(own) == len(shards), "a name twice"
    shapes = gathered({name: shard.global_shape for name, (shard, _) in own.items()})
    sizes = {name: math.prod(shapes[name]) for name in sorted(shapes)}
    # One sum for all, in the format that holds the values of every other.
    flat = torch.zeros(sum(sizes.values()), dtype=torch.float64)
    parts = zip(sizes, flat.split(list(sizes.values())), strict=True)
    outs = {name: part.view(tuple(shapes[name])) for name, part in parts}
    for name, (shard, value) in own.items():
        _place(shard, value, outs[name])
    dist.all_reduce(flat)
    formats = {name: value.dtype for name, (_, value) in own.items()}
    return {name: out.to(formats.get(name, values[0].dtype)) for name, out in outs.items()}


def gathered(own: dict) -> dict:
    """The union of all ranks' dictionaries; where several have a name, they must agree. Collective."""
    everyone: list[dict] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, own)
    union = {name: value for one in everyone for name, value in one.items()}
    for one in everyone:
        same = (torch.equal(torch.as_tensor(union[n]), torch.as_tensor(v)) for n, v in one.items())
        assert all(same), "ranks disagree"
    return union


def assert_equal(actual: Trace, expected: Trace, tolerance: float = TOLERANCE) -> None:
    """Every number of `actual` is within `tolerance` of the number of `expected`, in absolute terms.

    Another tolerance than 1e-9 is for formats narrower than float64 only.
    """
    for step in range(len(expected.losses)):
        _close(
            tolerance,
            f"loss of step {step}",
            torch.tensor(actual.losses[step]),
            torch.tensor(expected.losses[step]),
        )
        _close(
            tolerance,
            f"norm of step {step}",
            torch.tensor(actual.norms[step]),
            torch.tensor(expected.norms[step]),
        )
        assert actual.gradients[step].keys() == expected.gradients[step].keys()
        for name, gradient in expected.gradients[step].items():
            assert gradient.abs().max() > 0, f"{name} has no gradient to compare"
            _close(tolerance, f"gradient of {name}, step {step}", actual.gradients[step][name], gradient)
        assert actual.routers[step].keys() == expected.routers[step].keys()
        for name, state in expected.routers[step].items():
            _close(tolerance, f"router state {name}, step {step}", actual.routers[step][name], state)
    for name, parameter in expected.parameters.items():
        _close(tolerance, f"parameter {name}", actual.parameters[name], parameter)


def _close(tolerance: float, what: str, actual: torch.Tensor, expected: torch.Tensor) -> None:
    difference = (actual - expected).abs().max().item()
    assert difference <= tolerance, f"{what}: differs by {difference:.3e}"


def config_batches(config: Config, rank: int, ranks: int) -> Iterator[Batch]:
    """What a data rank reads in the steps of `config`."""
    return batches(config, rank, ranks, settings(config, PLAIN))
