"""blockwise and mxfp8: codes, outputs and gradients under every layout equal one process, to 1e-9 in float64.

Blocks belong to the global tensor, so a layout changes no scale. In float64 the sums of different layouts differ by a
relative 1e-16. A larger difference needs a sum at the boundary between two codes, and these tests have none.
"""

import functools

import pytest

from forge.tools.verify.ranks import run_ranks
from forge.tools.verify.record import RankRecord, Settings, record_on_rank
from tests.support.equivalence import (
    WholeRecord,
    alone,
    assert_equal,
    layout,
    reference,
    tiny_config,
    whole_of,
)

SLOW = pytest.mark.slow
KINDS = ["mxfp8", "blockwise"]
# Sides that tp = 2 divides into whole blocks.
SIDES = {"mxfp8": (64, 128), "blockwise": (256, 256)}
# Four chunks of whole blocks, for cp = 2.
SEQUENCE = {"mxfp8": 128, "blockwise": 512, "none": 128}
DENSE = ""
BIASES = "attention_bias = true\nffn_bias = true\n"
EXPERTS = "[model.moe]\nn_experts = 4\ntop_k = 2\nexpert_dim = 40\nn_shared_experts = 1\nn_dense_layers = 1\n"
SHARED = EXPERTS.replace("expert_dim = 40", "expert_dim = 64")
BIASED = SHARED.replace("n_shared_experts = 1", "expert_bias = true")
LATENT = """attention = "mla"
[model.mla]
q_lora_rank = 32
kv_lora_rank = 40
qk_nope_head_dim = 16
qk_rope_head_dim = 16
v_head_dim = 16
"""
RECOMPUTE = '[activation_checkpoint]\nmode = "full"\n'
COMPILED = '[activation_checkpoint]\nmode = "selective"\n[compile]\nenabled = true\nbackend = "aot_eager_decomp_partition"\n'


def text(kind: str, model: str = DENSE, parallel: str = "", micro: int = 1, extra: str = "") -> str:
    dim, ffn_dim = SIDES.get(kind, SIDES["mxfp8"])
    heads = "" if "mla" in model else "n_kv_heads = 4\n"
    whole = tiny_config(model=model, parallel=parallel, micro=micro)
    for old, new in {
        "n_kv_heads = 2\n": heads,
        "n_layers = 3": "n_layers = 2",
        "dim = 32": f"dim = {dim}",
        "ffn_dim = 48": f"ffn_dim = {ffn_dim}",
        "seq_len = 80": f"seq_len = {SEQUENCE[kind]}",
        "steps = 3": "steps = 2",
        "global_batch_size = 8": "global_batch_size = 4",
        "[precision]": f'[precision]\nfloat8 = "{kind}"',
    }.items():
        assert old in whole
        whole = whole.replace(old, new, 1)
    return whole + extra


@functools.cache
def expected(kind: str, model: str = DENSE) -> WholeRecord:
    found = alone(text(kind, model))
    exact = reference(text("none", model).replace("dim = 64", f"dim = {SIDES[kind][0]}"))
    first, other = (one.steps[1]["loss", "cross-entropy"].item() for one in (found, exact))
    assert model != DENSE or kind != "mxfp8" or 1e-5 < abs(first - other) < 3e-2, (
        "not in float8, or far from exact"
    )
    return found


def check(kind: str, world: int, model: str = DENSE, **options) -> None:
    assert_equal(layout(text(kind, model, **options), world), expected(kind, model))


LAYOUTS = {
    "fsdp2": (2, ""),
    "replicas": (4, "dp_replicate = 2\ndp_shard = 2"),
    "zero1": (2, 'data_parallel = "zero1"'),
    "zero2": (2, 'data_parallel = "zero2"'),
    "ddp": (2, 'data_parallel = "ddp"'),
    "tp": (2, "tp = 2"),
    "tp without sequence parallelism": (2, "tp = 2\nsequence_parallel = false"),
    "cp allgather": (2, "cp = 2"),
    "cp ring": (2, 'cp = 2\ncontext = "ring"'),
    "cp ulysses": (2, 'cp = 2\ncontext = "ulysses"'),
    "pp": (2, "pp = 2"),
    "tp and cp": (4, "tp = 2\ncp = 2"),
    "tp and pp": (4, "tp = 2\npp = 2"),
    "tp and zero1": (4, 'tp = 2\ndata_parallel = "zero1"'),
}
FAST = {("mxfp8", "fsdp2"), ("mxfp8", "zero1"), ("mxfp8", "tp"), ("mxfp8", "cp allgather"), ("mxfp8", "pp")}
FAST |= {("blockwise", "tp")}


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        pytest.param(kind, name, marks=() if (kind, name) in FAST else SLOW)
        for kind in KINDS
        for name in LAYOUTS
    ],
)
def test_dense_model(kind: str, name: str) -> None:
    world, parallel = LAYOUTS[name]
    check(kind, world, parallel=parallel)


