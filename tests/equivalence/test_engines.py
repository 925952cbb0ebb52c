"""Every data-parallel engine trains like one plain process: the matrix of engines, accumulation, tp and pp.

AdamW covers the whole path: gradients, clipping, moments, and the parameters of the next forward. It hides wrong gradient
scales; test_data_parallel.py and the SGD tests below detect them.
"""

from __future__ import annotations

import functools
import itertools
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import torch

from forge.checkpoint import Checkpoints
from forge.config import parse_toml_text
from forge.optim import build_optimizer
from forge.run.restore import load_training_state
from forge.run.resume import ResumePoint
from forge.tools.verify.record import Settings, every_batch, make_step
from forge.train.state import all_tensors
from tests.support.buffers import SMALL, engine_config
from tests.support.building import built
from tests.support.equivalence import (
    TOLERANCE,
    assert_equal,
    layout,
    plain_model,
    reference,
    tiny_config,
    wholes,
)
from tests.support.harness import run_ranks
from tests.support.layouts import experts_expected, experts_text, slow_unless

STEPS, LR, CLIP = 5, 1e-2, 0.3
ENGINES = ("ddp", "zero1", "zero2", "fsdp2")
REPLICAS = "dp_replicate = 2\ndp_shard = 2"
# Name -> (engine, layout, ranks).
VARIANTS = {
    **{engine: (engine, "", 2) for engine in ENGINES},
    "fsdp2 with replicas": ("fsdp2", REPLICAS, 4),
    "zero1 with replicas": ("zero1", REPLICAS, 4),
    "zero2 with replicas": ("zero2", REPLICAS, 4),
    "zero1 over replicas": ("zero1", f'{REPLICAS}\nshard_optimizer_over = "dp"', 4),
    "zero2 over replicas": ("zero2", f'{REPLICAS}\nshard_optimizer_over = "dp"', 4),
}
MODELS = {"plain": "", "tied": "tie_embeddings = true\nqk_norm = true\nattention_bias = true\n"}


def config_of(
    variant: str, *, accumulation: int = 1, tp: int = 1, pp: int = 1, model: str = "plain", **more: Any
) -> str:
    engine, keys, ranks = VARIANTS[variant]
    micro = 12 // ranks // accumulation
    keys = f"tp = {tp}\npp = {pp}\n{keys}{SMALL}"
    return engine_config(engine, keys, model=MODELS[model], micro=micro, batch=12, **more)


@functools.cache
def plain(model: str) -> dict[str, Any]:
    """Return losses, norms and parameters of five steps of a plain module under PyTorch's AdamW."""
    config = parse_toml_text(config_of("fsdp2", model=model))
    net, chosen = plain_model(config), config.optimizer
    named = dict(net.named_parameters())
    exempt = [name for name in named if any(fnmatchcase(name, glob) for glob in chosen.no_decay)]
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for n, p in named.items() if n not in exempt]},
            {"params": [named[n] for n in exempt], "weight_decay": 0.0},
        ],
        lr=LR,
        betas=chosen.betas,
        eps=chosen.eps,
        weight_decay=chosen.weight_decay,
    )
    found: dict[str, Any] = {"losses": [], "norms": []}
    for _, batch in zip(range(STEPS), every_batch(config), strict=False):
        valid = (batch.labels >= 0).sum()
        losses = net(batch.tokens, batch.labels, batch.positions, batch.documents)
        optimizer.zero_grad()
        (losses[0] / valid).backward()
        found["losses"].append((losses[1] / valid).item())
        found["norms"].append(torch.nn.utils.clip_grad_norm_(net.parameters(), CLIP).item())
        optimizer.step()
    return found | {"parameters": {name: p.detach().clone() for name, p in named.items()}}


