"""A plan equals a run over gloo in bytes of state and in every collective."""

from random import Random

import pytest
import torch

from forge.config import check_world, parse_toml_text
from forge.config.model import MoEConfig
from forge.model.router import Router
from forge.parallel.dispatch import first_visits
from forge.runtime.errors import UserError
from forge.tools.plan import fake
from forge.tools.plan.links import visited_nodes
from tests.support.layouts import SCHEDULES
from tests.support.planning import (
    FULL,
    INT8,
    MUON,
    SELECTIVE,
    SQUARE_EXPERTS,
    allocated,
    experts,
    facts_of,
    in_blocks,
    larger,
    measured,
    pipeline,
    plan_text,
    planned,
    traced,
)

RESIDUALS = "residual = 'attention'\nresidual_block_size = 2\n"
CASES = {
    "fsdp2": (plan_text().replace("global_batch_size = 8", "global_batch_size = 20"), 4),
    "hybrid": (plan_text("dp_replicate = 2"), 4),
    "zero2 and tensor": (plan_text('tp = 2\ndata_parallel = "zero2"'), 4),
    "zero1 and ring": (plan_text('cp = 2\ncontext = "ring"\ndata_parallel = "zero1"'), 4),
    "experts": (experts("ep = 2\ntp = 2"), 4),
    "pipeline": (pipeline("1F1B"), 4),
    "attention residuals in a pipeline": (pipeline("1F1B", model="residuals"), 4),
    "attention residuals and latent experts": (
        pipeline("Interleaved1F1B", "tp = 2", "residuals, experts"),
        4,
    ),
    "muon": (plan_text() + MUON, 4),
    "muon, tensor and zero2": (plan_text('tp = 2\ndata_parallel = "zero2"\ndp_replicate = 2') + MUON, 4),
    "muon and experts": (experts("ep = 2\ntp = 2") + MUON + "split_heads = true\n", 4),
    "muon and a pipeline": (pipeline("1F1B") + MUON, 4),
    "mxfp8, gathered in codes": (in_blocks("mxfp8"), 2),
    "blockwise, gathered in codes": (in_blocks("blockwise"), 2),
    "mxfp8 and experts over copies": (in_blocks("mxfp8", "dp_replicate = 2", SQUARE_EXPERTS), 4),
    "blockwise and recomputation": (in_blocks("blockwise") + FULL, 2),
    "mxfp8, recomputed and so gathered in precision.compute": (in_blocks("mxfp8") + FULL, 2),
    "int8": (plan_text("tp = 2") + INT8, 4),
    "int8 and zero1 over copies": (
        plan_text('dp_replicate = 2\ndata_parallel = "zero1"\nshard_optimizer_over = "dp"') + INT8,
        4,
    ),
    "int8 and experts": (experts("ep = 4") + INT8, 4),
    "experts, overlapped": (experts("ep = 2\nep_overlap = true"), 4),
}


def check(text: str, world: int) -> None:
    runs = measured(text, world)
    plans = planned(text, world)
    for plan in plans:
        expected, found = runs[plan.rank], facts_of(plan)
        assert found.state == expected.state
        assert found.collectives == expected.collectives


SLOW = pytest.mark.slow
FAST = ("muon",)


@pytest.mark.parametrize(
    "name",
    [name if name in FAST else pytest.param(name, marks=SLOW) for name in CASES],
)
def test_state_and_collectives_are_those_of_a_run(name: str) -> None:
    check(*CASES[name])


@SLOW
def test_rows_to_other_nodes_match_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    # Round-robin choices, 0 and 1, then 2 and 3: a token's two experts are on one of the two nodes.
    monkeypatch.setattr(fake, "visited_nodes", lambda moe, nodes: 1.0)
    check(experts("ep = 4\nep_node_size = 2"), 4)
    check(experts("ep = 4\nep_node_size = 2\nep_overlap = true"), 4)


