"""Mixtures of experts equal one process under every layout and every balancing method."""

import itertools
from dataclasses import replace

import pytest
import torch

from tests.support.covering import covering
from tests.support.defects import routers_move_by_local_counts
from tests.support.equivalence import (
    RankRecord,
    Twist,
    assert_equal,
    layout,
    layout_on_rank,
    losses,
    norms,
    reference,
    routers,
)
from tests.support.harness import run_ranks
from tests.support.layouts import BALANCE, slow_unless
from tests.support.layouts import experts_expected as expected
from tests.support.layouts import experts_text as text


def check(world: int, parallel: str = "", variant: str = "bias", micro: int = 1, extra: str = "") -> None:
    assert_equal(layout(text(variant, parallel, micro) + extra, world), expected(variant))


def slow_but(*fast: str) -> list:
    """Return all balancing methods. Only `fast` ones are fast tests."""
    return [pytest.param(variant, marks=[] if variant in fast else pytest.mark.slow) for variant in BALANCE]


@pytest.mark.parametrize("variant", BALANCE)
def test_accumulation_in_one_process(variant: str) -> None:
    check(1, variant=variant, micro=2)


@pytest.mark.parametrize("variant", slow_but("bias", "one each"))
def test_two_ranks_share_the_experts(variant: str) -> None:
    check(2, "ep = 2", variant, micro=2)


FAST_TENSOR = [("bias", "true"), ("aux_loss", "false")]


@pytest.mark.parametrize(
    ("variant", "sequence"),
    [
        pytest.param(*case, marks=[] if case in FAST_TENSOR else pytest.mark.slow)
        for case in itertools.product(BALANCE, ("true", "false"))
    ],
)
def test_two_tensor_ranks_route_pieces_of_the_sequence(variant: str, sequence: str) -> None:
    check(2, f"tp = 2\nep = 2\nsequence_parallel = {sequence}", variant, micro=4)


# Name -> (ranks, keys of the layout, variant of the fast test or ""). Other variants are slow.
LAYOUTS = {
    "experts over fsdp": (4, "", "bias"),
    "ep 4": (4, "ep = 4", "sequence_aux_loss"),
    "ep 2, fsdp 2": (4, "ep = 2", ""),
    "hsdp": (4, "dp_replicate = 2\ndp_shard = 2", ""),
    "hsdp, ep 2": (4, "dp_replicate = 2\ndp_shard = 2\nep = 2", "bias"),
    "replicas alone": (2, "dp_replicate = 2\ndp_shard = 1", ""),
    "tp 2, experts over fsdp": (4, "tp = 2", ""),
    "tp 2, ep 4": (4, "tp = 2\nep = 4", "groups"),
    "tp 2, ep 2, hsdp, whole stream": (
        4,
        "tp = 2\nep = 2\ndp_replicate = 2\ndp_shard = 1\nsequence_parallel = false",
        "",
    ),
    "tp 4": (4, "tp = 4\nep = 2", ""),
    "cp 2, experts over fsdp": (2, "cp = 2", "sequence_aux_loss"),
    "cp 2, ep 4": (4, 'cp = 2\nep = 4\ncontext = "ring"', ""),
    "cp 2, tp 2, ep 2": (4, "cp = 2\ntp = 2\nep = 2", ""),
    "cp 2, tp 2, ep 4, whole stream": (4, "cp = 2\ntp = 2\nep = 4\nsequence_parallel = false", ""),
    "ep 4, nodes of 2": (4, "ep = 4\nep_node_size = 2", "groups"),
    "tp 2, ep 4, nodes of 1": (4, "tp = 2\nep = 4\nep_node_size = 1", ""),
    "cp 2, tp 2, ep 8, nodes of 4": (8, "cp = 2\ntp = 2\nep = 8\nep_node_size = 4", ""),
    "ep 2, fsdp 2, overlap": (4, "ep = 2\nep_overlap = true", "sequence_aux_loss"),
    "tp 2, ep 4, whole stream, overlap": (
        4,
        "tp = 2\nep = 4\nsequence_parallel = false\nep_overlap = true",
        "",
    ),
    "cp 2, ep 2, overlap": (2, "cp = 2\nep = 2\nep_overlap = true", ""),
    "ep 4, nodes of 2, overlap": (4, "ep = 4\nep_node_size = 2\nep_overlap = true", "bias"),
    "tp 2, ep 4, nodes of 1, overlap": (4, "tp = 2\nep = 4\nep_node_size = 1\nep_overlap = true", ""),
    "ep 8": (8, "ep = 8", ""),
    "ep 2, fsdp 4": (8, "ep = 2", ""),
    "ep 4, tp 2, hsdp": (8, "ep = 4\ntp = 2\ndp_replicate = 2\ndp_shard = 2", ""),
    "ep 8, cp 2, tp 2": (8, "ep = 8\ncp = 2\ntp = 2", ""),
}