def train(
    rank: int, world: int, text: str, begin: int, end: int, load: str = "", save: str = ""
) -> dict[str, Any]:
    """Train steps begin + 1 to end. load: a checkpoint to start from. save: write a checkpoint after them."""
    model, config, meshes = built(text, world)
    compiled = config.compile if config.compile.optimizer else None
    optimizer = build_optimizer(model.shards, config.optimizer, compiled=compiled)
    if load:
        for shard in model.shards:
            shard.data.fill_(float("nan"))
        state = {"progress": {"step": begin}, "optimizer": {"updates": begin}}
        load_training_state(ResumePoint(Checkpoints(Path(load)).path(begin), state), model, optimizer)
        model.after_update()
    found: dict[str, Any] = {"losses": [], "norms": []}
    read = every_batch(config, meshes.data_rank, meshes.data_ranks)
    for step, batch in zip(range(end), read, strict=False):
        if step < begin:
            continue
        made = make_step(model, optimizer, batch, step + 1, Settings(lr=LR, max_norm=CLIP))
        found["losses"].append(made.pieces["loss", "cross-entropy"][0].values.item())
        found["norms"].append(made.pieces["norm", "gradient"][0].values.item())
    if save:
        checkpoints = Checkpoints(Path(save), mode="sync")
        (outcome,) = checkpoints.save(end, all_tensors(model, optimizer), optimizer.state(), {}, {})
        assert outcome.error is None, outcome.error
    found["parameters"] = wholes(model.shards, [shard.data for shard in model.shards])
    moments = {}
    for slot in ("exp_avg", "exp_avg_sq"):
        own = [(shard, values) for name, shard, values in optimizer.tensors() if name == slot]
        of_all = wholes([shard for shard, _ in own], [values for _, values in own])
        moments |= {f"{name} {slot}": values for name, values in of_all.items()}
    return found | {"moments": moments}


def assert_close(found: dict[str, Any], expected: dict[str, Any], tolerance: float = TOLERANCE) -> None:
    skipped = len(expected["losses"]) - len(found["losses"])
    for key in ("losses", "norms"):
        assert found[key] == pytest.approx(expected[key][skipped:], rel=0, abs=tolerance), key
    assert found["parameters"].keys() == expected["parameters"].keys()
    for name, parameter in expected["parameters"].items():
        difference = (found["parameters"][name] - parameter).abs().max().item()
        assert difference <= tolerance, f"{name}: differs by {difference:.3e}"


def _matrix() -> list[Any]:
    cases = []
    for variant, (_, _, ranks) in VARIANTS.items():
        for tp, pp, accumulation in itertools.product((1, 2), (1, 2), (1, 3)):
            world = ranks * tp * pp
            if world > 8 or accumulation < pp:  # a pipeline needs as many microbatches as stages
                continue
            # Fast: for each number of ranks, one engine without accumulation, and one with pp.
            fast = world < 8 and (accumulation == 3 or (variant == "zero1" and world == 2))
            fast = fast and (pp == 1 or variant == "zero2") and (tp == 1 or variant == "zero1")
            fast = fast and variant not in (
                "zero1 with replicas",
                "zero2 with replicas",
                "zero2 over replicas",
            )
            cases.append(pytest.param(variant, accumulation, tp, pp, world, marks=slow_unless(fast)))
    return cases


@pytest.mark.parametrize(("variant", "accumulation", "tp", "pp", "world"), _matrix())
def test_five_steps_equal_one_plain_process(variant, accumulation, tp, pp, world) -> None:
    text = config_of(variant, accumulation=accumulation, tp=tp, pp=pp)
    for found in run_ranks(train, world, text, 0, STEPS):
        assert_close(found, plain("plain"))


COMPILED = '[compile]\noptimizer = true\nbackend = "eager"\n'


@pytest.mark.parametrize(
    ("variant", "tp"),
    [
        pytest.param(variant, tp, marks=slow_unless((variant, tp) == ("zero1", 1)))
        for variant, tp in itertools.product(ENGINES, (1, 2))
    ],
)
def test_a_compiled_update_equals_one_plain_process(variant: str, tp: int) -> None:
    text = config_of(variant, accumulation=3, tp=tp) + COMPILED
    for found in run_ranks(train, 2 * tp, text, 0, STEPS):
        assert_close(found, plain("plain"))


@pytest.mark.parametrize(
    "variant",
    [
        pytest.param(variant, marks=slow_unless(variant == "zero1"))
        for variant in ("ddp", "zero1", "zero2", "zero1 over replicas")
    ],
)
def test_tied_and_biased_models(variant: str) -> None:
    world = VARIANTS[variant][2]
    for found in run_ranks(train, world, config_of(variant, accumulation=3, model="tied"), 0, STEPS):
        assert_close(found, plain("tied"))


# Checkpoints


