"""Tensor parallelism equals one process: every option, with data parallelism and accumulation."""

import functools
import itertools

import pytest
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel

from tests.support.covering import covering, pairs
from tests.support.equivalence import (
    RankRecord,
    WholeRecord,
    assert_equal,
    layout,
    layout_on_rank,
    reference,
    tiny_config,
)
from tests.support.harness import run_ranks

# The vocabulary has 67 tokens, indivisible by every degree.
VARIANTS = {
    "plain": "n_kv_heads = 4\n",
    "tied": "n_kv_heads = 4\ntie_embeddings = true",
    "everything": "n_kv_heads = 4\nqk_norm = true\nattention_bias = true\nsliding_window = 24\nsliding_window_pattern = 2\n"
    "logit_soft_cap = 5.0\nattention_soft_cap = 3.0\n",
}


@functools.cache
def expected(variant: str) -> WholeRecord:
    return reference(text(variant))


def text(variant: str, parallel: str = "", micro: int = 1) -> str:
    return tiny_config(parallel=parallel, model=VARIANTS[variant], micro=micro).replace(
        "n_kv_heads = 2\n", ""
    )


def check(world: int, parallel: str, variant: str = "plain", micro: int = 4) -> None:
    assert_equal(layout(text(variant, parallel, micro), world), expected(variant))


def _two_ranks() -> list:
    """Return all cases. The fast ones cover each pair of model, sequence and loss parallelism."""
    grid = list(itertools.product(VARIANTS, ("true", "false"), ("true", "false")))
    fast = covering(grid, lambda case: pairs(*case))
    return [pytest.param(*case, marks=() if case in fast else pytest.mark.slow) for case in grid]


@pytest.mark.parametrize(("variant", "sequence", "loss"), _two_ranks())
def test_two_ranks(variant: str, sequence: str, loss: str) -> None:
    check(2, f"tp = 2\nsequence_parallel = {sequence}\nloss_parallel = {loss}", variant)


@pytest.mark.parametrize("sequence", ["true", pytest.param("false", marks=pytest.mark.slow)])
def test_four_ranks(sequence: str) -> None:
    check(4, f"tp = 4\nsequence_parallel = {sequence}", "everything")


@pytest.mark.parametrize(
    "variant",
    [
        pytest.param("plain", marks=pytest.mark.slow),
        "tied",
        pytest.param("everything", marks=pytest.mark.slow),
    ],
)
def test_with_fsdp_and_accumulation(variant: str) -> None:
    check(4, "tp = 2\ndp_shard = 2", variant, micro=2)


@pytest.mark.slow
def test_with_fsdp_without_sequence_and_loss_parallel() -> None:
    check(4, "tp = 2\nsequence_parallel = false\nloss_parallel = false", "everything", micro=2)


def test_with_replicas() -> None:
    check(4, "tp = 2\ndp_replicate = 2\ndp_shard = 1", "everything", micro=2)


def test_with_gradients_reduced_once_per_step() -> None:
    check(4, "tp = 2\ndefer_gradient_reduction = true", "tied", micro=1)


@pytest.mark.slow  # test_context_parallel.py covers both axes, and is fast
@pytest.mark.parametrize("context", ["allgather", "ring"])
def test_with_context_parallelism(context: str) -> None:
    check(4, f'tp = 2\ncp = 2\ncontext = "{context}"', "everything")


@pytest.mark.slow  # test_blocks.py covers recomputation of split blocks, and is fast
@pytest.mark.parametrize(
    "more",
    [
        '[activation_checkpoint]\nmode = "selective"\n',
        '[activation_checkpoint]\nmode = "full"\n[compile]\nenabled = true\nloss = true\nbackend = "aot_eager"\n',
    ],
)
@pytest.mark.parametrize("sequence", ["true", "false"])
def test_with_recomputation_and_compile(more: str, sequence: str) -> None:
    keys = text("everything", f"tp = 2\nsequence_parallel = {sequence}", 4)
    assert_equal(layout(keys + more, 2), expected("everything"))


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_with_hsdp_on_eight_ranks(variant: str) -> None:
    check(8, "tp = 2\ndp_replicate = 2\ndp_shard = 2", variant, micro=1)


