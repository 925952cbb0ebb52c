"""Experts over ranks: shards, messages and their dtypes, and router counts."""

from __future__ import annotations

import functools
import logging
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from benchmarks.collectives import collectives_of
from forge.model import Router, host
from forge.model.dispatch import LocalDispatcher
from forge.model.experts import RowGroups
from forge.parallel.dispatch import AllToAllDispatcher, NodeDispatcher
from forge.parallel.step.model import SequentialModel
from tests.support.building import built
from tests.support.equivalence import tiny_config
from tests.support.harness import run_ranks

N_EXPERTS, DIM, TOP_K, LAYERS = 8, 6, 3, 3
WIDTH = 32  # of the model's stream; DIM belongs to the dispatcher tests


def moe(parallel: str = "", micro: int = 4, more: str = "", experts: int = N_EXPERTS) -> str:
    section = f"n_kv_heads = 4\n[model.moe]\nn_experts = {experts}\nexpert_dim = 32\n{more}"
    return tiny_config(parallel=parallel, model=section, micro=micro).replace("n_kv_heads = 2\n", "")


def precise(keys: str, compute: str = "bfloat16", storage: str = "float32") -> str:
    formats = f'[precision]\nstorage = "{storage}"\ncompute = "{compute}"\nreduce = "float32"\n'
    return keys[: keys.index("[precision]")] + formats + keys[keys.index("[data]") :]


def build(text: str, world: int) -> tuple[Any, Any]:
    """Return the model of `text` and this rank's first batch."""
    one = built(text, world)
    return one.model, next(one.batches())


# The dispatcher alone.


def _dispatcher(world: int, nodes: int, parts: int) -> AllToAllDispatcher | NodeDispatcher:
    """Return a dispatcher for experts over all ranks. nodes: number of nodes. parts: of the tokens."""
    if nodes == 1:
        return AllToAllDispatcher(dist.group.WORLD, N_EXPERTS, parts)
    ranks = torch.arange(world).view(nodes, -1)
    across, within = (dist.new_subgroups_by_enumeration(sets.tolist())[0] for sets in (ranks.T, ranks))
    return NodeDispatcher(across, within, N_EXPERTS, parts)


def _dispatch(rank: int, world: int, chosen: str, drop: bool, nodes: int, parts: int) -> None:
    generator = torch.Generator().manual_seed(rank)
    # With two parts, the second part of rank 0 is empty.
    tokens = (1 if parts > 1 else 5) + 3 * rank
    experts = {
        "any": torch.rand(tokens, N_EXPERTS, generator=generator).argsort(-1)[:, :TOP_K],
        "none": torch.full((tokens, TOP_K), N_EXPERTS),
        "one": torch.full((tokens, TOP_K), 2),
        "last rank": torch.full((tokens, TOP_K), N_EXPERTS - 1),
    }[chosen]
    if drop:
        experts = experts.masked_fill(torch.rand(experts.shape, generator=generator) < 0.4, N_EXPERTS)
    x, weights = torch.randn(tokens, DIM, generator=generator), torch.rand(tokens, TOP_K, generator=generator)
    scales = torch.arange(1.0, N_EXPERTS + 1)

    def compute(rows: torch.Tensor, groups: RowGroups, begin: int = 0) -> torch.Tensor:
        """Multiply by e + 1 and square, for expert e."""
        counts = groups.counts
        own = scales[begin : begin + len(counts)].repeat_interleave(counts)
        # Rows past the counted ones are undefined.
        padded = torch.cat([own, own.new_full((len(rows) - len(own),), float("nan"))])
        return (padded.unsqueeze(-1) * rows) ** 2

    share = N_EXPERTS // world
    remote = _dispatcher(world, nodes, parts), functools.partial(compute, begin=rank * share)
    results = []
    for dispatch, work in ((LocalDispatcher(N_EXPERTS, drops=drop or chosen == "none"), compute), remote):
        inputs = x.clone().requires_grad_(), weights.clone().requires_grad_()
        out = dispatch(inputs[0], experts, inputs[1], work)
        out.square().sum().backward()
        results.append([out.detach(), inputs[0].grad, inputs[1].grad])
    for local, spread in zip(*results, strict=True):
        torch.testing.assert_close(spread, local)


