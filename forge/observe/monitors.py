"""Monitors: a few statistics of a step for each layer and matrix, equal in all layouts.

Every number is a sum, a count or a maximum over this rank's data, so the ranks' numbers combine to those of one
process. A mean is a sum divided by a count, both summed over ranks, so duplicated work cancels out. All numbers are in
one device vector, summed by one all-reduce over all ranks. A maximum has one row per rank: each rank writes its own
row, and the other ranks have zeros there. After the all-reduce, the maximum over rows is taken. Nothing synchronises
with the device.

    activations  after each block: root mean square and largest absolute value; for each feed-forward the fraction of
                 dead units (open for less than 0.1 % of the tokens) and of saturated units (open for more than 99.9 %).
                 A unit is open for a token if its gate w1 x is positive
    attention    largest logit and mean entropy of the softmax, for QUERIES queries evenly spread over each sequence;
                 measuring all queries would cost as much as attention itself
    experts      mean entropy of a router's scores, and entropy of the load. 1: even; 0: one expert gets everything
    gradients    L2 norm of the gradient of each parameter, before clipping
    weights      L2 norm of each parameter, after the update
    updates      L2 norm of each parameter's change, relative to the parameter's norm
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from forge.config.schema import Metrics
from forge.model import Transformer
from forge.model.feed_forward import FeedForward
from forge.model.moe import MoE
from forge.model.norm import promoted
from forge.model.sdpa import dense_part
from forge.runtime import compat
from forge.shard import Shard, local

QUERIES = 32
RARELY = 1e-3
MATRICES = ("gradients", "weights", "updates")


def is_monitored(config: Metrics, step: int) -> bool:
    """Return whether the monitors of `step` are due."""
    return config.monitor_interval > 0 and (step == 1 or step % config.monitor_interval == 0)


class Monitors:
    """The monitors `chosen` of a model. Each monitored step starts with `begin`.

    parts: this rank's pipeline stages. names: the parameters of the whole model. n_layers: number of layers of the
    whole model. units: the largest hidden size of a feed-forward. world: (this rank, number of ranks). tp: (rank, number of
    ranks) within tensor parallelism. compiled: True if blocks are compiled. Attention and feed-forward units are then
    inside the graphs and are not measured.
    """

    def __init__(
        self,
        chosen: Sequence[str],
        parts: Sequence[Transformer],
        names: Sequence[str],
        *,
        n_layers: int,
        units: int,
        world: tuple[int, int] = (0, 1),
        tp: tuple[int, int] = (0, 1),
        compiled: bool = False,
        device: torch.device,
    ):
        self._chosen = set(chosen)
        self._blocks: dict[int, Any] = {
            int(name): block for part in parts for name, block in part.layers.items()
        }
        self._rows = {name: row for row, name in enumerate(names)}
        self._tp, self._compiled, self._device = tp, compiled, device
        rank, ranks = world
        sums: dict[str, tuple[int, ...]] = {
            "maxima": (ranks, 2, n_layers),
            "activations": (n_layers, 2),
            "attention": (n_layers, 2),
            "experts": (n_layers, 2),
        }
        if "activations" in chosen and not compiled:
            sums["units"] = (n_layers, 2, units)
        sums |= {name: (len(names),) for name in MATRICES if name in chosen}
        if "updates" in chosen:
            sums["weights"] = (len(names),)
        self._sums, self._flat = _views(sums, device)
        self._own_maxima = self._sums["maxima"][rank]
        activations, attention = self._own_maxima
        self._maxima = {"activations": activations, "attention": attention}
        # Views of each layer's numbers, made once, not in each step.
        self._of_layer = {
            name: [row.unbind() for row in view.unbind()]
            for name, view in self._sums.items()
            if name in ("activations", "attention", "experts", "units")
        }
        self._max_of_layer = {name: view.unbind() for name, view in self._maxima.items()}
        self._handles: list[Callable[[], None]] = []
        self._seen: dict[int, list[tuple[Any, ...]]] = {}
        self._before: list[tuple[Shard, Tensor]] = []
        self._index: dict[tuple[int, ...], Tensor] = {}

    def begin(self) -> None:
        """Begin a monitored step: reset all numbers and register the hooks."""
        self.remove()
        self._flat.zero_()
        self._own_maxima.fill_(-torch.inf)
        for layer, block in self._blocks.items():
            self._watch(layer, block)

    def remove(self) -> None:
        """Remove all hooks from the model."""
        for handle in self._handles:
            handle()
        self._handles.clear()
        self._seen.clear()
        self._before = []

    def count_gradients(self, shards: Sequence[Shard]) -> None:
        """Add up the squares of the gradients. Call when the gradients of the global batch are complete in the shards."""
        if "gradients" in self._chosen:
            self._add_squares(
                "gradients", [(shard, shard.grad) for shard in shards if shard.grad is not None]
            )

    def before_update(self, shards: Sequence[Shard]) -> None:
        """Copy the parameters before the update. The copies fit, because the step's activations are already freed."""
        if "updates" in self._chosen:
            own = [shard for shard in shards if shard.boxes and shard.is_primary_replica]
            self._before = [(shard, shard.data.clone()) for shard in own]

    def after_update(self, shards: Sequence[Shard]) -> None:
        """Add up the squares of the parameters' changes and of the new parameters. Call after each monitored update."""
        if "updates" in self._chosen:
            changes = [(shard, before.sub_(shard.data)) for shard, before in self._before]
            self._add_squares("updates", changes)
            self._before = []
        if "weights" in self._sums:
            self._add_squares("weights", [(shard, shard.data) for shard in shards])

    def reduce(self) -> Tensor:
        """Return the step's numbers as a device vector for `read`: float64 `[n]`, equal on all ranks.

        Collective over all ranks.
        """
        dist.all_reduce(self._flat)
        parts = [self._sums[name] for name in self._reported_sums]
        if "units" in self._sums:
            opened, tokens = self._sums["units"].unbind(1)
            share, there = opened / tokens.clamp(min=1), tokens > 0
            count = there.sum(1).clamp(min=1)
            parts.append(
                torch.stack(
                    [(there & (share < RARELY)).sum(1) / count, (share > 1 - RARELY).sum(1) / count, count]
                )
            )
        return torch.cat([self._sums["maxima"].amax(0).flatten(), *(part.flatten() for part in parts)])

    @property
    def _reported_sums(self) -> list[str]:
        return [name for name in self._sums if name not in ("maxima", "units")]

    def read(self, values: Sequence[float]) -> dict[str, Any]:
        """Return monitor name -> layer or parameter name -> values. values: the result of `reduce`, on the host."""
        vector, found = torch.tensor(values, dtype=torch.float64), dict[str, Any]()
        cut: dict[str, Tensor] = {}
        at = 0
        for kind, shapes in (
            ("max", self._maxima),
            ("sum", {name: self._sums[name] for name in self._reported_sums}),
        ):
            for name, view in shapes.items():
                cut[f"{kind} {name}"] = vector[at : at + view.numel()].view(view.shape)
                at += view.numel()
        if "activations" in self._chosen:
            squares, count = cut["sum activations"].unbind(1)
            found["activations"] = _by_layer(count, rms=(squares / count).sqrt(), max=cut["max activations"])
            if "units" in self._sums:
                dead, saturated, _ = vector[at:].view(3, -1)
                found["units"] = _by_layer(torch.ones_like(dead), dead=dead, saturated=saturated)
        if "attention" in self._chosen and not self._compiled:
            entropy, count = cut["sum attention"].unbind(1)
            found["attention"] = _by_layer(count, max_logit=cut["max attention"], entropy=entropy / count)
        if "experts" in self._chosen:
            entropy, count = cut["sum experts"].unbind(1)
            found["experts"] = _by_layer(count, score_entropy=entropy / count)
        norms = {name: cut[f"sum {name}"].sqrt() for name in MATRICES if f"sum {name}" in cut}
        if "updates" in norms:
            norms["updates"] = norms["updates"] / norms["weights"]
        for name in MATRICES:
            if name in self._chosen:
                found[name] = dict(zip(self._rows, norms[name].tolist(), strict=True))
        return {name: values for name, values in found.items() if values}

    def _add_squares(self, name: str, tensors: Sequence[tuple[Shard, Tensor]]) -> None:
        """Add the sum of squares of each shard's tensor to the row of its parameter. name: the monitor.

        Elements with replicas on several ranks are counted on one rank only.
        """
        kinds: dict[tuple[torch.dtype, torch.device], list[tuple[int, Tensor]]] = {}
        for shard, tensor in tensors:
            if shard.boxes and shard.is_primary_replica and shard.name in self._rows:
                kinds.setdefault((tensor.dtype, tensor.device), []).append((self._rows[shard.name], tensor))
        for (dtype, _), found in kinds.items():
            norms = torch._foreach_norm([tensor for _, tensor in found], 2, dtype=promoted(dtype))
            squares = torch.stack(norms).double().square().to(self._device)
            self._sums[name].index_add_(0, self._indices(tuple(row for row, _ in found)), squares)

    def _indices(self, rows: tuple[int, ...]) -> Tensor:
        if rows not in self._index:
            self._index[rows] = torch.tensor(rows, device=self._device)
        return self._index[rows]

    def _watch(self, layer: int, block: Any) -> None:
        """Register hooks on a block.

        The hooks only store tensors. `_measure` measures them after the block returns, because activation checkpointing
        would record any computation inside the block.
        """
        seen = self._seen[layer] = []
        if "attention" in self._chosen and not self._compiled and hasattr(block.attention, "attend"):
            latent = hasattr(block.attention.attend, "attend_latent")
            watched = (_WatchedLatents if latent else _WatchedAttention)(block.attention.attend, seen)
            self._handles.append(
                functools.partial(setattr, block.attention, "attend", block.attention.attend)
            )
            block.attention.attend = watched
        for module in block.modules():
            if isinstance(module, FeedForward) and "units" in self._sums:
                handle = module.w1.register_forward_hook(
                    functools.partial(_keep_gate, seen, module.w1.out_features)
                )
                self._handles.append(handle.remove)
        if "experts" in self._chosen and isinstance(block.feed_forward, MoE):
            router: Any = block.feed_forward.router
            self._handles.append(functools.partial(setattr, router, "route", router.route))
            router.route = functools.partial(_keep_scores, seen, router, router.route)
        handle = block.register_forward_hook(functools.partial(self._measure, layer))
        self._handles.append(handle.remove)

    @torch.no_grad()
    def _measure(self, layer: int, _block: nn.Module, _inputs: Any, output: Any) -> None:
        """Measure a block's output and the tensors that its hooks have stored."""
        kept, self._seen[layer][:] = list(self._seen[layer]), []
        if torch._C._current_graph_task_id() != -1:
            return  # recomputation in backward
        if "activations" in self._chosen:
            x = local(output)
            square = torch.linalg.vector_norm(x, dtype=promoted(x.dtype)).double().square()
            _add(self._of_layer["activations"][layer], square, x.numel())
            _raise_to(self._max_of_layer["activations"][layer], torch.linalg.vector_norm(x, torch.inf))
        for kind, *tensors in kept:
            getattr(self, f"_measure_{kind}")(layer, *tensors)

    def _measure_gate(self, layer: int, gate: Tensor, units: int) -> None:
        """Count the open units of a feed-forward.

        gate: values of the gate, `[batch, seq, n]`, for all `units` or for this tensor-parallel rank's share of them.
        """
        opened = (local(gate) > 0).flatten(0, -2)
        tokens, own = opened.shape
        rank, ranks = self._tp
        first = rank * -(-units // ranks) if own < units else 0
        opens, counts = self._of_layer["units"][layer]
        opens[first : first + own] += opened.sum(0)
        counts[first : first + own] += tokens

    def _measure_scores(self, layer: int, scores: Tensor) -> None:
        """Measure the entropy of router scores. scores: non-negative, `[..., n_experts]`."""
        scores = scores.flatten(0, -2)
        share = scores / scores.sum(-1, keepdim=True).clamp(min=torch.finfo(scores.dtype).tiny)
        entropy = torch.special.entr(share).sum().double() / math.log(max(scores.shape[-1], 2))
        _add(self._of_layer["experts"][layer], entropy, len(scores))

    def _measure_attention(self, layer: int, q: Tensor, k: Tensor, mask: Any, split: Any) -> None:
        """Measure the largest logit and the entropy of attention for this rank's queries.

        Collective over cp ranks. q `[batch, heads, seq, head_dim]`, k `[batch, kv_heads, seq, head_dim]`.
        """
        if split is not None:
            k = split.in_order(compat.all_gather(k.contiguous().unsqueeze(0), split.group))
        where, positions = chosen_queries(k.shape[2], split, q.device)
        if not len(where):
            return
        exact = promoted(q.dtype)
        q = q[:, :, where].to(exact).unflatten(1, (k.shape[1], -1))
        logits = (q @ k.to(exact).unsqueeze(2).transpose(-1, -2)).flatten(1, 2) * q.shape[-1] ** -0.5
        keys = torch.arange(k.shape[2], device=k.device)
        hidden = ~dense_part(mask.window, mask.documents, positions, keys)
        shown = logits.masked_fill(hidden, -torch.inf)
        _raise_to(self._max_of_layer["attention"][layer], shown.amax())
        if mask.soft_cap:
            capped = mask.soft_cap * torch.tanh(logits / mask.soft_cap)
            shown = capped.masked_fill(hidden, -torch.inf)
        shares = shown.softmax(-1)
        _add(
            self._of_layer["attention"][layer],
            torch.special.entr(shares).sum().double(),
            logits[..., 0].numel(),
        )


class _WatchedAttention:
    """Calls the attention function `attend`, and stores queries, keys and mask for `_measure_attention`."""

    def __init__(self, attend: Any, seen: list[tuple[Any, ...]]):
        self._attend, self._seen = attend, seen

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Any, *more: Any, **named: Any) -> Tensor:
        _keep(self._seen, "attention", q, k, mask, getattr(self._attend, "split", None))
        return self._attend(q, k, v, mask, *more, **named)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._attend, name)


