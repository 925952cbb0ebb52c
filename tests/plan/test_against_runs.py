"""A plan says what a run over gloo does: bytes of state and every collective are equal."""

import pytest

from tests.support.layouts import pipeline_text
from tests.support.planning import facts_of, float32, measured, plan_text, planned

EXPERTS = "n_kv_heads = 4\n[model.moe]\nn_experts = 4\ntop_k = 2\nexpert_dim = 24\n"


def experts(parallel: str) -> str:
    return plan_text(parallel, model=EXPERTS).replace("n_kv_heads = 2\n", "")


def pipeline(schedule: str, parallel: str = "") -> str:
    text = float32(pipeline_text(2, schedule, parallel=parallel, micro=1))
    return text.replace("document_mask = true", "document_mask = false").replace(
        "global_batch_size = 8", "global_batch_size = 16"
    )


CASES = {
    "fsdp2": (plan_text().replace("global_batch_size = 8", "global_batch_size = 20"), 4),
    "hybrid": (plan_text("dp_replicate = 2"), 4),
    "zero2 and tensor": (plan_text('tp = 2\ndata_parallel = "zero2"'), 4),
    "zero1 and ring": (plan_text('cp = 2\ncontext = "ring"\ndata_parallel = "zero1"'), 4),
    "experts": (experts("ep = 2\ntp = 2"), 4),
    "pipeline": (pipeline("1F1B"), 4),
}


def check(text: str, world: int) -> None:
    runs = measured(text, world)
    plans = planned(text, world)
    for plan in plans:
        expected, found = runs[plan.rank], facts_of(plan)
        assert found.state == expected.state
        assert found.collectives == expected.collectives


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "name",
    [name if name in ("fsdp2", "experts", "pipeline") else pytest.param(name, marks=SLOW) for name in CASES],
)
def test_state_and_collectives_are_those_of_a_run(name: str) -> None:
    check(*CASES[name])
