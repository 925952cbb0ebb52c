"""A pipeline equals one process: every schedule, every other axis, tied and untied ends, with and without experts."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from forge.config import check_world, parse_toml_text
from forge.parallel.build import build_parallel_model
from forge.parallel.mesh import make_meshes
from forge.parallel.pipeline.execute import PipelinedModel
from forge.parallel.pipeline.schedule import make_schedule
from forge.parallel.pipeline.tied import Tied
from forge.runtime.errors import UserError
from forge.tools.verify import record as compare
from tests.support.covering import covering, pairs
from tests.support.equivalence import (
    RankRecord,
    Twist,
    alone,
    assert_equal,
    config_batches,
    layout,
    layout_on_rank,
    plain_model,
    reference,
    tiny_config,
)
from tests.support.harness import RankFailed, run_ranks
from tests.support.layouts import MODELS, SCHEDULES, pipeline_text, plain_text, slow_unless
from tests.support.layouts import pipeline_expected as expected

NO_COMPILER = "aot_eager_decomp_partition"


# The fast tests contain every schedule once, over two or four ranks.
ENDS = ["plain", "tied experts", "tied", "experts"]
TWO = [
    pytest.param(schedule, model, marks=slow_unless(number % 2 == 0 and number % 4 == (place + 2) % 4))
    for number, schedule in enumerate(SCHEDULES)
    for place, model in enumerate(ENDS)
]


@pytest.mark.parametrize(("schedule", "model"), TWO)
def test_every_schedule_over_two_ranks(schedule: str, model: str) -> None:
    # Five layers: stages of unequal size.
    text = pipeline_text(2, schedule, model, layers=5)
    assert_equal(layout(text, 2), expected(model, 5))


FOUR = [
    pytest.param(schedule, model, marks=slow_unless(number % 2 == 1 and number % 4 == place % 4))
    for number, schedule in enumerate(SCHEDULES)
    for place, model in enumerate(ENDS)
]


@pytest.mark.parametrize(("schedule", "model"), FOUR)
def test_every_schedule_over_four_ranks(schedule: str, model: str) -> None:
    assert_equal(layout(pipeline_text(4, schedule, model), 4), expected(model))


# Saved streams travel between stages. Stages end within a residual block, at its end, and on the same rank.
RESIDUALS = [
    pytest.param(
        schedule,
        model,
        ranks,
        marks=slow_unless(schedule in ("1F1B", "ZBVZeroBubble") and (model, ranks) == ("residuals", 2)),
    )
    for schedule in SCHEDULES
    for model in ("residuals", "residuals, experts")
    for ranks in (2, 4)
]


@pytest.mark.parametrize(("schedule", "model", "ranks"), RESIDUALS)
def test_attention_residuals_in_every_schedule(schedule: str, model: str, ranks: int) -> None:
    assert_equal(layout(pipeline_text(ranks, schedule, model), ranks), expected(model))


# Schedules with split backward, engines with sharded optimizer state, and the embedding's second copy on the last stage.
AHEAD = [
    (2, "1F1B", "zero2", 1, False),
    (2, "1F1B", "zero1", 2, True),
    (1, "ZBVZeroBubble", "fsdp2", 2, False),
    (1, "DualPipeV", "fsdp2", 1, True),
    (2, "InterleavedZeroBubble", "zero2", 2, False),
    (2, "ZBVZeroBubble", "ddp", 2, True),
    (2, "DualPipeV", "zero1", 1, False),
]


@pytest.mark.parametrize(
    ("shards", "schedule", "engine", "depth", "tied"),
    [pytest.param(*case, marks=slow_unless(number in (1, 2))) for number, case in enumerate(AHEAD)],
)
def test_prediction_further_ahead_in_a_pipeline(
    shards: int, schedule: str, engine: str, depth: int, tied: bool
) -> None:
    model = f"tie_embeddings = {str(tied).lower()}\n[model.mtp]\ndepth = {depth}\nloss_coef = 0.5\n"
    parallel = f"pp = 2\ndp_shard = {shards}\ndata_parallel = '{engine}'"

    def text(parallel: str) -> str:
        # The embedding is larger than its neighbours, so shards of a buffer cut it.
        small = tiny_config(parallel=parallel, model=model).replace("n_layers = 3", "n_layers = 4")
        return small.replace("vocab_size = 67", "vocab_size = 1031")

    piped = f"{text(parallel)}\n[pipeline]\nschedule = '{schedule}'\n"
    assert_equal(layout(piped, 2 * shards), reference(text("")))


AXES = {
    "fsdp": ("", ""),
    "hsdp": ("dp_replicate = 2\ndp_shard = 1", ""),
    "tp": ("tp = 2", ""),
    "tp without sp": ("tp = 2\nsequence_parallel = false\nloss_parallel = false", ""),
    "cp": ("cp = 2", ""),
    "ring": ("cp = 2\ncontext = 'ring'", ""),
    "ep": ("ep = 2", ""),
    "ep over tp": ("tp = 2\nep = 2", ""),
    "zero1": ("data_parallel = 'zero1'", ""),
    "zero2": ("data_parallel = 'zero2'", ""),
    "ddp": ("data_parallel = 'ddp'", ""),
    "offload": ("cpu_offload = true", ""),
    "recompute": ("", "[activation_checkpoint]\nmode = 'full'"),
    "recompute some": ("", "[activation_checkpoint]\nmode = 'selective'"),
    "activation offload": ("", "[activation_checkpoint]\nmode = 'offload'"),
    "activation offload, compile": (
        "",
        f"[activation_checkpoint]\nmode = 'offload'\n[compile]\nenabled = true\nbackend = '{NO_COMPILER}'",
    ),
    "compile": ("", f"[compile]\nenabled = true\nbackend = '{NO_COMPILER}'"),
    "compile, tp": ("tp = 2", f"[compile]\nenabled = true\nbackend = '{NO_COMPILER}'"),
}
FAST_AXES = {
    ("hsdp", "ZBVZeroBubble", "tied"),
    ("zero1", "ZBVZeroBubble", "tied"),
    ("activation offload", "ZBVZeroBubble", "tied"),
}


def axis_cases() -> list:
    """Return cases that cover every pair of axis, schedule and model."""
    schedules = ("1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
    models = ("everything", "tied", "tied experts", "biased experts")
    grid = [
        (axis, schedule, model)
        for axis, schedule, model in itertools.product(AXES, schedules, models)
        if "experts" in model or not axis.startswith("ep")
    ]
    chosen = covering(grid, lambda case: pairs(*case), FAST_AXES)
    return [pytest.param(*case, marks=slow_unless(case in FAST_AXES)) for case in chosen]


@pytest.mark.parametrize(("axis", "schedule", "model"), axis_cases())
def test_a_pipeline_with_every_other_axis(axis: str, schedule: str, model: str) -> None:
    parallel, more = AXES[axis]
    text = pipeline_text(2, schedule, model, parallel=parallel, more=more)
    assert_equal(layout(text, 4), expected(model))


@pytest.mark.parametrize("model", ["plain", pytest.param("residuals", marks=pytest.mark.slow)])
def test_a_manual_split_with_an_embedding_only_stage(model: str) -> None:
    text = pipeline_text(2, "ZBVZeroBubble", model, layers=5, pipeline="layers_per_stage = [0, 3, 1, 1]")
    assert_equal(layout(text, 2), expected(model, 5))


def test_three_stages_per_rank_by_their_size() -> None:
    text = pipeline_text(
        2, "InterleavedZeroBubble", layers=5, pipeline="layers_per_stage = 1\nround = 'down'"
    )
    assert_equal(layout(text, 2), expected("plain", 5))


def test_a_schedule_from_a_file(tmp_path) -> None:
    schedule = make_schedule("DualPipeV", 2, 4, 8)
    path = tmp_path / "mine.csv"
    path.write_text("\n".join(",".join(map(str, order)) for order in schedule.order))
    assert_equal(layout(pipeline_text(2, str(path), "tied", layers=5), 2), expected("tied", 5))


def one_valid_token(labels: torch.Tensor, rank: int) -> None:
    kept = labels[0, 5].item()
    labels.fill_(-100)
    if rank == 0:
        labels[0, 5] = kept if kept >= 0 else 3


@pytest.mark.parametrize(
    ("world", "schedule"), [(2, "1F1B"), pytest.param(4, "ZBVZeroBubble", marks=pytest.mark.slow)]
)
def test_one_valid_token_in_the_whole_global_batch(world: int, schedule: str) -> None:
    twist = Twist(labels=one_valid_token)
    assert_equal(
        layout(pipeline_text(2, schedule, "tied", layers=5), world, twist), expected("tied", 5, twist)
    )


@pytest.mark.parametrize(
    "schedule", ["Interleaved1F1B", pytest.param("ZBVZeroBubble", marks=pytest.mark.slow)]
)
def test_float8_scales_as_without_a_pipeline(schedule: str) -> None:
    """Equal microbatches round equally in float8, so results differ only by float32 rounding."""
    text = pipeline_text(2, schedule, layers=5).replace('"float64"', '"float32"')
    text = text.replace("[precision]", "[precision]\nfloat8 = 'tensorwise'")
    assert_equal(layout(text, 2), alone(text.replace("pp = 2", "pp = 1")), tolerance=1e-4)


# --- random layouts ---

LAYOUTS, FAST = 30, (1,)


def draw(generator: random.Random) -> tuple[int, str, str]:
    """Draw (world, model, config) of one layout with a pipeline, valid or not."""
    choose = generator.choice
    world, pp = choose([2, 4, 4, 4, 8]), choose([2, 2, 4])
    model = choose(sorted(MODELS))
    options = {
        **{axis: choose([1, 1, 2]) for axis in ("dp_replicate", "tp", "cp", "ep")},
        "sequence_parallel": choose(["true", "false"]),
        "loss_parallel": choose(["true", "false"]),
        "context": choose(["'allgather'", "'ulysses'", "'ring'"]),
        "data_parallel": choose(["'fsdp2'", "'fsdp2'", "'zero1'", "'zero2'", "'ddp'"]),
        "reshard_after_forward": choose(["'auto'", "'always'", "'never'"]),
    }
    more = f"[activation_checkpoint]\nmode = {choose(['none', 'offload', 'full', 'selective'])!r}\n"
    more += f"[compile]\nenabled = {choose(['false', 'false', 'true'])}\nbackend = '{NO_COMPILER}'\n"
    parallel = "\n".join(f"{key} = {value}" for key, value in options.items())
    micro = choose([1, 1, 2])
    return (
        world,
        model,
        pipeline_text(pp, choose(SCHEDULES), model, parallel=parallel, more=more, micro=micro),
    )


def layouts() -> list[tuple[int, str, str]]:
    """Return the first LAYOUTS valid layouts. Eight ranks come last, because they take long on two cores."""
    generator, found = random.Random(6), []
    while len(found) < LAYOUTS:
        world, model, text = draw(generator)
        try:
            check_world(parse_toml_text(text), world)
        except UserError:
            continue
        found.append((world, model, text))
    return sorted(found, key=lambda case: case[0] == 8)


def random_cases() -> list:
    cases = []
    for number, (world, model, text) in enumerate(layouts()):
        config = parse_toml_text(text)
        axes = [f"{a}{getattr(config.parallel, a)}" for a in ("pp", "tp", "cp", "ep", "dp_replicate")]
        name = "-".join(
            [f"world{world}", config.pipeline.schedule, model, *(a for a in axes if a[-1] != "1")]
        )
        cases.append(pytest.param(world, model, text, id=name, marks=slow_unless(number in FAST)))
    return cases


@pytest.mark.parametrize(("world", "model", "text"), random_cases())
def test_a_random_layout_with_a_pipeline(world: int, model: str, text: str) -> None:
    assert_equal(layout(text, world), expected(model))


# --- defects of other projects ---


def scaled_by_microbatches() -> None:
    """Divide gradients by the number of microbatches, PyTorch's own default."""
    finalize = PipelinedModel.finalize_gradients

    def divide(self: PipelinedModel) -> None:
        finalize(self)
        for shard in self.shards:
            if shard.grad is not None:
                shard.grad.div_(8)

    PipelinedModel.finalize_gradients = divide  # type: ignore[method-assign]