@pytest.fixture(scope="module")
def after_three(tmp_path_factory: pytest.TempPathFactory):
    """Return a function from an engine to the folder of its checkpoint after three steps on two ranks."""

    @functools.cache
    def save(engine: str) -> str:
        folder = str(tmp_path_factory.mktemp(engine))
        run_ranks(train, 2, config_of(engine), 0, 3, "", folder)
        return folder

    return save


# The next test and tests/end_to_end/test_engines.py have other pairs.
SAVED = [("fsdp2", "ddp"), ("zero1", "fsdp2")]


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [pytest.param(*pair, marks=slow_unless(pair in SAVED)) for pair in itertools.product(ENGINES, ENGINES)],
)
def test_any_engine_continues_any_others_checkpoint(saved: str, loaded: str, after_three) -> None:
    for found in run_ranks(train, 2, config_of(loaded, accumulation=3), 3, STEPS, after_three(saved)):
        assert_close(found, plain("plain"))


@pytest.mark.parametrize(
    ("saved", "world", "engine", "keys"),
    [
        ("fsdp2", 1, "zero1", ""),
        pytest.param("zero1", 3, "zero1", "", marks=pytest.mark.slow),
        ("fsdp2", 3, "zero2", ""),
        ("zero2", 3, "fsdp2", ""),
        ("zero1", 4, "zero2", f'{REPLICAS}\nshard_optimizer_over = "dp"'),
        pytest.param("ddp", 4, "zero1", "tp = 2", marks=pytest.mark.slow),
        pytest.param("zero2", 4, "fsdp2", "tp = 2", marks=pytest.mark.slow),
    ],
)
def test_an_engine_continues_a_checkpoint_on_any_number_of_ranks(
    saved: str, world: int, engine: str, keys: str, after_three
) -> None:
    text = engine_config(engine, keys + SMALL, batch=12)
    for found in run_ranks(train, world, text, 3, STEPS, after_three(saved)):
        assert_close(found, plain("plain"))


FORMATS = {
    "float32": ("float32", "float32", "float32"),
    "bfloat16": ("float32", "bfloat16", "float32"),
    "all bfloat16": ("bfloat16", "bfloat16", "bfloat16"),
}


# tests/end_to_end/test_engines.py kills and resumes whole runs of each engine in bfloat16.
RESUMED = [("zero1", "all bfloat16"), ("zero2", "bfloat16")]


@pytest.mark.parametrize(
    ("engine", "formats"),
    [
        pytest.param(*case, marks=slow_unless(case in RESUMED))
        for case in itertools.product(("ddp", "zero1", "zero2"), FORMATS)
    ],
)
def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(engine: str, formats: str, tmp_path) -> None:
    text = config_of(engine, accumulation=3, formats=FORMATS[formats])
    through = run_ranks(train, 2, text, 0, STEPS)[0]
    run_ranks(train, 2, text, 0, 3, "", str(tmp_path))
    resumed = run_ranks(train, 2, text, 3, STEPS, str(tmp_path))[0]
    assert resumed["losses"] == through["losses"][3:] and resumed["norms"] == through["norms"][3:]
    for kind in ("parameters", "moments"):
        assert all(torch.equal(resumed[kind][name], value) for name, value in through[kind].items()), kind


@pytest.mark.parametrize(
    ("formats", "tolerance"), [("float32", 2e-6), pytest.param("bfloat16", 3e-3, marks=pytest.mark.slow)]
)
def test_engines_differ_only_by_rounding(formats: str, tolerance: float) -> None:
    runs = {
        engine: run_ranks(train, 2, config_of(engine, accumulation=3, formats=FORMATS[formats]), 0, STEPS)[0]
        for engine in ENGINES
    }
    for engine, found in runs.items():
        assert found["losses"] == pytest.approx(runs["fsdp2"]["losses"], rel=tolerance), engine
        assert found["norms"] == pytest.approx(runs["fsdp2"]["norms"], rel=20 * tolerance), engine
    assert plain("plain")["losses"] == pytest.approx(runs["zero1"]["losses"], rel=tolerance)


# With every other feature, and with SGD, which hides no scale


@functools.cache
def expected(model: str) -> Any:
    return reference(tiny_config(model=MODELS[model]))


RECOMPUTE = '[activation_checkpoint]\nmode = "{}"\n'
COMPILE = '[compile]\nenabled = true\nbackend = "aot_eager_decomp_partition"\n'
PINS = '[precision]\nfp32_modules = ["layers.*.attention_norm", "head"]\n'


