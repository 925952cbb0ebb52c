"""With `precision.float8_dispatch`, every layout equals one process, and rows between nodes lose nothing."""

import functools

import pytest

from tests.support.equivalence import WholeRecord, assert_equal, layout, losses, reference
from tests.support.layouts import experts_text, slow_unless

KEY = "[precision]"
RECOMPUTE = '[activation_checkpoint]\nmode = "{}"\n'
COMPILE = '[compile]\nenabled = true\nbackend = "aot_eager"\n'


def text(parallel: str = "", variant: str = "bias", extra: str = "") -> str:
    return experts_text(variant, parallel, 2).replace(KEY, f"{KEY}\nfloat8_dispatch = true") + extra


@functools.cache
def expected(variant: str) -> WholeRecord:
    return reference(text(variant=variant))


# (world, parallel, variant, extra) -> whether the test is fast
CASES = {
    (1, "", "bias", ""): True,
    (2, "ep = 2", "aux_loss", ""): True,
    (2, "ep = 2\nep_node_size = 1", "bias", ""): True,
    (4, "ep = 4\nep_node_size = 2", "groups", ""): True,
    (2, "ep = 2\nep_node_size = 1\nep_overlap = true", "bias", ""): True,
    (2, "ep = 2\nep_node_size = 1\nep_overlap = true", "bias", RECOMPUTE.format("selective")): False,
    (2, "ep = 2\nep_node_size = 1", "sequence_aux_loss", RECOMPUTE.format("full")): False,
    (2, "ep = 2\nep_node_size = 1", "bias", RECOMPUTE.format("selective") + COMPILE): True,
    (2, "ep = 2\nep_node_size = 1", "bias", RECOMPUTE.format("selective")): False,
    (2, "ep = 2\nep_node_size = 1", "bias", RECOMPUTE.format("offload")): False,
    (4, "tp = 2\nep = 4\nep_node_size = 1", "bias", ""): False,
    (4, "tp = 2\nep = 2\nep_node_size = 1\nsequence_parallel = false", "bias", ""): False,
    (4, "cp = 2\nep = 4\nep_node_size = 2", "bias", ""): False,
    (4, "pp = 2\nep = 2\nep_node_size = 1", "bias", ""): False,
    (2, 'ep = 2\nep_node_size = 1\ndata_parallel = "zero1"', "bias", ""): False,
    (2, 'ep = 2\nep_node_size = 1\ndata_parallel = "ddp"', "bias", ""): False,
}


@pytest.mark.parametrize(
    ("world", "parallel", "variant", "extra"),
    [pytest.param(*case, marks=slow_unless(fast)) for case, fast in CASES.items()],
)
def test_rounded_rows(world: int, parallel: str, variant: str, extra: str) -> None:
    assert_equal(layout(text(parallel, variant, extra), world), expected(variant))


def test_rounding_changes_the_losses() -> None:
    exact = layout(experts_text("bias", "", 2), 1)
    assert losses(layout(text(), 1)) != pytest.approx(losses(exact), rel=1e-6)