GATHERED = "\nfloat8_all_gather = true"


@pytest.mark.parametrize("kind", ["mxfp8", pytest.param("blockwise", marks=SLOW)])
@pytest.mark.parametrize("parallel", ["", pytest.param("dp_replicate = 2\ndp_shard = 2", marks=SLOW)])
def test_weights_gathered_in_codes(kind: str, parallel: str) -> None:
    whole = text(kind, parallel=parallel, micro=1).replace(
        f'float8 = "{kind}"', f'float8 = "{kind}"{GATHERED}'
    )
    assert_equal(layout(whole, 4 if parallel else 2), expected(kind))


@SLOW
def test_weights_gathered_in_codes_under_a_split_backward() -> None:
    deep = text("blockwise").replace("n_layers = 2", "n_layers = 4")
    piped = deep.replace("[parallel]", "[parallel]\npp = 2\ndp_shard = 2")
    piped = piped.replace('float8 = "blockwise"', f'float8 = "blockwise"{GATHERED}')
    assert_equal(layout(f'{piped}[pipeline]\nschedule = "ZBVZeroBubble"\n', 4), alone(deep))


@pytest.mark.parametrize("kind", ["mxfp8", pytest.param("blockwise", marks=SLOW)])
def test_weights_resharded_over_fewer_ranks_are_gathered_whole(kind: str) -> None:
    check(kind, 4, parallel="reshard_after_forward = 2")


AHEAD = "[model.mtp]\ndepth = 1\n"


@pytest.mark.parametrize("parallel", ["", pytest.param("dp_shard = 2\npp = 2", marks=SLOW)])
@pytest.mark.parametrize("prefetch", [1, pytest.param(2, marks=SLOW)])
def test_weights_gathered_in_codes_with_an_embedding_called_twice(parallel: str, prefetch: int) -> None:
    keys = f'{parallel}\nprefetch = {prefetch}\nreshard_after_forward = "always"'
    assert_equal(layout(text("mxfp8", AHEAD, parallel=keys), 4 if parallel else 2), expected("mxfp8", AHEAD))


@SLOW
def test_weights_gathered_in_codes_without_prefetch_in_a_pipeline() -> None:
    keys = 'dp_shard = 2\npp = 2\nprefetch = 0\nreshard_after_forward = "always"'
    # Rank 0 makes a forward after a backward.
    one, ranks = (
        text("mxfp8", parallel=parallel).replace("global_batch_size = 4", "global_batch_size = 8")
        for parallel in ("", keys)
    )
    assert_equal(layout(ranks, 4), alone(one))


@pytest.mark.parametrize("kind", ["mxfp8", pytest.param("blockwise", marks=SLOW)])
def test_experts_gathered_in_codes(kind: str) -> None:
    model = SHARED if kind == "mxfp8" else SHARED.replace("= 64", "= 256")
    whole = text(kind, model).replace(f'float8 = "{kind}"', f'float8 = "{kind}"{GATHERED}')
    assert_equal(layout(whole, 2), expected(kind, model))


@pytest.mark.parametrize("kind", ["mxfp8", pytest.param("blockwise", marks=SLOW)])
def test_accumulation_and_recomputation(kind: str) -> None:
    check(kind, 1, micro=2, extra=RECOMPUTE)


@SLOW
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["fsdp2", "tp", "cp ring"])
def test_compiled_and_recomputed(kind: str, name: str) -> None:
    world, parallel = LAYOUTS[name]
    check(kind, world, parallel=parallel, micro=2, extra=COMPILED)


@pytest.mark.parametrize(
    "parallel", ["tp = 2", pytest.param("tp = 2\nsequence_parallel = false", marks=SLOW)]
)
def test_biases_under_tensor_parallelism(parallel: str) -> None:
    check("mxfp8", 2, BIASES, parallel=parallel)


