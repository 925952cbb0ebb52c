"""Which layers each stage of a pipeline holds: arithmetic, before anything is built."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from forge.config import Config
from forge.config.pipeline import number_of_stages
from forge.model import Transformer
from forge.model.flops import mean_keys
from forge.model.transformer import window_of


@dataclass(frozen=True)
class Stage:
    """`layers`: global indices. `embed`, `head`: whether the model begins and ends here."""

    index: int
    layers: range
    embed: bool
    head: bool

    def __str__(self) -> str:
        layers = f"layers {self.layers[0]}-{self.layers[-1]}" if len(self.layers) > 1 else ""
        layers = f"layer {self.layers[0]}" if len(self.layers) == 1 else layers
        return ", ".join(
            part for part in ("embedding" * self.embed, layers, "norm and head" * self.head) if part
        )


@dataclass(frozen=True)
class Costs:
    """Multiply-adds of forward per token: of each layer, of the embedding, of norm and head."""

    layers: tuple[int, ...]
    embedding: int
    head: int

    def of(self, stage: Stage) -> int:
        ends = self.embedding * stage.embed + self.head * stage.head
        return sum(self.layers[layer] for layer in stage.layers) + ends


def make_stages(config: Config, stages: int = 0) -> list[Stage]:
    """The stages of `config`; `stages`: how many, where the configuration leaves it open."""
    chosen, n_layers = config.pipeline, config.model.n_layers
    if chosen.module_names:
        counts = [sum(name.startswith("layers.") for name in names) for names in chosen.module_names]
    elif chosen.layers_per_stage:
        counts = split_evenly(n_layers, number_of_stages(config))
    else:
        counts = split_by_cost(layer_costs(config), number_of_stages(config) or stages)
    ends = [sum(counts[: index + 1]) for index in range(len(counts))]
    return [
        Stage(index, range(end - count, end), embed=index == 0, head=index == len(counts) - 1)
        for index, (count, end) in enumerate(zip(counts, ends, strict=True))
    ]


def split_evenly(layers: int, stages: int) -> list[int]:
    """Numbers of layers that differ by at most one, the larger ones first."""
    return [layers // stages + (index < layers % stages) for index in range(stages)]


def split_by_cost(costs: Costs, stages: int) -> list[int]:
    """Numbers of layers, at least one in each stage, for which the most expensive stage is as cheap as can be.

    Of several such splits the most even one (by the sum of squares), and of these the one with more layers in front.
    """
    n_layers = len(costs.layers)
    assert 1 <= stages <= n_layers
    before = [0]
    for cost in costs.layers:
        before.append(before[-1] + cost)

    def cost_of(index: int, begin: int, end: int) -> int:
        ends = costs.embedding * (index == 0) + costs.head * (index == stages - 1)
        return before[end] - before[begin] + ends

    # lowest[begin]: of the stages from `index` on, which hold the layers from `begin` on, the dearest one's cost.
    lowest = [cost_of(stages - 1, begin, n_layers) for begin in range(n_layers)]
    for index in reversed(range(stages - 1)):
        lowest = [
            min(
                (
                    max(cost_of(index, begin, end), lowest[end])
                    for end in range(begin + 1, n_layers - (stages - index - 2))
                ),
                default=0,
            )
            for begin in range(n_layers)
        ]
    limit = lowest[0]
    # The same once more for the sum of squares, of splits within the limit.
    never = (stages + 1) * max(limit, 1) ** 2
    squares = [_square(cost_of(stages - 1, begin, n_layers), limit, never) for begin in range(n_layers)]
    choices: list[list[int]] = []
    for index in reversed(range(stages - 1)):
        chosen, totals = [0] * n_layers, [never] * n_layers
        for begin in range(n_layers):
            for end in reversed(range(begin + 1, n_layers - (stages - index - 2))):
                total = _square(cost_of(index, begin, end), limit, never) + squares[end]
                if total < totals[begin]:
                    totals[begin], chosen[begin] = total, end
        squares = totals
        choices.append(chosen)
    borders = [0]
    for chosen in reversed(choices):
        borders.append(chosen[borders[-1]])
    borders.append(n_layers)
    return [end - begin for begin, end in pairwise(borders)]


def _square(cost: int, limit: int, never: int) -> int:
    return cost * cost if cost <= limit else never


def layer_costs(config: Config) -> Costs:
    """What each layer of the model computes, counted from the model's own modules on the meta device.

    The look-up of the embedding is counted like an eighth of the head's product: it multiplies nothing, but moves as
    much, and its gradient is as large.
    """
    model, seq_len = config.model, config.train.seq_len
    known: dict[tuple[bool, int], int] = {}
    layers = []
    for layer in range(model.n_layers):
        window = window_of(model, layer)
        kind = (model.moe is not None and layer >= model.moe.n_dense_layers, window)
        if kind not in known:
            attention = 2 * model.n_heads * model.head_dim * mean_keys(seq_len, window)
            known[kind] = _matrix_elements(config, layer) + round(attention)
        layers.append(known[kind])
    head = model.vocab_size * model.dim
    return Costs(tuple(layers), embedding=head // 8, head=head)


def _matrix_elements(config: Config, layer: int) -> int:
    """Elements of the layer's matrices that one token is multiplied with."""
    with torch.device("meta"):
        part = Transformer(config.model, 1, layers=range(layer, layer + 1), embed=False, head=False)
    moe, elements = config.model.moe, 0
    for name, parameter in part.named_parameters():
        if not name.startswith("layers.") or parameter.ndim < 2:
            continue
        visited = moe.top_k / moe.n_experts if moe is not None and ".experts." in name else 1
        elements += round(parameter.numel() * visited)
    return elements


def table(stages: Sequence[Stage], costs: Costs, rank_of: Sequence[int]) -> str:
    """One line per stage: where it lies, what it holds, its share of the work."""
    work = [costs.of(stage) for stage in stages]
    rows = [
        f"  stage {stage.index:>2}  pp rank {rank_of[stage.index]:>2}  {share / sum(work):>6.1%} of the work  {stage}"
        for stage, share in zip(stages, work, strict=True)
    ]
    return "\n".join(rows)