class _WatchedLatents(_WatchedAttention):
    """Like `_WatchedAttention`, for an attention function with `attend_latent`."""

    def attend_latent(self, layer: Any, q: Tensor, latent: Tensor, key: Tensor, mask: Any) -> Tensor:
        with torch.no_grad():
            k, _ = layer.expand(latent, key)
        _keep(self._seen, "attention", q, k, mask, self._attend.split)
        return self._attend.attend_latent(layer, q, latent, key, mask)


def _keep(seen: list[tuple[Any, ...]], *found: Any) -> None:
    """Append `found` to `seen`, except during recomputation in backward."""
    if torch._C._current_graph_task_id() == -1:
        seen.append(found)


def _keep_gate(
    seen: list[tuple[Any, ...]], units: int, _module: nn.Module, _inputs: Any, gate: Tensor
) -> None:
    _keep(seen, "gate", gate, units)


def _keep_scores(
    seen: list[tuple[Any, ...]],
    router: Any,
    route: Callable[..., Any],
    x: Tensor,
    labels: Tensor | None,
    noise: Tensor | None,
    sums: Tensor,
) -> Any:
    """Call `route` and return its result. Also store the router's scores in `seen`.

    The scores are computed again, because `route` may be compiled. Selective checkpointing must not see the computation,
    because recomputation does not repeat it.
    """
    if torch._C._current_graph_task_id() == -1:
        with torch.no_grad(), _disable_current_modes():
            seen.append(("scores", router.score(x, noise)[1]))
    return route(x, labels, noise, sums)