def clipped_without_pp() -> None:
    """Clip each stage by its own gradient norm instead of the global one."""
    real_meshes, real_report = compare.make_meshes, compare.report_gradients
    made = []

    def meshes(*arguments, **keys):
        made.append(real_meshes(*arguments, **keys))
        return made[-1]

    def report(*arguments, **keys):
        everyone = dist.all_reduce
        dist.all_reduce = lambda values: everyone(values, group=made[0].stage)
        try:
            return real_report(*arguments, **keys)
        finally:
            dist.all_reduce = everyone

    compare.make_meshes, compare.report_gradients = meshes, report


def tied_gradients_left_apart() -> None:
    Tied.sum_gradients = lambda self: None  # type: ignore[method-assign]


def tied_values_left_behind() -> None:
    Tied.copy_values = lambda self: None  # type: ignore[method-assign]


def labels_for_the_last_stage_only() -> None:
    """Pass labels only to the last stage, so other stages' balancing losses count ignored positions."""
    forward = PipelinedModel.run_forward

    def without(self, part, x, inputs):
        labels = inputs.labels if part.stage.head else None
        return forward(self, part, x, replace(inputs, labels=labels))

    PipelinedModel.run_forward = without  # type: ignore[method-assign]


DEFECTS = {
    "scaled": (scaled_by_microbatches, "1F1B", "plain", "gradient of .*, step 1"),
    "clipped": (clipped_without_pp, "1F1B", "plain", "norm of gradient, step 1"),
    "tied gradients": (tied_gradients_left_apart, "1F1B", "tied", "gradient of embedding.weight, step 1"),
    "tied gradients, V": (
        tied_gradients_left_apart,
        "ZBVZeroBubble",
        "tied",
        "gradient of embedding.weight, step 1",
    ),
    "tied values": (tied_values_left_behind, "1F1B", "tied", "loss of cross-entropy, step 2"),
    "labels": (labels_for_the_last_stage_only, "1F1B", "experts", "gradient of .*, step 1"),
}


