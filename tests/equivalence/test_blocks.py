"""Recomputation and compilation of blocks change no number: every mode alone, over ranks, and combined.

A float8 model over ranks equals float8 in one process with the same microbatches: a scale covers a whole tensor, so it
depends on the microbatch. In float64 the sums of different layouts differ by a relative 1e-16. A larger difference needs a
sum at the boundary between two float8 numbers, and these tests have none.
"""

import functools

import pytest
import torch

from tests.support.equivalence import WholeRecord, alone, assert_equal, layout, losses, reference, tiny_config

VARIANTS = {
    "plain": "",
    "everything": "qk_norm = true\nattention_bias = true\nsliding_window = 24\nsliding_window_pattern = 2\n",
}
RECOMPUTE = {
    "full": 'mode = "full"',
    "every second block": 'mode = "full"\nevery = 2',
    "attention": 'mode = "full"\nmodules = ["attention"]',
    "selective": 'mode = "selective"',
    "selective feed_forward": 'mode = "selective"\nmodules = ["feed_forward"]',
    "offload": 'mode = "offload"',
    "offload every second attention": 'mode = "offload"\nmodules = ["attention"]\nevery = 2',
    "memory_budget": 'mode = "memory_budget"\nmemory_budget = 0.2',
}
COMPILE = '[compile]\nenabled = true\nloss = true\nbackend = "aot_eager_decomp_partition"\n'


@functools.cache
def expected(variant: str) -> WholeRecord:
    return reference(tiny_config(model=VARIANTS[variant]))


def check(world: int, extra: str, variant: str = "plain", **options) -> None:
    text = tiny_config(model=VARIANTS[variant], **options) + extra
    assert_equal(layout(text, world), expected(variant))


def recompute(mode: str) -> str:
    return f"[activation_checkpoint]\n{RECOMPUTE[mode]}\n"


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("mode", "world"),
    [
        pytest.param(mode, world, marks=() if world == 2 or mode == "selective" else SLOW)
        for mode in RECOMPUTE
        for world in (1, 2)
        if mode != "memory_budget"
    ],
)
def test_activation_checkpointing(mode: str, world: int) -> None:
    check(world, recompute(mode), "everything" if mode == "selective" else "plain", micro=2)


@pytest.mark.parametrize("world", [pytest.param(1, marks=SLOW), 2])
def test_compile(world: int) -> None:
    check(world, COMPILE, "everything", micro=2)


@pytest.mark.parametrize(
    "mode",
    [
        *(pytest.param(mode, marks=SLOW) for mode in ("full", "attention", "memory_budget")),
        "selective",
        "offload",
    ],
)
def test_compile_with_activation_checkpointing(mode: str) -> None:
    check(2, COMPILE + recompute(mode), micro=2)


RESIDUALS = 'residual = "attention"\nresidual_block_size = 1\n'
MIXTURE = "[model.moe]\nn_experts = 4\ntop_k = 2\nexpert_dim = 24\nn_dense_layers = 1\n"


@pytest.mark.parametrize(
    ("mixture", "mode"),
    [
        pytest.param(mixture, mode, marks=() if mixture and mode == "full" else SLOW)
        for mixture in ("", MIXTURE)
        for mode in ("", "full", "selective", "attention", "offload")
    ],
)
def test_compile_with_attention_residuals(mixture: str, mode: str) -> None:
    text = tiny_config(model=RESIDUALS + mixture, micro=2)
    assert_equal(layout(text + COMPILE + (recompute(mode) if mode else ""), 2), reference(text))


@pytest.mark.skipif(
    torch.__version__.startswith("2.12."), reason="refused: this compiler cannot weigh meshes"
)
@pytest.mark.parametrize("pieces", ["true", pytest.param("false", marks=SLOW)])
def test_a_memory_budget_under_tensor_parallelism(pieces: str) -> None:
    check(2, COMPILE + recompute("memory_budget"), parallel=f"tp = 2\nsequence_parallel = {pieces}", micro=4)


def float8(kind: str, extra: str = "", **options) -> str:
    """Return a config twice as wide as the others: 16 must divide each rank's part of every matrix."""
    text = tiny_config(**options).replace("dim = 32", "dim = 64").replace("ffn_dim = 48", "ffn_dim = 96")
    return text.replace("[precision]", f'[precision]\nfloat8 = "{kind}"') + extra


@functools.cache
def float8_alone(kind: str) -> WholeRecord:
    found = alone(float8(kind))
    exact = reference(float8("none"))
    assert 1e-5 < abs(_losses(found)[0] - _losses(exact)[0]) < 1e-2, "not in float8, or far from exact"
    return found