@pytest.mark.parametrize("drop", [False, True])
@pytest.mark.parametrize("chosen", ["any", "one", "last rank", "none"])
@pytest.mark.parametrize(
    ("world", "nodes", "parts"), [(2, 1, 1), (4, 1, 1), (4, 2, 1), (4, 4, 1), (4, 1, 2), (4, 2, 2)]
)
def test_rows_go_to_their_experts_and_back(
    world: int, nodes: int, parts: int, chosen: str, drop: bool
) -> None:
    run_ranks(_dispatch, world, chosen, drop, nodes, parts)


# Shards.


def _holdings(rank: int, world: int, text: str) -> dict[str, Any]:
    model, _ = build(text, world)
    found = {}
    for shard in model.shards:
        group = None if shard.replicas is None else dist.get_process_group_ranks(shard.replicas)
        pieces = [piece.clone() for _, piece in shard.pieces(shard.data)]
        found[shard.name] = shard.kind, shard.boxes, group, pieces
    return found


def holdings(world: int, parallel: str, experts: int = N_EXPERTS, name: str = "w13") -> list[Any]:
    ranks = run_ranks(_holdings, world, moe(parallel, micro=1, experts=experts))
    return [rank[f"layers.1.feed_forward.experts.{name}"] for rank in ranks]


def test_shards_of_experts_and_routers_have_their_kind() -> None:
    (rank,) = run_ranks(_holdings, 1, moe(more="n_shared_experts = 1\nn_dense_layers = 1"))
    kinds = Counter(kind for kind, *_ in rank.values())
    assert kinds["expert"] == 2 * (LAYERS - 1) and kinds["router"] == LAYERS - 1
    assert rank["layers.1.feed_forward.shared.w1.weight"][0] == "dense"


@pytest.mark.parametrize(
    ("world", "parallel", "experts", "sizes"),
    [
        (4, "ep = 4", 8, (2, 64, 32)),
        (4, "ep = 2", 8, (2, 64, 32)),
        (4, "", 8, (2, 64, 32)),
        (4, "tp = 2\nep = 2", 8, (2, 64, 32)),
        (4, "", 2, (2, 16, 32)),  # fewer experts than ranks: each is cut
        (4, "ep = 2", 2, (1, 32, 32)),
    ],
)
def test_every_expert_is_held_once(world: int, parallel: str, experts: int, sizes: tuple[int, ...]) -> None:
    held = torch.zeros(experts, 64, 32)
    for kind, boxes, copies, _ in holdings(world, parallel, experts):
        (box,) = boxes
        assert kind == "expert" and copies is None and box.sizes == sizes
        held[tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))] += 1
    assert (held == 1).all()


def test_replicas_hold_copies_of_experts() -> None:
    for rank, (_, boxes, copies, _) in enumerate(holdings(4, "dp_replicate = 2\ndp_shard = 2\nep = 2")):
        assert copies == [rank % 2, rank % 2 + 2] and boxes[0].offsets[0] == 4 * (rank % 2)


@pytest.mark.parametrize("parallel", ["ep = 4", "ep = 2", "tp = 2\nep = 4"])
def test_initial_experts_differ_and_are_equal_on_every_layout(parallel: str) -> None:
    ((_, _, _, (alone,)),) = holdings(1, "")
    together = torch.zeros_like(alone)
    for _, (box,), _, (values,) in holdings(4, parallel):
        together[tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))] = values
    assert torch.equal(together, alone)
    assert len({tuple(expert[0, :4].tolist()) for expert in together}) == N_EXPERTS


