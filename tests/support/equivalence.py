"""Compare three training steps on any layout with three steps of a plain, undistributed model in one process.

forge/tools/verify records and compares the steps in float64, so any difference is a difference in mathematics. A record has
the initial parameters. Per step it has the loss, every gradient, the global norm, every router's state and every updated
parameter. The optimizer is SGD, because AdamW divides by the gradient's scale and so hides a wrong scale.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from forge.batch import Batch
from forge.config import Config, parse_toml_text
from forge.shard import Shard
from forge.tools.verify.compare import TOLERANCE, compare_rank, elements, merge
from forge.tools.verify.pieces import TensorPiece, part_of
from forge.tools.verify.plain import plain_model, record_plain
from forge.tools.verify.ranks import run_ranks
from forge.tools.verify.record import PLAIN, RankRecord, Settings, Twist, WholeRecord, batches, record_on_rank

__all__ = ["PLAIN", "TOLERANCE", "RankRecord", "Twist", "WholeRecord", "plain_model"]

STEPS, LR, MAX_NORM = 3, 0.5, 0.3

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


def reference(text: str, twist: Twist = PLAIN) -> WholeRecord:
    """Record steps of a plain module: the whole global batch in one forward, with PyTorch's clipping and plain SGD."""
    return record_plain(text, settings(parse_toml_text(text), twist))


def layout(text: str, world: int, twist: Twist = PLAIN) -> list[RankRecord]:
    """Record the same steps through `build_parallel_model`, one record for each of `world` ranks."""
    return run_ranks(layout_on_rank, world, text, twist)


def layout_on_rank(rank: int, world: int, text: str, twist: Twist = PLAIN) -> RankRecord:
    """Record `layout` on one rank, for callers that prepare the rank first. Collective."""
    return record_on_rank(rank, world, text, settings(parse_toml_text(text), twist))


def alone(text: str) -> WholeRecord:
    """Record `layout` in one process. This is the reference for features that a plain module lacks, e.g. float8."""
    (record,) = layout(text, 1)
    return whole_of(record)


def whole_of(record: RankRecord) -> WholeRecord:
    """Convert the record of one process to a reference. Its tensors are whole."""
    return WholeRecord(
        [{key: _put_together(pieces) for key, pieces in step.pieces.items()} for step in record.steps], []
    )


def _put_together(pieces: list[TensorPiece]) -> torch.Tensor:
    ends = [[part.stop if isinstance(part, slice) else 1 + max(part) for part in one.place] for one in pieces]
    tensor = torch.zeros([max(of_dim) for of_dim in zip(*ends, strict=True)], dtype=pieces[0].values.dtype)
    for piece in pieces:
        part_of(tensor, piece.place).copy_(piece.values)
    return tensor


def losses(ranks: list[RankRecord]) -> list[float]:
    """Return the loss of each step, identical on all ranks."""
    return _scalars(ranks, "loss", "cross-entropy")


def norms(ranks: list[RankRecord]) -> list[float]:
    """Return the global gradient norm of each step, identical on all ranks."""
    return _scalars(ranks, "norm", "gradient")


def _scalars(ranks: list[RankRecord], kind: str, name: str) -> list[float]:
    """Return one number per step. Assert bitwise equality over ranks."""
    found = [[step.pieces[kind, name][0].values.item() for step in record.steps[1:]] for record in ranks]
    assert all(one == found[0] for one in found), f"ranks disagree about the {kind}"
    return found[0]


def routers(ranks: list[RankRecord]) -> list[dict[str, torch.Tensor]]:
    """Return each step's final router state and, as `layers.N`, its report's rows. Assert bitwise equality over ranks."""
    steps: list[dict[str, torch.Tensor]] = [{} for _ in ranks[0].steps[1:]]
    for record in ranks:
        for found, step in zip(steps, record.steps[1:], strict=True):
            for (kind, name), pieces in step.pieces.items():
                if kind == "router":
                    same = found.setdefault(name, pieces[0].values)
                    assert torch.equal(same, pieces[0].values), f"ranks disagree about the router {name}"
    return steps