@pytest.mark.parametrize(
    ("nodes", "groups", "limited"), [(2, 1, 1), (8, 1, 1), (8, 8, 4), (4, 8, 4), (16, 8, 4)]
)
def test_the_number_of_visited_nodes_per_token_matches_random_choices(
    nodes: int, groups: int, limited: int
) -> None:
    moe = MoEConfig(
        n_experts=64, top_k=8, expert_dim=8, n_expert_groups=groups, n_limited_groups=limited, balance="bias"
    )
    router = Router(16, moe, 0)
    router.bias.zero_()
    chosen = router.choose(torch.rand(1, 4096, 64, generator=torch.Generator().manual_seed(0)))
    visits = first_visits(chosen.flatten(0, 1) // (64 // nodes), nodes) < nodes
    # For a group on several nodes, the formula assumes that choices within groups are independent of the choice of groups.
    rel = 0.06 if nodes > groups > 1 else 0.01
    assert visited_nodes(moe, nodes) == pytest.approx(visits.sum(1).float().mean().item(), rel=rel)


ACTIVATIONS = {
    "plain": (larger(plan_text()), 1),
    "full": (larger(plan_text(), FULL), 1),
    "selective": (larger(plan_text(), SELECTIVE), 1),
    "attention residuals": (larger(plan_text(model=RESIDUALS)), 1),
    "attention residuals, full": (larger(plan_text(model=RESIDUALS), FULL), 1),
    "window": (larger(plan_text(model="sliding_window = 128\n")), 1),
    "experts": (larger(experts("")), 1),
    "tensor": (larger(plan_text("tp = 2")), 2),
    "gathered context": (larger(plan_text("cp = 2\ndata_parallel = 'zero1'")), 2),
    "ring": (larger(plan_text("cp = 2\ncontext = 'ring'\ndata_parallel = 'zero1'")), 2),
}


@pytest.mark.parametrize(
    "name", [name if name == "experts" else pytest.param(name, marks=SLOW) for name in ACTIVATIONS]
)
def test_activations_and_the_peak_match_the_allocator(name: str) -> None:
    text, world = ACTIVATIONS[name]
    (kept, peak), (expected_kept, expected_peak) = traced(text, world), allocated(text, world)
    assert kept == pytest.approx(expected_kept, rel=0.03)
    assert peak == pytest.approx(expected_peak, rel=0.03)


@SLOW
@pytest.mark.parametrize(
    ("text", "world"),
    [
        (larger(plan_text()), 2),
        (larger(plan_text("reshard_after_forward = 'always'"), FULL), 4),
        (larger(pipeline("1F1B")), 2),
        (larger(pipeline("1F1B", model="residuals")), 2),
        (larger(pipeline("ZBVZeroBubble")), 4),
    ],
)
def test_the_peak_with_gathered_parameters_and_pipelines_matches_the_allocator(text: str, world: int) -> None:
    _, peak = traced(text, world)
    _, expected = allocated(text, world)
    assert peak == pytest.approx(expected, rel=0.03)


def drawn(seed: int) -> tuple[str, int]:
    """A valid configuration on 1 to 8 ranks."""
    draw = Random(seed)
    while True:
        pick, world = draw.choice, draw.choice((1, 2, 4, 8))
        moe, pp = pick((False, True)), pick((1, 1, 2))
        degrees = {name: pick((1, 1, 2)) for name in ("tp", "cp", "dp_replicate")} | {"pp": pp}
        if moe:
            degrees["ep"] = pick((1, 2, 4))
        lines = [f"{name} = {value}" for name, value in degrees.items()]
        lines.append(f'data_parallel = "{pick(("fsdp2", "zero2", "zero1", "ddp"))}"')
        lines.append(f'context = "{pick(("allgather", "ring", "ulysses"))}"')
        lines.append(f"sequence_parallel = {pick(('true', 'false'))}")
        lines.append(f"loss_parallel = {pick(('true', 'false'))}")
        text = experts("\n".join(lines)) if moe else plan_text("\n".join(lines))
        text = text.replace("global_batch_size = 8", f"global_batch_size = {pick((8, 16, 32))}")
        text += f'\n[activation_checkpoint]\nmode = "{pick(("none", "full", "selective"))}"\n'
        if pp > 1:
            text += f'[pipeline]\nschedule = "{pick(SCHEDULES)}"\n'
        try:
            check_world(parse_toml_text(text), world)
        except UserError:
            continue
        return text, world


@SLOW
@pytest.mark.parametrize("seed", range(60))
def test_layouts_drawn_at_random_are_planned_as_they_run(seed: int) -> None:
    check(*drawn(seed))