def _state_of_routers(rank: int, world: int, text: str) -> list[Any]:
    model, _ = build(text, world)
    return [(s.name, s.kind, s.data.dtype, s.replicas.size()) for s in model.buffers]


def test_router_state_is_replicated_and_saved_in_checkpoints() -> None:
    for rank in run_ranks(_state_of_routers, 2, precise(moe("ep = 2"), storage="bfloat16")):
        assert [name for name, *_ in rank[:2]] == [
            "layers.0.feed_forward.router.bias",
            "layers.0.feed_forward.router.previous_counts",
        ]
        assert [(kind, dtype, copies) for _, kind, dtype, copies in rank[:2]] == [
            ("router", torch.float32, 2),
            ("router", torch.int64, 2),
        ]


# Messages.


def _sent(rank: int, world: int, text: str) -> dict[str, int]:
    model, batch = build(text, world)
    tokens = torch.tensor(100.0, dtype=torch.float64)
    counted = []
    for _ in range(2):  # the second step includes leftovers of the first
        sent = collectives_of(functools.partial(model.forward_backward, batch, tokens)).number()
        model.finalize_gradients()
        moved = collectives_of(functools.partial(model.update_router, torch.zeros(()))).number()
        model.zero_gradients()
        counted.append((sent, moved))
    assert counted[0] == counted[1], counted
    return counted[0]


def sent(
    world: int, parallel: str, micro: int = 4, more: str = "", extra: str = ""
) -> tuple[Counter, Counter]:
    ranks = run_ranks(_sent, world, moe(parallel, micro, more) + extra)
    assert all(rank == ranks[0] for rank in ranks), ranks
    return Counter(ranks[0][0]), Counter(ranks[0][1])