def _layouts() -> list:
    """Return cases that cover every layout, and every variant with every value of each axis."""

    def goals(case: tuple[str, str]) -> set:
        name, variant = case
        world, parallel, _ = LAYOUTS[name]
        keys = dict(line.split(" = ") for line in parallel.split("\n") if line)
        axes = ("ep", "ep_node_size", "ep_overlap", "tp", "cp", "dp_replicate", "sequence_parallel")
        return {name, (variant, world)} | {(variant, axis, keys.get(axis)) for axis in axes}

    grid = list(itertools.product(LAYOUTS, BALANCE))
    fast = [(name, variant) for name, (_, _, variant) in LAYOUTS.items() if variant]
    return [
        pytest.param(*case, marks=[] if case in fast else pytest.mark.slow)
        for case in covering(grid, goals, fast)
    ]


@pytest.mark.parametrize(("name", "variant"), _layouts())
def test_layouts(name: str, variant: str) -> None:
    world, parallel, _ = LAYOUTS[name]
    # Eight data ranks have one sequence each.
    check(world, parallel, variant, micro=1 if name in ("ep 8", "ep 2, fsdp 4") else 2)


@pytest.mark.parametrize(
    ("experts", "world", "parallel"),
    [
        (6, 4, ""),  # the last rank has none
        pytest.param(2, 4, "", marks=pytest.mark.slow),  # each is cut
        (2, 4, "ep = 2"),
        pytest.param(3, 2, "ep = 1\ntp = 2", marks=pytest.mark.slow),
        pytest.param(4, 8, "ep = 2\ncp = 2", marks=pytest.mark.slow),
    ],
)
def test_experts_indivisible_by_the_ranks(experts: int, world: int, parallel: str) -> None:
    assert_equal(layout(text("bias", parallel, 2, experts), world), expected("bias", experts))


RECOMPUTE = '[activation_checkpoint]\nmode = "{}"\n'
COMPILE = '[compile]\nenabled = true\nloss = true\nbackend = "aot_eager"\n'


# Layout -> the mode of the fast test, if any.
RECOMPUTED = {
    (2, "ep = 1"): "",
    (4, "ep = 2"): "full",
    (4, "tp = 2\nep = 4\nsequence_parallel = false"): "",
    (4, "cp = 2\ntp = 2\nep = 2"): "",
    (2, "ep = 2\nep_overlap = true"): "selective",
    (4, "ep = 4\nep_node_size = 2\nep_overlap = true"): "",
}


@pytest.mark.parametrize(
    ("world", "parallel", "mode"),
    [
        pytest.param(*case, mode, marks=slow_unless(mode == fast))
        for case, fast in RECOMPUTED.items()
        for mode in ("full", "selective", "offload")
    ],
)
def test_recomputation(world: int, parallel: str, mode: str) -> None:
    check(world, parallel, "sequence_aux_loss", 2, RECOMPUTE.format(mode))


@pytest.mark.parametrize(
    ("part", "mode"),
    [
        pytest.param("feed_forward", "full", marks=pytest.mark.slow),
        ("feed_forward", "selective"),
        ("attention", "full"),
        pytest.param("attention", "selective", marks=pytest.mark.slow),
        ("feed_forward", "offload"),
    ],
)
def test_recomputation_of_one_part(part: str, mode: str) -> None:
    check(2, "ep = 2", "bias", 2, RECOMPUTE.format(mode) + f'modules = ["{part}"]\n')


@pytest.mark.parametrize(
    "mode",
    [*(pytest.param(mode, marks=pytest.mark.slow) for mode in ("none", "full", "offload")), "selective"],
)
@pytest.mark.parametrize(
    ("world", "parallel"),
    [
        (2, "ep = 2"),
        pytest.param(2, "tp = 2\nep = 2", marks=pytest.mark.slow),
        pytest.param(2, "ep = 2\nep_overlap = true", marks=pytest.mark.slow),
    ],
)
def test_compile(world: int, parallel: str, mode: str) -> None:
    check(world, parallel, "sequence_aux_loss", 4, RECOMPUTE.format(mode) + COMPILE)