def _with_defect(rank: int, world: int, text: str, defect: str) -> RankRecord:
    DEFECTS[defect][0]()
    return layout_on_rank(rank, world, text)


FAST_DEFECTS = ("scaled", "tied gradients")


@pytest.mark.parametrize(
    "defect", [pytest.param(name, marks=slow_unless(name in FAST_DEFECTS)) for name in DEFECTS]
)
def test_the_comparison_catches_defects_of_other_projects(defect: str) -> None:
    _, schedule, model, seen = DEFECTS[defect]
    ranks = run_ranks(_with_defect, 2, pipeline_text(2, schedule, model, layers=5), defect)
    with pytest.raises(AssertionError, match=seen):
        assert_equal(ranks, expected(model, 5))


# --- evaluation, sampling ---


def _evaluated(rank: int, world: int, text: str) -> tuple[list[float], torch.Tensor]:
    config = parse_toml_text(text)
    meshes = make_meshes(check_world(config, world), "cpu")
    model = build_parallel_model(config, meshes, torch.device("cpu"))
    batch = next(config_batches(config, meshes.data_rank, meshes.data_ranks))
    tokens = torch.arange(14).reshape(2, 7) % 67
    before = model.evaluate(batch).values.tolist()
    scores = model.logits(tokens)
    # Neither leaves state that could break a later step.
    sums = model.forward_backward(batch, model.count_tokens(batch))
    assert sums.cross_entropy.item() == pytest.approx(before[1], rel=1e-12)
    assert model.evaluate(batch).values.tolist() == before
    return before, scores