def whole(shard: Shard, values: torch.Tensor) -> torch.Tensor:
    """Return the global tensor. values: this rank's part, laid out like `shard.data`. Collective."""
    out = torch.zeros(shard.global_shape, dtype=values.dtype)
    _place(shard, values, out)
    dist.all_reduce(out)
    return out


def _place(shard: Shard, values: torch.Tensor, out: torch.Tensor) -> None:
    """Write those pieces of this rank that are primary replicas into a global tensor."""
    for box, piece in shard.pieces(values):
        if shard.is_primary_replica:
            out[tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))] = piece


def wholes(shards: list[Shard], values: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return `whole` of every parameter by name. Ranks may hold different parameters. Collective."""
    own = {shard.name: (shard, value) for shard, value in zip(shards, values, strict=True)}
    assert len(own) == len(shards), "a name twice"
    shapes = gathered({name: shard.global_shape for name, (shard, _) in own.items()})
    sizes = {name: math.prod(shapes[name]) for name in sorted(shapes)}
    # One all-reduce for all parameters, in the dtype that represents every other.
    flat = torch.zeros(sum(sizes.values()), dtype=torch.float64)
    parts = zip(sizes, flat.split(list(sizes.values())), strict=True)
    outs = {name: part.view(tuple(shapes[name])) for name, part in parts}
    for name, (shard, value) in own.items():
        _place(shard, value, outs[name])
    dist.all_reduce(flat)
    formats = {name: value.dtype for name, (_, value) in own.items()}
    return {name: out.to(formats.get(name, values[0].dtype)) for name, out in outs.items()}


def gathered(own: dict) -> dict:
    """Return the union of all ranks' dictionaries; equal keys must have equal values. Collective."""
    everyone: list[dict] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, own)
    union = {name: value for one in everyone for name, value in one.items()}
    for one in everyone:
        same = (torch.equal(torch.as_tensor(union[n]), torch.as_tensor(v)) for n, v in one.items())
        assert all(same), "ranks disagree"
    return union


def assert_equal(ranks: list[RankRecord], expected: WholeRecord, tolerance: float = TOLERANCE) -> None:
    """Assert that every number on every rank is within `tolerance` (absolute) of `expected`, and that none is missing.

    Only formats narrower than float64 may have a tolerance above 1e-9.
    """
    for step in expected.steps:
        for (kind, name), values in step.items():
            assert kind != "gradient" or values.abs().max() > 0, f"{name} has no gradient to compare"
    own = [compare_rank(expected, rank, one, tolerance, absolute=True) for rank, one in enumerate(ranks)]
    found = merge(own, elements(expected))
    if found.differences:
        kinds = list(dict.fromkeys(key[0] for step in expected.steps for key in step))
        first = min(found.differences, key=lambda one: (one.step, kinds.index(one.kind)))
        raise AssertionError(
            f"{first.what}, step {first.step}, rank {first.rank}: differs by {first.size:.3e}"
        )
    for read in (losses, norms, routers):
        read(ranks)  # asserts bitwise equality over ranks
    assert not found.unplaced, f"not in the reference: {found.unplaced}"
    assert found.largest.keys() == {kind for step in expected.steps for kind, _ in step}
    for (number, key), counted in found.counted.items():
        # Two primary replicas of an element would count twice in the norm.
        if key[0] in ("initial", "gradient", "parameter"):
            assert counted == expected.steps[number][key].numel(), f"{key[1]} is counted by several ranks"


def config_batches(config: Config, rank: int, ranks: int) -> Iterator[Batch]:
    """Yield the batches of data rank `rank` in the steps of `config`."""
    return batches(config, rank, ranks, settings(config, PLAIN))
