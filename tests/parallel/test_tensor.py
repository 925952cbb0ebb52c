"""Tensor parallelism: collectives, refusals and checkpoint content."""

import pytest
import torch
from torch.distributed.tensor import DTensor

from benchmarks.collectives import collectives_of
from forge.config import parse_toml_text, to_toml, unused_keys
from forge.parallel.build import build_meta_model
from forge.parallel.modules import matches_exact_depth
from forge.parallel.step.gradients import sum_gradients
from forge.parallel.tensor.plan import plan_for
from forge.runtime.errors import BAD_CONFIG, UserError
from tests.support.building import built, layout_without_ranks
from tests.support.configs import complaint
from tests.support.equivalence import tiny_config
from tests.support.harness import RankFailed, run_ranks

LAYERS, CHUNKS = 3, 3  # of tiny_config: 80 tokens in chunks of 32


def sent(rank: int, world: int, text: str) -> tuple[dict[str, int], dict[str, int]]:
    """Return the collectives of one microbatch's forward and backward in the second step, and of finalize_gradients."""
    one = built(text, world)
    model = one.model
    for batch in one.batches():
        one = next(iter(batch.microbatches(1)))
        tokens = torch.tensor(float(one.labels.numel()), dtype=torch.float64)
        step = collectives_of(lambda one=one, tokens=tokens: model.forward_backward(one, tokens))
        end = collectives_of(model.finalize_gradients)
        model.zero_gradients()
    return step.number(), end.number()


@pytest.mark.parametrize(
    ("keys", "step", "end"),
    [
        # Per block and direction, one gather before and one scatter after each half. The same around embedding and head.
        (
            "tp = 2",
            {"all_gather": 4 * LAYERS + 2 + CHUNKS, "reduce_scatter": 4 * LAYERS + 2},
            {"all_reduce": 1},
        ),
        (
            "tp = 2\nsequence_parallel = false",
            {"all_reduce": 4 * LAYERS + 2, "all_gather": CHUNKS},
            {},
        ),
        # Hidden states and the head's weight are gathered. Their gradients are replicated.
        (
            "tp = 2\nloss_parallel = false",
            {"all_gather": 4 * LAYERS + 3, "reduce_scatter": 4 * LAYERS + 1},
            {"all_reduce": 1},
        ),
    ],
)
def test_no_collective_is_redundant(keys: str, step: dict, end: dict) -> None:
    text = tiny_config(parallel=keys)
    assert run_ranks(sent, 2, text)[0] == (step, end)


def test_partial_gradients_of_all_norms_are_one_collective() -> None:
    text = tiny_config(parallel="tp = 2\nsequence_parallel = false", model="qk_norm = true")
    assert run_ranks(sent, 2, text)[0][1] == {"all_reduce": 1}


def logits(rank: int, world: int, text: str, seq: int) -> torch.Tensor:
    model = built(text, world).model
    return model.logits(torch.arange(seq)[None] % 67)


@pytest.mark.parametrize(
    ("model", "keys"),
    [
        pytest.param("", "tp = 2", marks=pytest.mark.slow),
        ("", "tp = 2\nsequence_parallel = false\nloss_parallel = false"),
        ("tie_embeddings = true\nlogit_soft_cap = 2.0", "tp = 2"),
        pytest.param(
            "tie_embeddings = true\nlogit_soft_cap = 2.0",
            "tp = 2\nsequence_parallel = false\nloss_parallel = false",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_every_rank_has_the_logits_of_a_sequence_of_any_length(keys: str, model: str) -> None:
    alone = run_ranks(logits, 1, tiny_config(model=model), 13)[0]
    for of_rank in run_ranks(logits, 2, tiny_config(parallel=keys, model=model), 13):
        assert of_rank.shape == (1, 13, 67)
        torch.testing.assert_close(of_rank, alone, rtol=0, atol=1e-12)


def boxes(rank: int, world: int, text: str) -> dict:
    model = built(text, world).model
    for shard in model.shards:
        assert sum(box.numel for box in shard.boxes) == shard.data.numel()
        if isinstance(shard.parameter, DTensor):  # not if the rank's part is unsharded
            everything = shard.parameter.full_tensor().detach()
            for box, piece in shard.pieces(shard.data):
                part = tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))
                assert torch.equal(everything[part], piece), shard.name
    return {
        shard.name: [(box.offsets, box.sizes) for box in shard.boxes]
        for shard in model.shards
        if shard.is_primary_replica
    }


@pytest.mark.parametrize("keys", ["tp = 2", "tp = 2\ndp_replicate = 2\ndp_shard = 1", "tp = 4"])
def test_counted_boxes_cover_every_parameter_once(keys: str) -> None:
    model = "n_kv_heads = 4\nqk_norm = true\nattention_bias = true"
    text = tiny_config(parallel=keys, model=model).replace("n_kv_heads = 2\n", "")
    ranks = run_ranks(boxes, 4, text)
    shapes = {name: p.shape for name, p in build_meta_model(parse_toml_text(text)).named_parameters()}
    for name, shape in shapes.items():
        count = torch.zeros(shape)
        for rank in ranks:
            for offsets, sizes in rank.get(name, []):
                count[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))] += 1
        assert (count == 1).all(), name


def test_an_empty_sum_starts_no_collective() -> None:
    sum_gradients([], None)


