"""The split of layers into stages: each layer in one stage, in order, balanced."""

import itertools
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forge.config import parse_toml_text, to_toml, unused_keys
from forge.config.pipeline import number_of_stages
from forge.parallel.pipeline.plan import (
    Costs,
    layer_costs,
    make_stages,
    split_by_cost,
    split_evenly,
    table,
)
from forge.runtime.errors import UserError
from tests.support.configs import pipeline_config as config


def refusal(*arguments, **keys) -> str:
    with pytest.raises(UserError) as caught:
        config(*arguments, **keys)
    return str(caught.value)


def cost_of(counts: list[int], costs: Costs) -> list[int]:
    ends = list(itertools.accumulate(counts))
    sums = [sum(costs.layers[end - count : end]) for count, end in zip(counts, ends, strict=True)]
    sums[0] += costs.embedding
    sums[-1] += costs.head
    return sums


@settings(max_examples=200)
@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=9),
    st.integers(0, 60),
    st.integers(0, 60),
    st.integers(1, 9),
)
def test_no_split_has_a_cheaper_maximum_stage(
    layers: list[int], embedding: int, head: int, stages: int
) -> None:
    stages = min(stages, len(layers))
    costs = Costs(tuple(layers), embedding, head)
    counts = split_by_cost(costs, stages)
    assert sum(counts) == len(layers) and len(counts) == stages and min(counts) >= 1
    borders = itertools.combinations(range(1, len(layers)), stages - 1)
    every = [
        cost_of([b - a for a, b in itertools.pairwise((0, *inner, len(layers)))], costs) for inner in borders
    ]
    best = min((max(split), sum(c * c for c in split)) for split in every)
    found = cost_of(counts, costs)
    assert (max(found), sum(c * c for c in found)) == best


@given(st.integers(1, 200), st.integers(1, 40))
def test_an_even_split_differs_by_one_layer_at_most(layers: int, stages: int) -> None:
    counts = split_evenly(layers, stages)
    assert sum(counts) == layers and max(counts) - min(counts) <= 1
    assert counts == sorted(counts, reverse=True)


def test_a_heavy_head_and_experts_make_their_stages_shorter() -> None:
    heavy = make_stages(config(12, 4, model="").model_copy(deep=True))
    assert [len(stage.layers) for stage in heavy] == [3, 3, 3, 3]
    wide = config(12, 4).model_copy(
        update={"model": config(12, 4).model.model_copy(update={"vocab_size": 4096})}
    )
    counts = [len(stage.layers) for stage in make_stages(wide)]
    assert counts[-1] < min(counts[1:-1]) and counts[0] < counts[1]
    moe = config(12, 4, model="moe = { n_experts = 8, top_k = 4, expert_dim = 96, n_dense_layers = 6 }")
    costs = layer_costs(moe)
    assert costs.layers[0] < costs.layers[-1] and len(set(costs.layers)) == 2
    counts = [len(stage.layers) for stage in make_stages(moe)]
    assert counts[0] > counts[-1]


def test_a_custom_model_is_split_by_its_flops() -> None:
    plain = config(4, 2)
    own = config(4, 2, model='kind = "tests.support.small_models:Wider"')
    dim, seq_len = own.model.dim, own.train.seq_len
    more = layer_costs(own).layers[-1] - layer_costs(plain).layers[-1]
    assert layer_costs(own).layers[:-1] == layer_costs(plain).layers[:-1]
    assert abs(more - (3 * dim * dim + 1000 * seq_len / 6)) <= 1


def test_stages_cover_the_model_and_only_its_ends_have_ends() -> None:
    stages = make_stages(config(9, 2, 'schedule = "Interleaved1F1B"'))
    assert [layer for stage in stages for layer in stage.layers] == list(range(9))
    assert [stage.embed for stage in stages] == [True, False, False, False]
    assert [stage.head for stage in stages] == [False, False, False, True]


@pytest.mark.parametrize(
    ("n_layers", "pp", "schedule", "layers_per_stage", "rounding", "stages"),
    [
        (8, 2, "1F1B", 4, "error", 2),
        (8, 2, "Interleaved1F1B", 2, "error", 4),
        (10, 2, "LoopedBFS", 2, "up", 6),
        (10, 2, "LoopedBFS", 2, "down", 4),
        (7, 2, "InterleavedZeroBubble", 1, "up", 8),
        (16, 4, "ZBVZeroBubble", 2, "error", 8),
        (9, 3, "GPipe", 4, "error", 3),
    ],
)
def test_layers_per_stage_are_rounded_as_asked(
    n_layers: int, pp: int, schedule: str, layers_per_stage: int, rounding: str, stages: int
) -> None:
    text = f'schedule = "{schedule}"\nlayers_per_stage = {layers_per_stage}\nround = "{rounding}"'
    if stages > n_layers:
        assert f"layers into {stages} stage" in refusal(n_layers, pp, text)
        return
    made = config(n_layers, pp, text)
    assert number_of_stages(made) == stages == len(make_stages(made))


