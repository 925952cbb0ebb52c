"""Mixtures of experts compute what one process computes: every layout of them, every way of balancing."""

import functools

import pytest

from tests.equivalence.compare import Trace, assert_equal, layout, reference, tiny_config

BALANCE = {
    "bias": 'balance = "bias"\nbias_update_rate = 0.05',
    "aux_loss": 'balance = "aux_loss"\naux_loss_coef = 0.3',
    "sequence_aux_loss": 'balance = "sequence_aux_loss"\naux_loss_coef = 0.3\nn_shared_experts = 1\nn_dense_layers = 1',
    "sigmoid": 'balance = "bias"\nscore_function = "sigmoid"\nz_loss_coef = 0.1\nn_expert_groups = 4\nn_limited_groups = 2\n'
    "bias_update_rate = 0.05\nroute_scale = 1.5",
}


def model(variant: str) -> str:
    return f"n_kv_heads = 4\n[model.moe]\nn_experts = 8\ntop_k = 2\nexpert_dim = 24\n{BALANCE[variant]}"


def text(variant: str, parallel: str = "", micro: int = 1) -> str:
    return tiny_config(parallel=parallel, model=model(variant), micro=micro).replace("n_kv_heads = 2\n", "")


@functools.cache
def expected(variant: str) -> Trace:
    return reference(text(variant))


def check(world: int, parallel: str = "", variant: str = "bias", micro: int = 1, extra: str = "") -> None:
    assert_equal(layout(text(variant, parallel, micro) + extra, world), expected(variant))


@pytest.mark.parametrize("variant", BALANCE)
def test_one_process(variant: str) -> None:
    check(1, variant=variant, micro=2)


@pytest.mark.parametrize("variant", BALANCE)
def test_two_ranks_share_the_experts(variant: str) -> None:
    check(2, "ep = 2", variant, micro=2)


@pytest.mark.parametrize("sequence", ["true", "false"])
@pytest.mark.parametrize("variant", BALANCE)
def test_tp(variant: str, sequence: str) -> None:
    check(2, f"tp = 2\nep = 2\nsequence_parallel = {sequence}", variant, micro=4)


LAYOUTS = {
    "fsdp only": (4, ""),
    "ep 4": (4, "ep = 4"),
    "ep 2 with fsdp": (4, "ep = 2"),
    "hsdp": (4, "dp_replicate = 2\ndp_shard = 2\nep = 2"),
    "tp, experts over fsdp": (4, "tp = 2\nep = 1"),
    "tp, ep across": (4, "tp = 2\nep = 4"),
    "cp": (4, "cp = 2\nep = 2"),
    "cp and tp": (4, "cp = 2\ntp = 2\nep = 4\nsequence_parallel = false"),
}


@pytest.mark.parametrize("variant", ["aux_loss", "sequence_aux_loss"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_four(name: str, variant: str) -> None:
    check(*LAYOUTS[name], variant, micro=2)
