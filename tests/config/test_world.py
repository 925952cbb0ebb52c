"""Degrees and batch size against the number of processes: each error has the equation, its numbers and a valid remedy."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forge.config import Config, Degrees, check_world
from forge.config.checks import check
from forge.runtime.errors import BAD_CONFIG, UserError
from tests.support.configs import tiny


def with_keys(**sections: dict) -> Config:
    """Return the tiny config with keys set without checks, to test layouts rejected today."""
    tree = tiny().model_dump(mode="json")
    for section, values in sections.items():
        tree[section] = (tree[section] or {}) | values
    return Config.model_validate(tree)


def refusal(world: int, **sections: dict) -> str:
    with pytest.raises(UserError) as caught:
        check_world(with_keys(**sections), world)
    assert caught.value.exit_code == BAD_CONFIG
    return str(caught.value)


def test_one_process_holds_everything() -> None:
    assert check_world(tiny(), 1) == Degrees(1, 1, 1, 1, 1, 1, 1, accumulation=8)


def test_dp_shard_takes_the_remaining_ranks() -> None:
    config = with_keys(parallel={"dp_replicate": 2, "tp": 2, "cp": 2, "pp": 2, "ep": 4})
    degrees = check_world(config, 32)
    assert degrees == Degrees(32, pp=2, dp_replicate=2, dp_shard=2, cp=2, tp=2, ep=4, accumulation=2)
    assert (degrees.dp, degrees.ep_shard) == (4, 2)


def test_degrees_not_dividing_the_world_size_are_reported_with_numbers() -> None:
    text = refusal(8, parallel={"dp_replicate": 3})
    assert (
        "a multiple of pp * dp_replicate * cp * tp = 1 * 3 * 1 * 1 = 3 processes, but there are 8 processes"
        in text
    )
    assert "start 6 or 9 processes" in text
    assert "but there is 1 process; start 2" in refusal(1, parallel={"tp": 2})


def test_degrees_with_a_wrong_product_are_reported_with_numbers() -> None:
    text = refusal(8, parallel={"dp_replicate": 2, "dp_shard": 2})
    assert (
        "pp * dp_replicate * cp * tp * dp_shard = 1 * 2 * 1 * 1 * 2 = 4 processes, but there are 8 processes"
        in text
    )
    assert "start 4 processes, or set parallel.dp_shard = 4 or -1" in text


def test_experts_must_divide_the_ranks_of_a_replica() -> None:
    assert "must divide dp_shard * cp * tp = 8 * 1 * 1 = 8" in refusal(8, parallel={"ep": 3})
    text = refusal(8, parallel={"ep": 4}, model={"moe": {"n_experts": 6}})
    assert "must divide model.moe.n_experts = 6" in text


def test_resharding_must_divide_the_sharding_degree() -> None:
    assert check_world(with_keys(parallel={"reshard_after_forward": 4}), 8).dp_shard == 8
    assert "must divide dp_shard * cp = 8 * 1 = 8" in refusal(8, parallel={"reshard_after_forward": 3})


def test_the_nodes_of_experts_do_not_count_without_expert_parallelism() -> None:
    config = with_keys(parallel={"ep": 1, "ep_node_size": 8}, model={"moe": {"n_experts": 8}})
    assert check_world(config, 8).ep_nodes == 1


def test_nodes_of_an_expert_group_are_given_or_come_from_the_launcher() -> None:
    moe = {"n_experts": 8, "top_k": 2, "expert_dim": 32}
    given = with_keys(parallel={"ep": 8, "ep_node_size": 2}, model={"moe": moe})
    degrees = check_world(given, 8)
    assert degrees.ep_nodes == degrees.on_nodes(given, 8).ep_nodes == 4
    auto = with_keys(parallel={"ep": 8, "tp": 2}, model={"moe": moe})
    degrees = check_world(auto, 16)
    # 0: unknown. A group counts as one node if a node has more ranks than the group, or if the group ends inside a node.
    nodes = {size: degrees.on_nodes(auto, size).ep_nodes for size in (0, 1, 2, 3, 4, 8, 16)}
    assert nodes == {0: 1, 1: 8, 2: 4, 3: 1, 4: 2, 8: 1, 16: 1}
    text = refusal(8, parallel={"ep": 8, "ep_node_size": 3}, model={"moe": moe})
    assert "parallel.ep_node_size = 3" in text and "must divide parallel.ep = 8" in text


@pytest.mark.parametrize("engine", ["zero1", "zero2", "ddp"])
def test_engines_without_gathers_in_forward_ignore_resharding(engine: str) -> None:
    for rest in ({}, {"tp": 2}, {"pp": 2}):
        keys = {"reshard_after_forward": 3, "data_parallel": engine} | rest
        config = with_keys(parallel=keys, pipeline={"schedule": "ZBVZeroBubble"}, model={"n_layers": 4})
        assert check(config) == [] and check_world(config, 4).world == 4


def test_an_indivisible_batch_is_reported_with_the_nearest_divisible_one() -> None:
    text = refusal(4, train={"global_batch_size": 10, "micro_batch_size": 2}, parallel={"dp_replicate": 2})
    assert (
        "train.global_batch_size = 10: must be a multiple of micro_batch_size * dp_replicate * dp_shard"
        in text
    )
    assert "= 2 * 2 * 2 = 8; set train.global_batch_size = 8 or 16" in text


def test_an_indivisible_sequence_is_reported_with_the_nearest_divisible_one() -> None:
    text = refusal(4, parallel={"cp": 4}, train={"seq_len": 60})
    assert (
        "train.seq_len = 60: must be a multiple of 2 * cp = 2 * 4 = 8" in text
        and "set train.seq_len = 56 or 64" in text
    )
    assert check_world(with_keys(parallel={"cp": 4}, train={"seq_len": 64}), 4).cp == 4


def test_ulysses_needs_whole_heads_on_every_rank() -> None:
    heads = {"n_heads": 8, "n_kv_heads": 2}
    text = refusal(16, parallel={"cp": 8, "tp": 2, "context": "ulysses"}, model=heads)
    assert "parallel.cp = 8: must divide model.n_heads / tp = 8 / 2 = 4, because" in text
    for parallel in ({"cp": 4, "tp": 2, "context": "ulysses"}, {"cp": 8, "tp": 2, "context": "ring"}):
        assert (
            check_world(with_keys(parallel=parallel, model=heads, train={"seq_len": 64}), 16).cp
            == parallel["cp"]
        )


def test_ulysses_under_a_plan_by_hand_is_not_checked_by_the_heads_of_the_models_own_plan() -> None:
    parallel = {"cp": 2, "tp": 8, "context": "ulysses"}
    assert "parallel.cp = 2: must divide model.n_heads / tp" in refusal(16, parallel=parallel)
    parallel["tp_plan"] = {"layers.*.feed_forward.w1": "colwise", "layers.*.feed_forward.w2": "rowwise"}
    assert check_world(with_keys(parallel=parallel), 16).cp == 2


def test_everything_wrong_is_reported_at_once() -> None:
    text = refusal(8, parallel={"reshard_after_forward": 3}, train={"global_batch_size": 9})
    assert "reshard_after_forward" in text and "global_batch_size" in text


def test_a_huge_microbatch_is_refused_at_once() -> None:
    text = refusal(2, train={"global_batch_size": 12, "micro_batch_size": 10**12})
    assert text.endswith("or train.micro_batch_size = 6")


SMALL = st.integers(1, 12)


@pytest.mark.long
@settings(max_examples=200, deadline=None)
@given(batch=st.integers(1, 64), micro=SMALL, world=SMALL)
def test_every_remedy_for_a_batch_works(batch: int, micro: int, world: int) -> None:
    train = {"global_batch_size": batch, "micro_batch_size": micro}
    try:
        degrees = check_world(with_keys(train=train), world)
        assert degrees.accumulation * micro * degrees.dp == batch
    except UserError as error:
        for key, values in re.findall(
            r"train\.(\w+) = (\d+(?: or \d+)?)(?=,|$)", str(error).partition("; set ")[2]
        ):
            for value in values.split(" or "):
                check_world(with_keys(train=train | {key: int(value)}), world)