def test_grouped_heads_down_to_one_per_rank() -> None:
    both = tiny_config(parallel="tp = 2", micro=4)
    assert "n_kv_heads = 2" in both
    assert_equal(layout(both, 2), reference(tiny_config()))


PLANS = {
    "only the feed-forward": {
        "layers.*.feed_forward.w[13]": "colwise",
        "layers.*.feed_forward.w2": "rowwise",
    },
    "gathered features": {
        "layers.*.attention.w[qkv]": "colwise_rep",
        "layers.*.attention.wo": "rowwise_rep",
        "layers.0.feed_forward.w1": "colwise_rep",
        "layers.1.feed_forward.w2": "rowwise_rep",
        "head": "colwise_rep",
    },
    "one layer": {
        "embedding": "rowwise",
        "layers.1.attention.w[qkv]": "colwise",
        "layers.1.attention.wo": "rowwise",
    },
}


@pytest.mark.parametrize(
    ("plan", "sequence"),
    [
        pytest.param(plan, sequence, marks=() if number % 2 == (sequence == "true") else pytest.mark.slow)
        for number, plan in enumerate(PLANS)
        for sequence in ("true", "false")
    ],
)
def test_plans_by_hand(plan: str, sequence: str) -> None:
    styles = "\n".join(f'"{name}" = "{style}"' for name, style in PLANS[plan].items())
    keys = f"tp = 2\nsequence_parallel = {sequence}\n[parallel.tp_plan]\n{styles}"
    check(2, keys, "everything")


def test_a_plan_by_import_path() -> None:
    check(2, f'tp = 2\ntp_plan = "{__name__}:torch_plan"')


def torch_plan(model, config) -> dict:
    """Return PyTorch's own styles for a part. Its input is then a plain tensor."""
    stream = Shard(1) if config.parallel.sequence_parallel else Replicate()
    return {
        "layers.*.feed_forward": PrepareModuleInput(
            input_layouts=(stream,), desired_input_layouts=(Replicate(),)
        ),
        "layers.*.feed_forward.w[13]": ColwiseParallel(),
        "layers.*.feed_forward.w2": RowwiseParallel(output_layouts=stream),
        "layers.*.attention.w[qkv]": "colwise",
        "layers.*.attention.wo": "rowwise",
    }


@pytest.mark.parametrize("variant", ["plain", "everything"])
def test_attention_in_styles_of_pytorch(variant: str) -> None:
    """A norm of queries or keys knows that its rank has only some heads."""
    check(2, f'tp = 2\ntp_plan = "{__name__}:torch_attention"', variant)


def torch_attention(model, config) -> dict:
    stream = Shard(1) if config.parallel.sequence_parallel else Replicate()
    return {
        "layers.*.attention.w[qkv]": ColwiseParallel(input_layouts=stream),
        "layers.*.attention.wo": RowwiseParallel(output_layouts=stream),
    }


def forget_qk_norm() -> None:
    """Let each rank keep only its own heads' gradient of the shared QK norms."""
    from forge.parallel.step import model as built
    from forge.parallel.tensor import apply

    def all_but_one(model, shards):
        return [shard for shard in apply.partial_shards(model, shards) if "q_norm" not in shard.name]

    built.partial_shards = all_but_one


def only_local_logsumexp() -> None:
    """Normalise over the rank's own rows of the vocabulary."""
    from forge.parallel.tensor.apply import SplitVocabulary

    combine = SplitVocabulary.combine
    SplitVocabulary.combine = lambda self, lse, target: (lse, combine(self, lse, target)[1])


@pytest.mark.parametrize(
    ("defect", "found"),
    [
        pytest.param(
            forget_qk_norm,
            "gradient of layers.0.attention.q_norm.weight|norm of",
            marks=pytest.mark.slow,
        ),
        (only_local_logsumexp, "loss of"),
    ],
)
def test_known_defects_are_caught(defect, found: str) -> None:
    broken = run_ranks(_with_defect, 2, text("everything", "tp = 2", 4), defect)
    with pytest.raises(AssertionError, match=found):
        assert_equal(broken, expected("everything"))


def _with_defect(rank: int, world: int, config: str, defect) -> RankRecord:
    defect()
    return layout_on_rank(rank, world, config)
