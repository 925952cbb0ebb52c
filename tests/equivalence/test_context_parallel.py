"""Context parallelism equals one process: ring, ulysses and all-gather, with every mask."""

import functools
import itertools
from unittest import mock

import pytest
import torch

from forge.data.synthetic import SyntheticSource
from forge.parallel.context.ring import PlainKernel
from tests.support import equivalence as compare
from tests.support.covering import covering, pairs
from tests.support.equivalence import RankRecord, WholeRecord, assert_equal, layout, reference, tiny_config
from tests.support.harness import run_ranks
from tests.support.small_documents import short_documents

KINDS = ["allgather", "ulysses", "ring"]
VARIANTS = {
    "plain": "",
    "tied": "tie_embeddings = true",
    "everything": "qk_norm = true\nattention_bias = true\nsliding_window = 24\nsliding_window_pattern = 2\n"
    "logit_soft_cap = 5.0\nattention_soft_cap = 3.0\n",
    "window of 3": "sliding_window = 3\n",
}


@functools.cache
def expected(variant: str) -> WholeRecord:
    return reference(tiny_config(model=VARIANTS[variant]))


def check(world: int, kind: str, parallel: str, variant: str = "plain", micro: int = 4) -> None:
    text = tiny_config(parallel=f'context = "{kind}"\n{parallel}', model=VARIANTS[variant], micro=micro)
    assert_equal(layout(text, world), expected(variant))


def _alone() -> list:
    """Return all cases. The fast ones cover each pair of kind, degree and model, except tied models."""
    grid = list(itertools.product(KINDS, (2, 4), VARIANTS))
    fast = covering([case for case in grid if case[2] != "tied"], lambda case: pairs(*case))
    return [pytest.param(*case, marks=() if case in fast else pytest.mark.slow) for case in grid]


@pytest.mark.parametrize(("kind", "cp", "variant"), _alone())
def test_context_parallel_alone(kind: str, cp: int, variant: str) -> None:
    check(cp, kind, f"cp = {cp}", variant)


@pytest.mark.parametrize(
    "kind", [kind if kind == "ring" else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS]
)
def test_with_fsdp_and_accumulation(kind: str) -> None:
    check(4, kind, "cp = 2\ndp_shard = 2", micro=2)


@pytest.mark.parametrize(
    "kind", [kind if kind == "ring" else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS]
)
def test_with_replicas_and_accumulation(kind: str) -> None:
    check(4, kind, "cp = 2\ndp_replicate = 2\ndp_shard = 1", "everything", micro=2)


@pytest.mark.parametrize(
    "kind", [kind if kind == "ring" else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS]
)
@pytest.mark.parametrize("sequence", ["true", pytest.param("false", marks=pytest.mark.slow)])
def test_with_tensor_parallelism(kind: str, sequence: str) -> None:
    check(4, kind, f"cp = 2\ntp = 2\nsequence_parallel = {sequence}", "everything")


SHORT = {"documents": "", "documents and window": "sliding_window = 3\n"}


def on_rank_with_short_documents(rank: int, world: int, text: str) -> RankRecord:
    with mock.patch.object(SyntheticSource, "document_ids", short_documents):
        return compare.layout_on_rank(rank, world, text)


def on_rank_with_lse_0(rank: int, world: int, text: str) -> RankRecord:
    """Plant a defect: rows without a visible key have lse = 0, the result of the CPU's fused attention."""
    right = PlainKernel.forward

    def wrong(*args):
        out, lse = right(*args)
        return out, lse.masked_fill(lse == -torch.inf, 0.0)

    with mock.patch.object(PlainKernel, "forward", wrong):
        return on_rank_with_short_documents(rank, world, text)


@functools.cache
def expected_with_short_documents(variant: str) -> WholeRecord:
    with mock.patch.object(SyntheticSource, "document_ids", short_documents):
        return reference(tiny_config(model=SHORT[variant]))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "variant", ["documents and window", pytest.param("documents", marks=pytest.mark.slow)]
)
def test_documents_shorter_than_a_chunk(kind: str, variant: str) -> None:
    text = tiny_config(parallel=f'context = "{kind}"\ncp = 2', model=SHORT[variant], micro=4)
    assert_equal(run_ranks(on_rank_with_short_documents, 2, text), expected_with_short_documents(variant))


def test_empty_rows_with_weight_are_caught() -> None:
    text = tiny_config(parallel='context = "ring"\ncp = 2', micro=4)
    with pytest.raises(AssertionError, match="loss of cross-entropy, step 1"):
        assert_equal(run_ranks(on_rank_with_lse_0, 2, text), expected_with_short_documents("documents"))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", ["none", "full", "selective", "offload"])
def test_with_compiled_and_recomputed_blocks(kind: str, mode: str) -> None:
    extra = f'[activation_checkpoint]\nmode = "{mode}"\n[compile]\nenabled = true\nbackend = "aot_eager_decomp_partition"\n'
    text = tiny_config(parallel=f'context = "{kind}"\ncp = 2', model=VARIANTS["everything"], micro=4) + extra
    assert_equal(layout(text, 2), expected("everything"))


# test_blocks.py covers recomputation with the ring, and is fast.
@pytest.mark.parametrize(
    "kind", [kind if kind == "ulysses" else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS]
)
def test_with_recomputed_blocks(kind: str) -> None:
    text = (
        tiny_config(parallel=f'context = "{kind}"\ncp = 2', micro=4)
        + '[activation_checkpoint]\nmode = "full"\n'
    )
    assert_equal(layout(text, 2), expected("plain"))


WHOLE_HEADS = """tp = 2
cp = 2
context = "ulysses"
[parallel.tp_plan]
"layers.*.feed_forward.w1" = "colwise"
"layers.*.feed_forward.w3" = "colwise"
"layers.*.feed_forward.w2" = "rowwise"
"""


@pytest.mark.slow
def test_ulysses_with_heads_that_tensor_parallelism_leaves_whole() -> None:
    one, ranks = (
        tiny_config(parallel=parallel, micro=4).replace("n_heads = 4", "n_heads = 2")
        for parallel in ("", WHOLE_HEADS)
    )
    assert_equal(layout(ranks, 4), reference(one))
