"""A plan names the matrix products in float8 on the hardware, and lists every layer that stays out."""

from __future__ import annotations

import pytest
import torch

from forge.config import Config, check_world, parse_toml_text
from forge.tools.plan.fake import FakeRank, fake_ranks
from forge.tools.plan.float8 import float8_notes, products_in_float8
from forge.tools.plan.hardware import find_hardware
from forge.tools.plan.stage import StagePlan
from forge.tools.plan.work import work_of
from tests.support.equivalence import tiny_config
from tests.support.planning import SQUARE_EXPERTS, in_blocks, planned

MOE = "[model.moe]\nn_experts = 4\ntop_k = 2\nexpert_dim = 24\n"


def config(section: str, model: str = "") -> Config:
    return parse_toml_text(tiny_config(model=model).replace("[precision]", f"[precision]\n{section}"))


@pytest.mark.parametrize(
    ("section", "card", "expected"),
    [
        ('float8 = "none"', "h100", set()),
        ('float8 = "rowwise"', "h100", {"linear"}),
        ('float8 = "rowwise"', "a100", set()),
        ('float8 = "blockwise"', "h200", {"linear"}),
        ('float8 = "blockwise"', "l40s", set()),
        ('float8 = "mxfp8"', "h100", set()),
        ('float8 = "mxfp8"', "b200", {"linear", "experts"}),
        ('float8 = "mxfp8"\nfloat8_experts = false', "b200", {"linear"}),
        ('float8 = "mxfp8"\nfloat8_emulate = true', "b200", set()),
    ],
)
def test_products_in_float8(section: str, card: str, expected: set[str]) -> None:
    assert products_in_float8(config(section, MOE), find_hardware(card)) == expected


def test_what_is_emulated_or_left_out_is_listed() -> None:
    chosen = config('float8 = "mxfp8"\nfloat8_exclude = ["head", "*.wq"]\nfloat8_experts = false', MOE)
    notes = list(float8_notes(chosen, find_hardware("h100")))
    assert any("is emulated on" in note for note in notes)
    assert 'not in float8: layers.*.attention.wq is in precision.float8_exclude ("*.wq")' in notes
    assert "not in float8: routed experts" in notes
    tensorwise = list(float8_notes(config('float8 = "tensorwise"', "head_dim = 6"), None))
    assert any(note.endswith("attention.wv has sides that are not multiples of 16") for note in tensorwise)


def test_weights_gathered_in_codes_need_less_memory_and_half_the_bytes_or_less() -> None:
    keys = in_blocks("mxfp8", model=SQUARE_EXPERTS).replace("float32", "bfloat16")
    (codes,), (values,) = (
        planned(keys.replace("[precision]", f"[precision]\nfloat8_all_gather = {gather}"), 2)
        for gather in ("true", "false")
    )
    # Scales add one byte to 32. Embedding and head stay in bfloat16. Codes change nothing but the all-gathers.
    assert 0.5 < gathered(codes) / gathered(values) < 0.6
    assert codes.state == values.state and codes.flops == values.flops
    place = "forward", "layer 0"
    assert codes.peaks[place].size < values.peaks[place].size


def gathered(plan: StagePlan) -> int:
    return sum(
        size * number for (_, kind, size, _), number in plan.collectives.items() if kind == "all_gather"
    )


def test_only_outputs_and_input_gradients_of_experts_may_be_in_float8() -> None:
    rows, weight = torch.randn(8, 16), torch.randn(2, 16, 32)
    ends = torch.tensor([4, 8], dtype=torch.int32)
    grouped = torch.ops.aten._grouped_mm.default
    output = torch._grouped_mm(rows, weight, offs=ends)
    assert work_of(grouped, (rows, weight, ends), output).experts
    outer = torch._grouped_mm(rows.mT, output, offs=ends)
    assert not work_of(grouped, (rows.mT, output, ends), outer).experts


def test_a_router_on_a_gpu_is_planned_in_bfloat16_and_never_in_float8() -> None:
    left, right = torch.empty(6, 8, dtype=torch.bfloat16), torch.empty(8, 4, dtype=torch.bfloat16)
    mm = torch.ops.aten.mm
    of_layer = work_of(mm.default, (left, right), left.new_empty(6, 4))
    of_router = work_of(mm.dtype, (left, right, torch.float32), torch.empty(6, 4))
    assert of_layer.linear and not of_router.linear
    assert of_layer.flops == of_router.flops > 0 and of_layer.dtype == of_router.dtype == "torch.bfloat16"
    made, planned_on_gpu = config("", MOE), {}
    for card in (True, False):
        with fake_ranks(0, 1):
            routers = FakeRank(made, check_world(made, 1), card=card).model.parts[0].routers
        planned_on_gpu[card] = {
            getattr(router.multiply, "keywords", {}).get("on_gpu") for router in routers.values()
        }
    assert planned_on_gpu == {True: {True}, False: {None}}