@pytest.mark.parametrize(
    ("world", "parallel"),
    [
        pytest.param(4, "ep = 2\nprefetch = 0", marks=pytest.mark.slow),
        pytest.param(4, "ep = 2\nprefetch = 2", marks=pytest.mark.slow),
        pytest.param(4, "ep = 2\nprefetch = 9", marks=pytest.mark.slow),
        pytest.param(4, "ep = 2\ndefer_gradient_reduction = true", marks=pytest.mark.slow),
        (4, "ep = 2\ndp_replicate = 2\ndp_shard = 2\ndefer_gradient_reduction = true"),
        pytest.param(2, "tp = 2\nep = 1\ndefer_gradient_reduction = true", marks=pytest.mark.slow),
        (4, "ep = 2\ncpu_offload = true"),
        pytest.param(4, 'ep = 2\nreshard_after_forward = "never"', marks=pytest.mark.slow),
        pytest.param(4, 'ep = 2\nreshard_after_forward = "always"', marks=pytest.mark.slow),
        pytest.param(4, "ep = 2\nreshard_after_forward = 2", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("mode", ["none", pytest.param("selective", marks=pytest.mark.slow)])
def test_options_of_sharding(world: int, parallel: str, mode: str) -> None:
    check(world, parallel, "groups", 2, RECOMPUTE.format(mode))


@pytest.mark.parametrize("variant", ["bias", pytest.param("aux_loss", marks=pytest.mark.slow)])
def test_state_of_routers_over_five_steps_of_a_tied_model(variant: str) -> None:
    def five(parallel: str) -> str:
        keys = text(variant, parallel, micro=2).replace("steps = 3", "steps = 5")
        return keys.replace("[model.moe]", "tie_embeddings = true\n[model.moe]")

    whole = reference(five(""))
    moved = [
        step["router", "1.bias" if variant == "bias" else "1.previous_counts"] for step in whole.steps[1:]
    ]
    assert len(moved) == 5 and all(not torch.equal(a, b) for a, b in itertools.pairwise(moved))
    assert_equal(layout(five("ep = 2"), 4), whole)


# Extreme routing.


def equal_scores(weights: list[torch.Tensor], biases: list[torch.Tensor]) -> None:
    for weight in weights:
        weight.zero_()


def all_to_one(weights: list[torch.Tensor], biases: list[torch.Tensor]) -> None:
    for bias in biases:
        bias[5] = 100.0


def none_to_one_rank(weights: list[torch.Tensor], biases: list[torch.Tensor]) -> None:
    for bias in biases:
        bias[:4] = -100.0


def one_valid(labels: torch.Tensor, rank: int) -> None:
    kept = labels[0, 7].clone()
    labels.fill_(-100)
    if rank == 0:
        labels[0, 7] = kept


def none_valid(labels: torch.Tensor, rank: int) -> None:
    labels.fill_(-100)


@pytest.mark.parametrize(
    ("twist", "variant"),
    [
        (Twist(routers=all_to_one), "one each"),
        (Twist(routers=none_to_one_rank), "bias"),
        (Twist(labels=one_valid), "sequence_aux_loss"),
        pytest.param(Twist(labels=one_valid), "aux_loss", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize(
    ("world", "parallel"),
    [
        (4, "ep = 2"),
        pytest.param(2, "tp = 2\nep = 2", marks=pytest.mark.slow),
        pytest.param(2, "ep = 2\nep_overlap = true", marks=pytest.mark.slow),
        pytest.param(2, "ep = 2\nep_node_size = 1\nep_overlap = true", marks=pytest.mark.slow),
    ],
)
def test_extremes(twist: Twist, variant: str, world: int, parallel: str) -> None:
    assert_equal(layout(text(variant, parallel, 2), world, twist), expected(variant, twist=twist))


@pytest.mark.parametrize("variant", ["none", pytest.param("groups", marks=pytest.mark.slow)])
def test_equal_scores_go_to_the_lowest_indices(variant: str) -> None:
    # One step only, because afterwards scores are equal only up to rounding.
    twist = Twist(routers=equal_scores)
    ranks = layout(text(variant, "ep = 2", 2).replace("steps = 3", "steps = 1"), 4, twist)
    assert_equal(ranks, reference(text(variant).replace("steps = 3", "steps = 1"), twist))
    counts = routers(ranks)[0]["layers.0"][:8]
    assert (counts[:2] == counts.sum() / 2).all() and not counts[2:].any()


@pytest.mark.parametrize("variant", slow_but("bias"))
def test_a_batch_without_a_valid_token_changes_nothing(variant: str) -> None:
    ranks = layout(text(variant, "ep = 2", 2), 2, Twist(labels=none_valid))
    assert losses(ranks) == norms(ranks) == [0.0] * 3
    for step in routers(ranks):
        assert not any(state.any() for state in step.values())


# Planted defects from other projects: each must be found.


def same_data_on_expert_ranks() -> None:
    """Let ranks with the same experts read the same samples."""
    from forge.parallel import mesh

    class Meshes(mesh.Meshes):
        data_ranks = property(lambda self: self.degrees.dp // self.degrees.ep)

        def __init__(self, **fields):
            super().__init__(**fields | {"data_rank": fields["data_rank"] // fields["degrees"].ep})

    mesh.Meshes = Meshes


def expert_gradients_times_ep() -> None:
    """Scale as if each rank of an expert group had computed the whole group's loss."""
    from forge.parallel.step.model import SequentialModel

    finalize = SequentialModel.finalize_gradients

    def scaled(self) -> None:
        finalize(self)
        for shard in self.shards:
            if shard.kind == "expert" and shard.grad is not None:
                shard.grad.mul_(2.0)

    SequentialModel.finalize_gradients = scaled


def norm_without_ep() -> None:
    """Use the norm of rank 0's experts for all."""
    import torch.distributed as dist

    from forge.shard import Shard
    from forge.tools.verify import record

    counted, report = Shard.is_primary_replica, record.report_gradients
    on_first = property(lambda self: counted.fget(self) and (self.kind != "expert" or dist.get_rank() == 0))

    def of_first_rank(*arguments, **named):
        Shard.is_primary_replica = on_first
        try:
            return report(*arguments, **named)
        finally:
            Shard.is_primary_replica = counted

    record.report_gradients = of_first_rank


def experts_initialised_by_local_index() -> None:
    """Initialise each rank's experts with the indices of the first ones."""
    from forge.parallel import build
    from forge.parallel.initialize import initialize
    from forge.shard import Box, Shard

    def local(shards, values, seed) -> None:
        def first(shard: Shard) -> Shard:
            boxes = tuple(Box((0,) * len(box.offsets), box.sizes) for box in shard.boxes)
            return replace(shard, boxes=boxes) if shard.kind == "expert" else shard

        initialize([first(shard) for shard in shards], values, seed)

    build.build_parallel_model.__kwdefaults__["values"] = local


def bias_moved_in_forward() -> None:
    """Move the bias by each rank's own counts, in every microbatch."""
    from forge.model import Router

    forward = Router.forward

    def moving(self, *args):
        experts, weights = forward(self, *args)
        counts = torch.bincount(experts.flatten(), minlength=self.config.n_experts)
        self.bias += 0.01 * (counts.double().mean() - counts).sign().float()
        return experts, weights

    Router.forward = moving


def counted_again_in_recomputation() -> None:
    torch._C._current_graph_task_id = lambda: -1


def forget_the_router_gate() -> None:
    """Let each tp rank keep only its own tokens' router gradient."""
    from forge.parallel.step import model as built
    from forge.parallel.tensor import apply

    def all_but_routers(model, shards):
        return [shard for shard in apply.partial_shards(model, shards) if "router" not in shard.name]

    built.partial_shards = all_but_routers


TENSOR = "tp = 2\nep = 2"


@pytest.mark.parametrize(
    ("defect", "parallel", "found"),
    [
        pytest.param(
            same_data_on_expert_ranks, "ep = 2", "router of layers.0, step 1", marks=pytest.mark.slow
        ),
        (expert_gradients_times_ep, "ep = 2", "gradient of .*experts.w13, step 1"),
        pytest.param(norm_without_ep, "ep = 2", "norm of gradient, step 1", marks=pytest.mark.slow),
        pytest.param(
            experts_initialised_by_local_index, "ep = 2", "initial of .*, step 0", marks=pytest.mark.slow
        ),
        pytest.param(bias_moved_in_forward, "ep = 2", "disagree|router of|loss of", marks=pytest.mark.slow),
        pytest.param(
            counted_again_in_recomputation, "ep = 2", "router of layers.0, step 1", marks=pytest.mark.slow
        ),
        pytest.param(routers_move_by_local_counts, "ep = 2", "disagree|router of", marks=pytest.mark.slow),
        pytest.param(
            forget_the_router_gate, TENSOR, "gradient of .*router.weight, step 1", marks=pytest.mark.slow
        ),
        pytest.param(
            forget_the_router_gate,
            TENSOR + "\nsequence_parallel = false",
            "gradient of .*router.weight, step 1",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_known_defects_are_caught(defect, parallel: str, found: str) -> None:
    # Recomputation reveals counting twice. Changed routing in recomputation is a separate error.
    recompute = RECOMPUTE.format("none" if defect is bias_moved_in_forward else "full")
    with pytest.raises(AssertionError, match=found):
        broken = run_ranks(_with_defect, 2, text("bias", parallel, 2) + recompute, defect)
        assert_equal(broken, expected("bias"))


def _with_defect(rank: int, world: int, config: str, defect) -> RankRecord:
    defect()
    return layout_on_rank(rank, world, config)