# Each with its engines in the fast tests.
FEATURES = [
    ((4, "tp = 2\ncp = 2", RECOMPUTE.format("full")), []),
    (
        (4, "tp = 2\nsequence_parallel = false\nloss_parallel = false", RECOMPUTE.format("selective")),
        [],
    ),
    ((2, "cp = 2", ""), []),
    ((2, "", RECOMPUTE.format("selective") + COMPILE), ["zero2"]),
    ((2, "tp = 2", COMPILE), []),
    ((2, "", RECOMPUTE.format("offload")), ["zero1"]),
    ((4, "tp = 2", RECOMPUTE.format("offload") + COMPILE), []),
    ((3, "", ""), ["zero2"]),
]


@pytest.mark.parametrize(
    ("world", "keys", "extra", "engine"),
    [
        pytest.param(*feature, engine, marks=slow_unless(engine in quick))
        for feature, quick in FEATURES
        for engine in ("ddp", "zero1", "zero2")
    ],
)
def test_with_other_features(world: int, keys: str, extra: str, engine: str) -> None:
    text = tiny_config(parallel=f'data_parallel = "{engine}"\n{keys}{SMALL}', model=MODELS["tied"]) + extra
    batch = "global_batch_size = 8"
    if world == 3:
        text, alone = text.replace(batch, "global_batch_size = 6"), tiny_config(model=MODELS["tied"])
        assert_equal(layout(text, 3), reference(alone.replace(batch, "global_batch_size = 6")))
        return
    assert_equal(layout(text, world), expected("tied"))


def test_pins_change_nothing_in_float64() -> None:
    text = tiny_config(parallel=f'data_parallel = "zero1"{SMALL}', micro=2)
    text = text.replace("[precision]\n", PINS)
    assert_equal(layout(text, 2), expected("plain"))


# Experts, sharded over other ranks than the rest, and pipeline stages, each with its own engine


@pytest.mark.parametrize(
    ("engine", "world", "keys", "balance"),
    [
        ("zero1", 4, "ep = 2", "sequence_aux_loss"),
        pytest.param("zero1", 4, f"ep = 2\n{REPLICAS}", "bias", marks=pytest.mark.slow),
        pytest.param("zero2", 4, "tp = 2\nep = 2", "aux_loss", marks=pytest.mark.slow),
        ("zero2", 2, "ep = 2", "bias"),  # experts whole on their rank, everything else shared
        ("zero2", 4, f'ep = 2\n{REPLICAS}\nshard_optimizer_over = "dp"', "bias"),
        ("ddp", 4, f"ep = 2\n{REPLICAS}", "bias"),
        pytest.param("ddp", 2, "", "aux_loss", marks=pytest.mark.slow),
    ],
)
def test_mixtures_of_experts(engine: str, world: int, keys: str, balance: str) -> None:
    text = experts_text(balance, f'data_parallel = "{engine}"\n{keys}{SMALL}', micro=2)
    assert_equal(layout(text, world), experts_expected(balance))


@functools.cache
def four_layers(model: str) -> Any:
    return reference(_four_layers("", model))


def _four_layers(keys: str, model: str) -> str:
    return tiny_config(parallel=keys, model=MODELS[model]).replace("n_layers = 3", "n_layers = 4")


# Each with its engine in the fast tests, if any; test_pipeline.py has other pairs.
SCHEDULES = {
    ("1F1B", 4, "tied"): "",
    # These schedules compute weight gradients themselves, without hooks.
    ("ZBVZeroBubble", 4, "tied"): "zero2",
    ("DualPipeV", 2, "plain"): "zero1",
    ("InterleavedZeroBubble", 2, "plain"): "ddp",
}


@pytest.mark.parametrize(
    ("schedule", "world", "model", "engine"),
    [
        pytest.param(*case, engine, marks=slow_unless(engine == fast))
        for case, fast in SCHEDULES.items()
        for engine in ("ddp", "zero1", "zero2")
    ],
)
def test_pipelines(schedule: str, world: int, model: str, engine: str) -> None:
    text = _four_layers(f'pp = 2\ndata_parallel = "{engine}"{SMALL}', model)
    assert_equal(layout(f'{text}\n[pipeline]\nschedule = "{schedule}"\n', world), four_layers(model))