@functools.lru_cache(maxsize=8)
def chosen_queries(seq: int, split: Any, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the indices of this rank's measured queries, and their positions in the sequence. Both are int64 `[n]`.

    The sequence is divided into QUERIES equal parts, and the last position of each part is measured. In a sequence of
    fewer than QUERIES tokens, all positions are measured.
    """
    count = min(QUERIES, seq)
    wanted = torch.tensor([(part + 1) * seq // count - 1 for part in range(count)])
    own = torch.arange(seq) if split is None else split.indices(seq, torch.device("cpu"))
    where = torch.isin(own, wanted).nonzero().flatten()
    return where.to(device), own[where].to(device)


def _add(place: Sequence[Tensor], value: Tensor, count: int) -> None:
    """Add `value` and `count` in place to `place`, the pair (sum, count) on the device.

    `count` is a host number and becomes a kernel argument, so no copy to the device is needed.
    """
    total, number = place
    total += value
    number += count


def _raise_to(place: Tensor, value: Tensor) -> None:
    torch.maximum(place, value, out=place)


def _views(shapes: Mapping[str, tuple[int, ...]], device: torch.device) -> tuple[dict[str, Tensor], Tensor]:
    """Make one float64 vector of zeros. Return a dict of views of its parts, and the vector.

    shapes: name -> shape of the view. The views cover the vector in order.
    """
    sizes = [torch.Size(shape).numel() for shape in shapes.values()]
    flat = torch.zeros(sum(sizes), dtype=torch.float64, device=device)
    parts = flat.split(sizes)
    return {name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}, flat


def _by_layer(count: Tensor, **values: Tensor) -> dict[str, dict[str, float]]:
    """Return layer -> name -> value. Only measured layers are included: those with a count above 0."""
    return {
        str(layer): {name: float(of_layers[layer]) for name, of_layers in values.items()}
        for layer in range(len(count))
        if count[layer] > 0
    }