def _losses(record: WholeRecord) -> list[float]:
    return [step["loss", "cross-entropy"].item() for step in record.steps[1:]]


BLOCKS = {
    "alone": "",
    "selective": recompute("selective"),
    "full and compiled": recompute("full") + COMPILE,
    "offload": recompute("offload"),
    "offload and compiled": recompute("offload") + COMPILE,
}
FAST_FLOAT8 = [("tensorwise", "alone")]


@pytest.mark.parametrize(
    ("kind", "blocks"),
    [
        pytest.param(kind, blocks, marks=() if (kind, blocks) in FAST_FLOAT8 else SLOW)
        for kind in ("tensorwise", "rowwise")
        for blocks in BLOCKS
    ],
)
def test_float8_over_ranks(kind: str, blocks: str) -> None:
    assert_equal(layout(float8(kind, BLOCKS[blocks]), 2), float8_alone(kind))


def test_float8_with_replicas() -> None:
    text = float8("tensorwise", parallel="dp_replicate = 2\ndp_shard = 2")
    assert_equal(layout(text, 4), float8_alone("tensorwise"))


def test_float8_gathered_in_another_format() -> None:
    text = float8("tensorwise").replace("[precision]", "[precision]\nfloat8_all_gather = false")
    assert_equal(layout(text, 2), float8_alone("tensorwise"))


SPLIT = {
    "tp": "tp = 2",
    "tp without sequence parallelism": "tp = 2\nsequence_parallel = false",
    "cp": "cp = 2",
    "ulysses": 'cp = 2\ncontext = "ulysses"',
    "ring": 'cp = 2\ncontext = "ring"',
}


FAST = [("tp", "selective"), ("ring", "full"), ("tp", "offload")]
PAIRS = [(split, mode) for split in SPLIT for mode in ("full", "selective", "offload")]


@pytest.mark.parametrize(
    ("split", "mode"), [pytest.param(*pair, marks=() if pair in FAST else SLOW) for pair in PAIRS]
)
def test_activation_checkpointing_with_split_blocks(split: str, mode: str) -> None:
    check(2, recompute(mode), "everything", parallel=SPLIT[split], micro=2)


@SLOW
@pytest.mark.parametrize("split", SPLIT)
def test_compile_with_split_blocks(split: str) -> None:
    check(2, COMPILE + recompute("selective"), "everything", parallel=SPLIT[split], micro=2)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["tensorwise", "rowwise"])
def test_float8_with_tensor_parallelism(kind: str) -> None:
    # Emulated products are in float32, and each rank computes a part of them.
    assert_equal(layout(float8(kind, parallel="tp = 2"), 2), float8_alone(kind), 1e-5)


# 16 divides every side.
LATENT = """n_heads = 4
attention = "mla"
[model.mla]
q_lora_rank = 32
kv_lora_rank = 32
qk_nope_head_dim = 16
qk_rope_head_dim = 16
v_head_dim = 16
"""


@SLOW
@pytest.mark.parametrize("kind", ["tensorwise", "rowwise"])
@pytest.mark.parametrize("extra", ["", COMPILE])
def test_float8_with_latent_attention(kind: str, extra: str) -> None:
    def text(parallel: str = "") -> str:
        whole = float8(kind, extra, model=LATENT, parallel=parallel)
        return whole.replace("n_heads = 4\n", "", 1).replace("n_kv_heads = 2\n", "")

    expected = alone(text())
    assert_equal(layout(text("dp_shard = 2"), 2), expected)
    # With tensor parallelism the projections to and from latents stay in precision.compute.
    split = layout(text("tp = 2"), 2)
    assert_equal(split, expected, 0.05)
    assert max(abs(a - b) for a, b in zip(losses(split), _losses(expected), strict=True)) < 2e-3


@SLOW
@pytest.mark.parametrize("kind", ["tensorwise", "rowwise"])
def test_float8_with_everything(kind: str) -> None:
    extra = COMPILE + recompute("selective")
    ranks = layout(float8(kind, extra, parallel="tp = 2\ncp = 2", micro=2), 4)
    # A rank scales its own part of the sequence, so results agree only up to float8's rounding, 2^-4 per value.
    assert_equal(ranks, float8_alone(kind), 0.05)
    assert max(abs(a - b) for a, b in zip(losses(ranks), _losses(float8_alone(kind)), strict=True)) < 2e-3
