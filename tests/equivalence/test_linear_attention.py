"""Linear attention equals one process on every layout. States pass between cp ranks; tp divides heads."""

from __future__ import annotations

import functools
import itertools
from unittest import mock

import pytest

from forge.data.synthetic import SyntheticSource
from tests.support import equivalence as compare
from tests.support.equivalence import RankRecord, WholeRecord, assert_equal, layout, reference, tiny_config
from tests.support.harness import run_ranks
from tests.support.small_documents import short_documents

HEADS = "n_key_heads = 2\nn_value_heads = 4\nkey_head_dim = 8\nvalue_head_dim = 6\n"
LINEAR = f"[model.linear_attention]\n{HEADS}chunk_size = 16\n"
MOE = "[model.moe]\nn_experts = 4\nexpert_dim = 16\nn_dense_layers = 1\n"
KIMI = LINEAR + 'kind = "kimi_delta"\n'
MODELS = {
    "alone": f'layer_pattern = ["linear"]\n{LINEAR}',
    "hybrid": f'layer_pattern = ["linear", "linear", "full"]\nqk_norm = true\n{LINEAR}',
    "kimi": f'layer_pattern = ["linear", "sliding", "full"]\nsliding_window = 24\n{KIMI}',
    "mixture": f'layer_pattern = ["linear", "full"]\n{LINEAR}{MOE}',
}
KINDS = ["allgather", "ulysses", "ring"]


@functools.cache
def expected(model: str) -> WholeRecord:
    return reference(tiny_config(model=MODELS[model]))


def check(world: int, parallel: str, model: str = "hybrid", micro: int = 4, more: str = "") -> None:
    text = tiny_config(parallel=parallel, model=MODELS[model], micro=micro) + more
    assert_equal(layout(text, world), expected(model))


def slow(*values: object) -> object:
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("cp", "kind", "model"),
    [
        (2, "ring", "hybrid"),
        slow(4, "allgather", "alone"),
        (2, "allgather", "kimi"),
        *(slow(*case) for case in itertools.product((2, 4), KINDS, MODELS)),
    ],
)
def test_context_parallel(cp: int, kind: str, model: str) -> None:
    check(cp, f'cp = {cp}\ncontext = "{kind}"', model)


@pytest.mark.parametrize("sequence", ["true", slow("false")])
@pytest.mark.parametrize("model", ["hybrid", "kimi", slow("alone"), slow("mixture")])
def test_tensor_parallel(sequence: str, model: str) -> None:
    check(2, f"tp = 2\nsequence_parallel = {sequence}", model)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["hybrid", "kimi"])
def test_projections_replicated_under_tensor_parallelism(model: str) -> None:
    check(2, 'tp = 2\n[parallel.tp_plan]\nembedding = "rowwise"', model)


AXES = ["cp = 2", "tp = 2", "pp = 2", "dp_shard = 2"]


@pytest.mark.slow
@pytest.mark.parametrize("axes", list(itertools.combinations(AXES, 2)), ids=" ".join)
@pytest.mark.parametrize("model", ["hybrid", "kimi", "mixture"])
def test_pairs_of_axes(axes: tuple[str, str], model: str) -> None:
    check(4, "\n".join(axes), model, micro=2)


@pytest.mark.parametrize(
    "parallel", ["pp = 2\ncp = 2", *map(slow, ("cp = 2\nep = 2", "cp = 2\ntp = 2\nep = 2"))]
)
def test_states_pass_within_the_stages_of_a_pipeline_and_beside_experts(parallel: str) -> None:
    check(8 if "tp" in parallel else 4 if "pp" in parallel else 2, parallel, "mixture", micro=2)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["fsdp2", "ddp", "zero1", "zero2"])
@pytest.mark.parametrize("more", ["", "cp = 2\n"])
@pytest.mark.parametrize("model", ["hybrid", "kimi"])
def test_engines(engine: str, more: str, model: str) -> None:
    check(4, f'data_parallel = "{engine}"\n{more}', model, micro=2)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["fsdp2", "ddp", "zero1", "zero2"])
def test_engines_with_experts_over_ranks(engine: str) -> None:
    check(4, f'data_parallel = "{engine}"\nep = 2', "mixture", micro=2)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["none", "full", "selective", "offload"])
@pytest.mark.parametrize("parallel", ["cp = 2", "tp = 2"])
@pytest.mark.parametrize("model", ["hybrid", "kimi", "mixture"])
def test_compiled_and_recomputed_blocks(mode: str, parallel: str, model: str) -> None:
    compiled = '[compile]\nenabled = true\nbackend = "aot_eager_decomp_partition"\n'
    check(2, parallel, model, more=f'[activation_checkpoint]\nmode = "{mode}"\n{compiled}')


@pytest.mark.parametrize("mode", ["full", slow("selective"), slow("offload")])
def test_recomputed_blocks(mode: str) -> None:
    check(2, "cp = 2", more=f'[activation_checkpoint]\nmode = "{mode}"\n')


def on_rank_with_short_documents(rank: int, world: int, text: str) -> RankRecord:
    with mock.patch.object(SyntheticSource, "document_ids", short_documents):
        return compare.layout_on_rank(rank, world, text)


def test_documents_shorter_than_the_convolution() -> None:
    """Documents of 1, 2 and 3 tokens begin in the middle of chunks and just before boundaries between ranks."""
    with mock.patch.object(SyntheticSource, "document_ids", short_documents):
        plain = reference(tiny_config(model=MODELS["hybrid"]))
    text = tiny_config(parallel="cp = 2", model=MODELS["hybrid"], micro=4)
    assert_equal(run_ranks(on_rank_with_short_documents, 2, text), plain)