@pytest.mark.parametrize(
    ("overrides", "part"),
    [
        (
            ["--parallel.tp=3"],
            "must divide model.n_heads = 8, because every tp rank needs the same number of query heads; "
            "use one of 1, 2, 4, 8",
        ),
        (["--parallel.tp=4", "--model.n_kv_heads=2"], "must divide model.n_kv_heads = 2"),
        (["--parallel.tp=4", "--model.ffn_dim=90"], "must divide model.ffn_dim = 90"),
        (
            ["--parallel.tp=2", "--train.seq_len=33"],
            "multiple of parallel.cp * parallel.tp = 1 * 2 = 2; set train.seq_len = 32 or 34, or use false",
        ),
        (
            ["--parallel.tp=8", "--model.vocab_size=9"],
            "is too large: with model.vocab_size = 9, the last tp rank would get no row of the embedding",
        ),
        (
            ["--parallel.tp=2", "--parallel.reshard_after_forward=2"],
            "cannot be a number with parallel.tp = 2",
        ),
        (["--parallel.tp=2", "--parallel.async_tp=true"], "needs compile.enabled = true"),
        (
            ["--parallel.tp=2", "--parallel.tp_plan=nowhere"],
            "auto, or an import path package.module:Name, or table of names to colwise",
        ),
        (["--parallel.tp=2", '--parallel.tp_plan={head="rows"}'], "colwise, rowwise, colwise_rep"),
        (["--parallel.tp=2", '--parallel.tp_plan_styles={head="rows"}'], "colwise, rowwise, colwise_rep"),
    ],
)
def test_indivisible_sizes_are_refused_with_numbers(tmp_path, overrides, part: str) -> None:
    lines = (
        complaint(tmp_path, *overrides) if "--parallel.tp=3" not in overrides else _first(tmp_path, overrides)
    )
    assert part in lines


def _first(folder, overrides) -> str:
    from tests.support.configs import complaints

    return " ".join(complaints(folder, *overrides))


def planned(styles: dict[str, str], more: str = "") -> dict:
    lines = "\n".join(f'"{name}" = "{style}"' for name, style in styles.items())
    config = parse_toml_text(tiny_config(parallel=f"tp = 2\n{more}\n[parallel.tp_plan]\n{lines}"))
    return plan_for(build_meta_model(config), layout_without_ranks(config))


def test_a_plan_by_hand_names_modules_by_globs() -> None:
    plan = planned({"layers.*.feed_forward.w[13]": "colwise", "layers.*.feed_forward.w2": "rowwise"})
    assert len(plan) == 3 * LAYERS and plan["layers.2.feed_forward.w3"] == "colwise"
    assert matches_exact_depth("layers.*.wq", "layers.0.wq")
    assert not matches_exact_depth("layers.*.wq", "layers.0.attention.wq")


def test_the_former_key_of_a_plan_by_hand_is_read_as_tp_plan() -> None:
    config = parse_toml_text(tiny_config(parallel='tp = 2\n[parallel.tp_plan_styles]\nhead = "colwise"'))
    assert config.parallel.tp_plan == {"head": "colwise"}
    assert plan_for(build_meta_model(config), layout_without_ranks(config)) == planned({"head": "colwise"})
    assert parse_toml_text(to_toml(config)) == config
    assert "parallel.tp_plan_styles (replaced by parallel.tp_plan)" in unused_keys(config, [])


@pytest.mark.parametrize(
    ("styles", "part"),
    [
        (
            {"layers.*.atention.wq": "colwise"},
            'parallel.tp_plan: "layers.*.atention.wq" matches no module; did you mean "layers.*.attention.wq"?',
        ),
        ({"norm": "colwise"}, '"norm" is a RMSNorm, which cannot be colwise; use sequence_parallel'),
        ({"layers.0.attention.wq": "colwise"}, "(wq: colwise, wk: whole, wv: whole, wo: whole)"),
        ({"layers.0": "colwise"}, "it is not a module that can be split"),
    ],
)
def test_an_invalid_plan_is_refused(styles: dict[str, str], part: str) -> None:
    with pytest.raises(UserError) as caught:
        planned(styles)
    assert part in str(caught.value) and caught.value.exit_code == BAD_CONFIG


def test_a_norm_cannot_be_split_by_sequence_without_sequence_parallelism() -> None:
    with pytest.raises(UserError, match=r"needs parallel\.sequence_parallel = true"):
        planned({"norm": "sequence_parallel"}, "sequence_parallel = false")


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("no.such:plan", "no.such cannot be imported"),
        ("math:no_such_plan", "math has no function no_such_plan"),
    ],
)
def test_an_unimportable_plan_is_refused(path: str, reason: str) -> None:
    config = parse_toml_text(tiny_config(parallel=f'tp = 2\ntp_plan = "{path}"'))
    with pytest.raises(UserError, match=f'parallel.tp_plan = "{path}": {reason}'):
        plan_for(build_meta_model(config), layout_without_ranks(config))


def test_asynchronous_collectives_need_gpus() -> None:
    text = tiny_config(parallel="tp = 2\nasync_tp = true") + "[compile]\nenabled = true\n"
    with pytest.raises(RankFailed, match=r"UserError: parallel\.async_tp = true needs CUDA GPUs"):
        run_ranks(boxes, 2, text)