@pytest.mark.parametrize("microbatches", [1, 2])
def test_three_exchanges_per_layer_and_forward_two_per_backward(microbatches: int) -> None:
    step, routers = sent(2, "ep = 2", 4 // microbatches)
    assert step["all_to_all"] == 5 * LAYERS * microbatches
    assert routers == {"all_reduce": 1}


@pytest.mark.parametrize(("mode", "number"), [("full", 5 + 3), ("selective", 5)])
def test_selective_recomputation_exchanges_no_tokens_again(mode: str, number: int) -> None:
    step, _ = sent(2, "ep = 2", 4, extra=f'[activation_checkpoint]\nmode = "{mode}"\n')
    assert step["all_to_all"] == number * LAYERS


def _waits(rank: int, world: int, text: str) -> list[int]:
    """Return the number of host reads of row counts in each of two steps."""
    model, batch = build(text, world)
    lists_of, found = host.lists_of, []

    def counted(tensors: Sequence[torch.Tensor]) -> list[Any]:
        found[-1] += 1
        return lists_of(tensors)

    host.lists_of = counted
    for _ in range(2):
        found.append(0)
        model.forward_backward(batch, torch.tensor(100.0))
        model.zero_gradients()
    return found


@pytest.mark.parametrize(
    ("mode", "more"),
    [
        ("none", ""),
        ("full", ""),
        ("selective", ""),
        ("full", "\nep_overlap = true"),
        ("none", "\nep_overlap = true\nep_node_size = 1"),
    ],
)
def test_the_host_waits_once_per_layer_and_microbatch_recomputed_or_not(mode: str, more: str) -> None:
    text = precise(moe("ep = 2" + more, 2), compute="float32") + f'[activation_checkpoint]\nmode = "{mode}"\n'
    assert run_ranks(_waits, 2, text) == [[2 * LAYERS] * 2] * 2


def test_experts_at_every_degree_one_send_nothing() -> None:
    step, routers = sent(1, "")
    assert not step and not routers


def test_experts_on_other_ranks_than_their_block_are_gathered_and_reduced_separately() -> None:
    dense = Counter(run_ranks(_sent, 4, tiny_config(micro=2))[0][0])
    step, _ = sent(4, "ep = 2", 2)
    # Once more in backward, except the last block's.
    assert step["all_gather"] - dense["all_gather"] == LAYERS + LAYERS - 1
    assert step["reduce_scatter"] - dense["reduce_scatter"] == LAYERS
    step, _ = sent(4, "ep = 1", 2)
    assert step["all_gather"] == dense["all_gather"] and step["reduce_scatter"] == dense["reduce_scatter"]
    # A rank with all of its experts unsharded has nothing to gather.
    step, _ = sent(4, "ep = 4", 2)
    assert step["all_gather"] == dense["all_gather"] and step["reduce_scatter"] == dense["reduce_scatter"]


def _of_routers(rank: int, world: int, text: str) -> tuple[list[int], int, set[tuple[Any, int]]]:
    """Return the bytes of a step's all-reduces, the number of routers as FSDP units, and (sizes, copies) of their weights."""
    model, batch = build(text, world)

    def step() -> None:
        model.forward_backward(batch, model.count_tokens(batch))
        model.finalize_gradients()

    collectives = collectives_of(step)
    routers = [shard for shard in model.shards if shard.kind == "router"]
    held = {(shard.boxes[0].sizes, shard.replicas.size() if shard.replicas else 1) for shard in routers}
    units = sum(
        isinstance(module, Router) and isinstance(module, FSDPModule) for module in model.parts[0].modules()
    )
    return collectives.sizes("all_reduce"), units, held


@pytest.mark.parametrize("parallel", ["ep = 2", "dp_replicate = 2\ndp_shard = 2", "tp = 2"])
def test_routers_are_whole_on_every_rank_and_summed_once_per_step(parallel: str) -> None:
    """Even in float32 beside bfloat16, and with two microbatches."""
    text, weight = precise(moe(parallel, 2)), 4 * N_EXPERTS * WIDTH
    for reduced, units, held in run_ranks(_of_routers, 4, text):
        assert reduced.count(LAYERS * weight) == 1
        assert held == {((N_EXPERTS, WIDTH), 4)} and units == 0


def test_routers_in_need_of_a_cast_are_units() -> None:
    text = precise(moe("ep = 2", 2), storage="bfloat16")
    for reduced, units, held in run_ranks(_of_routers, 2, text):
        assert 4 * LAYERS * N_EXPERTS * WIDTH not in reduced and units == LAYERS
        assert {sizes for sizes, _ in held} == {(N_EXPERTS // 2, WIDTH)}


@pytest.mark.parametrize(("balance", "number"), [("aux_loss", 0), ("sequence_aux_loss", LAYERS)])
def test_only_balancing_by_sequence_sums_counts_in_forward(balance: str, number: int) -> None:
    more = f'balance = "{balance}"\nz_loss_coef = 0.1'
    step, _ = sent(2, "cp = 2\nep = 2", 8, more)
    plain, _ = sent(2, "cp = 2\nep = 2", 8, 'balance = "none"')
    assert step["all_reduce"] - plain["all_reduce"] == number


def _prefetched(rank: int, world: int, text: str) -> tuple[list[str], list[str]]:
    model, _ = build(text, world)
    part = model.parts[0]
    names = {module: name for name, module in part.named_modules()}
    states = [part.layers["0"]._get_fsdp_state(), part.layers["1"]._get_fsdp_state()]
    names_of = lambda states: [names[state._modules[0]] for state in states]  # noqa: E731
    return (
        names_of(states[0]._states_to_forward_prefetch),
        names_of(states[1]._states_to_backward_prefetch),
    )


def test_a_block_gathers_the_next_one_with_its_experts_ahead() -> None:
    forward, backward = run_ranks(_prefetched, 4, precise(moe("ep = 2", 2)))[0]
    experts = "layers.{}.feed_forward.experts"
    assert forward == ["layers.1", experts.format(1)]
    assert backward == [experts.format(1), "layers.0", experts.format(0)]


def test_a_block_whose_experts_are_on_its_own_ranks_is_one_unit() -> None:
    assert run_ranks(_prefetched, 2, precise(moe("ep = 1")))[0] == (["layers.1"], ["layers.0"])


# Dtypes.


def _dtypes(rank: int, world: int, text: str) -> dict[str, Any]:
    model, batch = build(text, world)
    seen: dict[str, Any] = {}

    def note(name: str, module: Any, inputs: Any, output: Any) -> None:
        weight = next(module.parameters())
        outputs = output if isinstance(output, tuple) else (output,)
        seen[name] = weight.dtype, [out.dtype for out in outputs]

    for name, module in model.parts[0].named_modules():
        if name.endswith((".router", ".experts")):
            module.register_forward_hook(functools.partial(note, name))
    model.forward_backward(batch, model.count_tokens(batch))
    model.finalize_gradients()
    seen["gradients"] = {shard.grad.dtype for shard in model.shards}
    return seen


@pytest.mark.parametrize("parallel", ["ep = 2", "ep = 2\ntp = 2\nsequence_parallel = false"])
def test_routers_compute_in_float32_beside_bfloat16(parallel: str) -> None:
    for seen in run_ranks(_dtypes, 2, precise(moe(parallel))):
        assert seen.pop("gradients") == {torch.float32}
        for name, (computes, returns) in seen.items():
            if name.endswith("router"):
                assert (computes, returns) == (torch.float32, [torch.int64, torch.float32])
            else:
                assert (computes, returns) == (torch.bfloat16, [torch.bfloat16])


def _bytes_of_rows(rank: int, world: int, text: str) -> list[int]:
    model, batch = build(text, world)
    tokens = model.count_tokens(batch)
    return collectives_of(functools.partial(model.forward_backward, batch, tokens)).sizes("all_to_all")


def test_experts_in_float32_receive_rows_in_bfloat16() -> None:
    text = precise(moe("ep = 2", 2))
    pinned = text.replace("[precision]\n", '[precision]\nfp32_modules = ["layers.*.feed_forward.experts"]\n')
    assert pinned != text
    plain, exact = (sum(map(sum, run_ranks(_bytes_of_rows, 2, keys))) for keys in (text, pinned))
    assert exact == pytest.approx(
        plain, rel=0.1
    )  # routing differs a little, float32 rows would be twice as large


# Router counts.


def _counts(rank: int, world: int, text: str) -> dict[str, Any]:
    model, batch = build(text, world)
    assert isinstance(model, SequentialModel)
    (router, *_) = model.parts[0].routers.values()
    seen = {}
    model.evaluate(batch)
    model.logits(batch.tokens[:1])
    seen["evaluated"] = router.counts.sum().item()
    model.forward_backward(batch, model.count_tokens(batch))
    seen["own"] = router.counts.sum().item()
    before = router.bias.clone(), router.previous_counts.clone()
    skipped = model.update_router(torch.ones(()))
    assert torch.equal(router.bias, before[0]) and torch.equal(router.previous_counts, before[1])
    assert not router.counts.any()
    model.forward_backward(batch, model.count_tokens(batch))
    moved = model.update_router(torch.zeros(()))
    assert torch.equal(skipped.values[:, :N_EXPERTS], moved.values[:, :N_EXPERTS])
    seen["reported"] = moved.values[0, :N_EXPERTS].sum().item()
    seen["valid"] = model.count_tokens(batch).item()
    seen["bias"] = router.bias.clone()
    seen["ends"] = moved.values[0, -2:].tolist()
    seen["layers"] = moved.layers
    return seen


@pytest.mark.parametrize("parallel", ["ep = 2", "tp = 2\nep = 1\nsequence_parallel = false"])
def test_trained_tokens_are_counted_once_and_a_skipped_step_moves_nothing(parallel: str) -> None:
    ranks = run_ranks(_counts, 2, moe(parallel, more="bias_update_rate = 0.5\nn_dense_layers = 1"))
    assert sum(rank["own"] for rank in ranks) == ranks[0]["reported"] == 2 * ranks[0]["valid"]
    for rank in ranks:
        assert rank["evaluated"] == 0 and rank["layers"] == (1, 2)
        assert torch.equal(rank["bias"], ranks[0]["bias"]) and rank["bias"].abs().max() == 0.5
        assert rank["ends"] == [rank["bias"].min().item(), rank["bias"].max().item()]


def _logits(rank: int, world: int, text: str) -> torch.Tensor:
    model, _ = build(text, world)
    return model.logits(torch.arange(7).unsqueeze(0))


@pytest.mark.parametrize("sequence", ["true", "false"])
def test_scores_of_a_sequence_of_any_length(sequence: str) -> None:
    (alone,) = run_ranks(_logits, 1, moe())
    for rank in run_ranks(_logits, 2, moe(f"tp = 2\nep = 2\nsequence_parallel = {sequence}")):
        torch.testing.assert_close(rank, alone, rtol=0, atol=1e-12)


# With other features.


def _float8(rank: int, world: int, text: str) -> tuple[list[str], list[str], bool]:
    messages: list[str] = []
    log = logging.getLogger("forge.parallel.float8")
    log.addHandler(handler := logging.Handler())
    log.setLevel(logging.INFO)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    model, batch = build(text, world)
    converted = [n for n, m in model.parts[0].named_modules() if type(m).__name__ == "Float8Linear"]
    sums = model.forward_backward(batch, model.count_tokens(batch))
    model.finalize_gradients()
    finite = all(shard.grad.isfinite().all() for shard in model.shards if shard.boxes)
    return converted, messages, bool(finite and sums.objective.isfinite())


def test_float8_excludes_routers_and_routed_experts_and_reports_it() -> None:
    keys = precise(moe("ep = 2", more="n_shared_experts = 1"))
    keys = keys.replace("[precision]", '[precision]\nfloat8 = "tensorwise"')
    for converted, messages, finite in run_ranks(_float8, 2, keys):
        assert "layers.0.feed_forward.shared.w1" in converted and finite
        assert not any("router" in name or "experts" in name for name in converted)
        assert any("routed experts" in line for line in messages)


def _graphs(rank: int, world: int, text: str) -> tuple[int, int]:
    from torch._dynamo.utils import counters

    model, batch = build(text, world)
    for _ in range(2):
        model.forward_backward(batch, model.count_tokens(batch))
    return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


def test_all_blocks_share_their_graphs() -> None:
    """Graphs: attention, shared experts, router, activation and five dispatch kernels.

    Two of them get another number of rows in the second block, and are compiled once more with dynamic shapes.
    """
    compiled = '[compile]\nenabled = true\nbackend = "aot_eager"\n'
    for graphs, breaks in run_ranks(_graphs, 2, moe("ep = 2", more="n_shared_experts = 1") + compiled):
        assert (graphs, breaks) == (11, 0)


def _capacity(rank: int, world: int, text: str) -> tuple[float, float]:
    model, batch = build(text, world)
    sums = model.forward_backward(batch, model.count_tokens(batch))
    report = model.update_router(torch.zeros(()))
    assert sums.objective.isfinite() and all(s.grad.isfinite().all() for s in model.shards if s.boxes)
    return report.values[:, N_EXPERTS + 2].sum().item(), report.values[:, :N_EXPERTS].sum().item()


def test_a_capacity_factor_drops_and_reports() -> None:
    for dropped, chosen in run_ranks(_capacity, 2, moe("ep = 2", more="capacity_factor = 0.5")):
        assert 0.4 * chosen < dropped < 0.7 * chosen