@pytest.mark.parametrize(
    ("world", "schedule", "model", "parallel"),
    [
        (2, "ZBVZeroBubble", "tied", ""),
        (4, "Interleaved1F1B", "everything", "tp = 2"),
        (4, "1F1B", "experts", "cp = 2"),
        pytest.param(4, "1F1B", "biased experts", "tp = 2", marks=pytest.mark.slow),
        pytest.param(4, "LoopedBFS", "tied", "data_parallel = 'zero1'", marks=pytest.mark.slow),
    ],
)
def test_every_rank_knows_the_loss_and_the_scores(
    world: int, schedule: str, model: str, parallel: str
) -> None:
    text = plain_text(model, 5)
    plain = plain_model(parse_toml_text(text))
    batch = next(config_batches(parse_toml_text(text), 0, 1))
    with torch.no_grad():
        losses = plain(batch.tokens, batch.labels, batch.positions, batch.documents)
        scores = plain(torch.arange(14).reshape(2, 7) % 67)
    results = run_ranks(_evaluated, world, pipeline_text(2, schedule, model, layers=5, parallel=parallel))
    for values, found in results:
        assert values == results[0][0]
        assert values == pytest.approx([*losses.tolist(), (batch.labels >= 0).sum().item()], rel=1e-12)
        torch.testing.assert_close(found, scores, rtol=0, atol=1e-9)


def test_a_name_on_no_stage_is_refused_and_a_name_on_some_stages_is_not() -> None:
    more = "fp32_modules = ['layers.4']"
    text = pipeline_text(2, "1F1B", layers=5).replace("[precision]", f"[precision]\n{more}")
    layout(text, 2)
    with pytest.raises(RankFailed, match="matches no module"):
        layout(text.replace("layers.4", "layers.5"), 2)
