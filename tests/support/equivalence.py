"""Three training steps on any layout against three steps of a plain, undistributed model in one process.

Float64 everywhere, so that only the mathematics can differ. After each step: the loss, every gradient, the global norm,
the state of every router. After three steps of SGD: every parameter. SGD, because AdamW divides the gradient's scale away
and so hides wrong ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from forge.config import Config, check_world, parse_toml_text
from forge.data.build import build_dataset
from forge.data.loader import Loader
from forge.model import Normal, Transformer
from forge.parallel.build import build_meta_model, build_parallel_model
from forge.parallel.gradients import clip_gradients, report_gradients
from forge.parallel.initialize import fill_normal
from forge.parallel.mesh import make_meshes
from forge.parallel.model import ParallelModel
from forge.parallel.routers import RouterReport
from forge.shard import Box, Shard
from tests.support.harness import run_ranks

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


def tiny_config(*, parallel: str = "", model: str = "", micro: int = 1) -> str:
    return TINY.format(parallel=parallel, model=model, micro=micro)


@dataclass(frozen=True)
class Twist:
    """What a test does to both runs; functions at module level, so that they can be sent to ranks.

    routers: writes into the routers' weights (a rank's part of each) and biases at the start. labels: writes into the
    labels that a data rank reads, int64 `[sequences, seq]`, of every batch.
    """

    routers: Callable[[list[torch.Tensor], list[torch.Tensor]], None] | None = None
    labels: Callable[[torch.Tensor, int], None] | None = None

    def begin(self, weights: Iterable[torch.Tensor], biases: Iterable[torch.Tensor]) -> None:
        if self.routers is not None:
            self.routers(list(weights), list(biases))


PLAIN = Twist()


def reference(text: str, twist: Twist = PLAIN) -> Trace:
    """The whole global batch in one forward of a plain module, clipped by PyTorch, plain SGD."""
    config = parse_toml_text(text)
    model = plain_model(config)
    routers = model.routers.values()
    twist.begin([router.weight.data for router in routers], [router.bias for router in routers])
    trace = Trace()
    for batch in config_batches(config, 0, 1, twist):
        valid = (batch.labels >= 0).sum().clamp(min=1)
        model.set_loss_scale(1 / valid.double())
        losses = model(batch.tokens, batch.labels, batch.positions, batch.documents)
        model.zero_grad()
        (losses[0] / valid).backward()
        trace.losses.append((losses[1] / valid).item())
        trace.gradients.append({n: p.grad.clone() for n, p in model.named_parameters()})
        trace.norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= LR * parameter.grad
            trace.routers.append(_move_routers(model, valid))
    trace.parameters = {n: p.detach().clone() for n, p in model.named_parameters()}
    return trace


def _move_routers(model: Transformer, valid: torch.Tensor) -> dict[str, torch.Tensor]:
    """One step of every router's state, written out expert by expert; state and report as in `Trace.routers`."""
    moved = {}
    for layer, router in model.routers.items():
        moe, counts = router.config, router.counts.tolist()
        if moe.balance == "bias":
            for expert, count in enumerate(counts):
                even = sum(counts) / moe.n_experts
                router.bias[expert] += moe.bias_update_rate * ((count < even) - (count > even))
        router.previous_counts = router.counts.clone()
        losses = (router.losses / valid).tolist()
        ends = router.bias.min().item(), router.bias.max().item()
        moved[f"layers.{layer}"] = torch.tensor(
            [*counts, *losses, router.dropped.item(), *ends], dtype=torch.float64
        )
        moved |= {f"{layer}.{name}": getattr(router, name).clone() for name in ("bias", "previous_counts")}
        for name in ("counts", "losses", "dropped"):
            getattr(router, name).zero_()
    return moved


def plain_model(config: Config) -> Transformer:
    """The model of `config` in one process without any layout, at its start."""
    model = build_meta_model(config)
    model.to_empty(device="cpu")
    for name, parameter in model.named_parameters():
        start = model.initial_values()[name]
        if isinstance(start, Normal):
            box = Box((0,) * parameter.ndim, tuple(parameter.shape))
            fill_normal(parameter.data, box, parameter.shape, start.std, config.run.seed, name)
        else:
            torch.nn.init.constant_(parameter, start)
    model.reset_buffers(torch.float64)
    return model


def layout(text: str, world: int, twist: Twist = PLAIN) -> Trace:
    """The same three steps through `build_parallel_model` on `world` ranks; all ranks must agree on loss and norm."""
    traces = run_ranks(layout_on_rank, world, text, twist)
    for trace in traces[1:]:
        assert trace.losses == traces[0].losses and trace.norms == traces[0].norms, "ranks disagree"
        for mine, first in zip(trace.routers, traces[0].routers, strict=True):
            assert all(torch.equal(mine[name], state) for name, state in first.items()), "routers disagree"
    return traces[0]


def layout_on_rank(rank: int, world: int, text: str, twist: Twist = PLAIN) -> Trace:
    config = parse_toml_text(text)
    meshes = make_meshes(check_world(config, world), "cpu")
    model = build_parallel_model(config, meshes, torch.device("cpu"))
    weights = [shard.data for shard in model.shards if shard.name.endswith("router.weight")]
    twist.begin(weights, [shard.data for shard in model.buffers if shard.name.endswith("bias")])
    trace = Trace()
    for batch in config_batches(config, meshes.data_rank, meshes.data_ranks, twist):
        tokens = model.count_tokens(batch)
        sums = model.forward_backward(batch, tokens)
        model.finalize_gradients()
        report = report_gradients(model.shards, sums.objective, stop=False)
        trace.losses.append((sums.cross_entropy / sums.tokens.clamp(min=1)).item())
        trace.norms.append(report.norm.item())
        gradients = wholes(model.shards, [shard.grad for shard in model.shards])
        trace.gradients.append(gradients if rank == 0 else {})
        clip_gradients(model.shards, report.norm, MAX_NORM)
        for shard in model.shards:
            if shard.grad is not None:
                shard.data.sub_(LR * shard.grad)
        model.after_update()
        trace.routers.append(_routers(model, model.update_router(report.skip)))
        model.zero_gradients()
    parameters = wholes(model.shards, [shard.data for shard in model.shards])
    trace.parameters = parameters if rank == 0 else {}
    return trace


def _routers(model: ParallelModel, report: RouterReport | None) -> dict[str, torch.Tensor]:
    """What `_move_routers` returns of the reference."""
    if report is None:
        return {}
    rows = {f"layers.{layer}": row for layer, row in zip(report.layers, report.values.clone(), strict=True)}
    state = gathered({shard.name: shard.data.clone() for shard in model.buffers})
    return rows | {f"{n.split('.')[1]}.{n.rpartition('.')[2]}": value for n, value in state.items()}


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


def config_batches(config: Config, rank: int, ranks: int, twist: Twist = PLAIN):
    loader = Loader(
        build_dataset(config),
        global_batch_size=config.train.global_batch_size,
        rank=rank,
        ranks=ranks,
        start_sample=0,
        device=torch.device("cpu"),
        prefetch=1,
    )
    for _ in range(config.train.steps):
        batch = next(loader)
        if twist.labels is not None:
            twist.labels(batch.labels, rank)
        yield batch
    loader.close()
