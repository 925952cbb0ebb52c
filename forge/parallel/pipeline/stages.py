"""Which layers each stage of a pipeline holds: arithmetic, before anything is built."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise
from math import inf
from operator import add

from forge.config import Config
from forge.config.pipeline import number_of_stages
from forge.model.flops import mean_keys, parameter_counts
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
    return [
        Stage(index, range(end - count, end), embed=index == 0, head=index == len(counts) - 1)
        for index, (count, end) in enumerate(zip(counts, accumulate(counts), strict=True))
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
    before = [0, *accumulate(costs.layers)]

    def cost_of(index: int, begin: int, end: int) -> int:
        ends = costs.embedding * (index == 0) + costs.head * (index == stages - 1)
        return before[end] - before[begin] + ends

    def best(
        price: Callable[[int], float], total_of: Callable[[float, float], float]
    ) -> tuple[float, list[int]]:
        """The least total of the stages' prices, and where the stages end."""

        @cache
        def rest(index: int, begin: int) -> tuple[float, list[int]]:
            """Of the stages from `index` on, which hold the layers from `begin` on."""
            if index == stages - 1:
                return price(cost_of(index, begin, n_layers)), [n_layers]
            totals = {
                end: total_of(price(cost_of(index, begin, end)), rest(index + 1, end)[0])
                for end in range(n_layers - (stages - index - 1), begin, -1)
            }
            # Of equal ones min takes the first, which has more layers in front.
            end = min(totals, key=totals.__getitem__)
            return totals[end], [end, *rest(index + 1, end)[1]]

        return rest(0, 0)

    limit, _ = best(lambda cost: cost, max)
    _, ends = best(lambda cost: cost * cost if cost <= limit else inf, add)
    return [end - begin for begin, end in pairwise([0, *ends])]


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
            alone = parameter_counts(model, layers=range(layer, layer + 1), embed=False, head=False)
            known[kind] = alone.matmul + round(attention)
        layers.append(known[kind])
    head = model.vocab_size * model.dim
    return Costs(tuple(layers), embedding=head // 8, head=head)


def table(stages: Sequence[Stage], costs: Costs, rank_of: Sequence[int]) -> str:
    """One line per stage: where it lies, what it holds, its share of the work."""
    work = [costs.of(stage) for stage in stages]
    rows = [
        f"  stage {stage.index:>2}  pp rank {rank_of[stage.index]:>2}  {share / sum(work):>6.1%} of the work  {stage}"
        for stage, share in zip(stages, work, strict=True)
    ]
    return "\n".join(rows)