@pytest.mark.parametrize(
    ("n_layers", "pp", "pipeline", "message"),
    [
        (10, 2, 'schedule = "LoopedBFS"\nlayers_per_stage = 2', "layers into 5 stages"),
        (10, 2, 'schedule = "LoopedBFS"\nlayers_per_stage = 2', "or set pipeline.round = up or down"),
        (8, 2, 'schedule = "Interleaved1F1B"\nlayers_per_stage = 4', "at least 4; use 2"),
        (8, 2, 'schedule = "1F1B"\nlayers_per_stage = 2', "needs 2; use 4"),
        (8, 4, 'schedule = "DualPipeV"\nlayers_per_stage = 2', "needs 8; use 1"),
        (5, 2, 'schedule = "LoopedBFS"\nlayers_per_stage = 1\nround = "up"', "4; use 2, or set pipeline.round = down"),
        (9, 4, 'schedule = "Interleaved1F1B"\nlayers_per_stage = 2', "at least 8; set pipeline.round = up"),
        (5, 2, 'schedule = "DualPipeV"\nlayers_per_stage = 3', "needs 4; use 0"),
        (2, 2, 'schedule = "LoopedBFS"\nlayers_per_stage = 1', "at least 4; use fewer ranks"),
        (3, 4, "", "needs 4 stages with pipeline.schedule = 1F1B, but the model has only model.n_layers = 3"),
        (6, 4, 'schedule = "ZBVZeroBubble"', "needs 8 stages"),
        (4, 2, "layers_per_stage = [2, 1]", "adds up to 3 layers, but model.n_layers = 4; count each layer once"),
        (4, 2, "layers_per_stage = [4]", "splits model.n_layers = 4 layers into 1 stage, but"),
        (4, 4, "layers_per_stage = [2, 0, 1, 1]", "has an empty stage between the first and the last; leave it out"),
    ],
)  # fmt: skip
def test_impossible_stages_are_refused_with_a_remedy(
    n_layers: int, pp: int, pipeline: str, message: str
) -> None:
    assert message in refusal(n_layers, pp, pipeline)


@pytest.mark.parametrize("schedule", ["1F1B", "LoopedBFS", "DualPipeV"])
def test_every_remedy_for_layers_per_stage_works(schedule: str) -> None:
    for n_layers, pp, size, rounding in itertools.product(
        range(1, 14), (2, 3), (1, 2, 3, 9), ("error", "up", "down")
    ):
        keys = {"schedule": schedule, "layers_per_stage": size, "round": rounding}
        try:
            config(n_layers, pp, "\n".join(f"{key} = {value!r}" for key, value in keys.items()))
        except UserError as error:
            use, rounds = (
                re.search(r"; use (\d+)", str(error)),
                re.search(r"pipeline.round = (.*)", str(error)),
            )
            remedies = [{"layers_per_stage": use[1]}] if use else []
            remedies += [{"round": repr(word)} for word in rounds[1].split(" or ")] if rounds else []
            assert remedies or "use fewer ranks" in str(error)
            for remedy in remedies:
                text = {key: repr(value) for key, value in keys.items()} | remedy
                config(n_layers, pp, "\n".join(f"{key} = {value}" for key, value in text.items()))


def test_a_list_of_layers_may_leave_the_embedding_alone() -> None:
    stages = make_stages(config(2, 2, "layers_per_stage = [0, 2]"))
    assert [str(stage) for stage in stages] == ["embedding", "layers 0-1, norm and head"]


def test_the_former_key_of_modules_splits_as_a_list_of_their_layers() -> None:
    former = config(
        3, 2, 'module_names = [["embedding", "layers.0"], ["layers.1", "layers.2", "norm", "head"]]'
    )
    assert former.pipeline.layers_per_stage == (1, 2)
    assert make_stages(former) == make_stages(config(3, 2, "layers_per_stage = [1, 2]"))
    assert parse_toml_text(to_toml(former)) == former
    assert any("pipeline.module_names (replaced by" in line for line in unused_keys(former, []))


def test_the_table_shows_rank_work_and_layers_of_each_stage() -> None:
    made = config(4, 2, 'schedule = "ZBVZeroBubble"')
    lines = table(make_stages(made), layer_costs(made), (0, 1, 1, 0)).splitlines()
    assert len(lines) == 4 and "pp rank  0" in lines[3] and lines[3].endswith("layer 3, norm and head")


def test_without_a_pipeline_its_keys_are_ignored() -> None:
    assert config(2, 1, 'schedule = "ZBVZeroBubble"\nlayers_per_stage = 7').parallel.pp == 1