@pytest.mark.parametrize("kind", ["mxfp8", pytest.param("blockwise", marks=SLOW)])
@pytest.mark.parametrize("parallel", ["tp = 2", pytest.param("dp_shard = 2", marks=SLOW)])
def test_latent_attention(kind: str, parallel: str) -> None:
    # Four heads; for blockwise, of 64 elements, so two ranks have whole blocks.
    latent = LATENT if kind == "mxfp8" else LATENT.replace("head_dim = 16", "head_dim = 64")
    check(kind, 2, latent, parallel=parallel)


LATENT_LAYOUTS = ["cp = 2", "tp = 2\nsequence_parallel = false", "tp = 2\ncp = 2"]
EXPANDING_OWN = [
    'cp = 2\ncontext = "ring"',
    'cp = 2\ncontext = "ulysses"',
    'tp = 2\ncp = 2\ncontext = "ring"',
]


@SLOW
@pytest.mark.parametrize("parallel", LATENT_LAYOUTS)
def test_latent_attention_without_the_expansion_of_latents(parallel: str) -> None:
    """With allgather, every cp rank expands all gathered latents. wkv_b stays in precision.compute, as the checks require."""
    keys = [text("mxfp8", LATENT, parallel=one) for one in ("", parallel)]
    excluded = 'float8 = "mxfp8"\nfloat8_exclude = ["*.wkv_b"]'
    one, ranks = (whole.replace('float8 = "mxfp8"', excluded) for whole in keys)
    assert_equal(layout(ranks, 2 * ("tp" in parallel) + 2 * ("cp" in parallel)), alone(one))


@SLOW
@pytest.mark.parametrize("parallel", EXPANDING_OWN)
def test_latent_attention_where_each_rank_expands_its_own_latents(parallel: str) -> None:
    one, ranks = (text("mxfp8", LATENT, parallel=degrees) for degrees in ("", parallel))
    assert_equal(layout(ranks, 2 * ("tp" in parallel) + 2), alone(one))


LINEAR = """layer_pattern = ["linear", "full"]
[model.linear_attention]
kind = "KIND"
n_key_heads = 4
n_value_heads = 4
key_head_dim = 16
value_head_dim = 16
"""


@SLOW
@pytest.mark.parametrize("kind", ["gated_delta", "kimi_delta"])
@pytest.mark.parametrize("parallel", ["tp = 2", "cp = 2", "pp = 2"])
def test_linear_attention(kind: str, parallel: str) -> None:
    check("mxfp8", 2, LINEAR.replace("KIND", kind), parallel=parallel)


MUON = "\n[optimizer]\nname = 'muon'\n"


def with_muon(rank: int, world: int, keys: str) -> RankRecord:
    return record_on_rank(rank, world, keys, Settings(steps=2))


@pytest.mark.parametrize("parallel", ["dp_shard = 2", pytest.param("tp = 2", marks=SLOW)])
def test_muon(parallel: str) -> None:
    (alone_,) = run_ranks(with_muon, 1, text("mxfp8", extra=MUON))
    ranks = run_ranks(with_muon, 2, text("mxfp8", parallel=parallel, extra=MUON))
    assert_equal(ranks, whole_of(alone_))


EXPERT_LAYOUTS = {
    "ep": (2, "ep = 2"),
    "ep over tp": (4, "tp = 2\nep = 2"),
    "ep over all": (4, "tp = 2\nep = 4"),
    "tp alone": (2, "tp = 2"),
    "fsdp2 alone": (2, ""),
    "cp": (4, "cp = 2\nep = 4"),
    "pp": (4, "pp = 2\nep = 2"),
    "zero1": (2, 'ep = 2\ndata_parallel = "zero1"'),
}


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        pytest.param(kind, name, marks=() if (kind, name) == ("mxfp8", "ep over tp") else SLOW)
        for kind in KINDS
        for name in EXPERT_LAYOUTS
    ],
)
def test_routed_experts(kind: str, name: str) -> None:
    world, parallel = EXPERT_LAYOUTS[name]
    model = SHARED if kind == "mxfp8" else SHARED.replace("= 64", "= 256")
    check(kind, world, model, parallel=parallel)


@SLOW
def test_experts_with_biases_and_padded_sides() -> None:
    check("mxfp8", 2, BIASED.replace("expert_dim = 64", "expert_dim = 40"), parallel="ep = 2")
    check("mxfp8", 2, EXPERTS, parallel="ep = 2", micro=2, extra=RECOMPUTE)
    check("mxfp8", 2, EXPERTS, parallel="ep = 2", micro=2, extra=COMPILED)
