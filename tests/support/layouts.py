"""Configurations with experts and with pipelines for the equivalence tests, and the one-process record of each."""

from __future__ import annotations

import functools

import pytest

from tests.support.equivalence import PLAIN, Twist, WholeRecord, reference, tiny_config

BALANCE = {
    "bias": 'balance = "bias"\nbias_update_rate = 0.05',
    "aux_loss": 'balance = "aux_loss"\naux_loss_coef = 0.3\nn_shared_experts = 2',
    "sequence_aux_loss": 'balance = "sequence_aux_loss"\naux_loss_coef = 0.3\nz_loss_coef = 0.1\nn_dense_layers = 1\n'
    "n_shared_experts = 1",
    "groups": 'balance = "bias"\nscore_function = "sigmoid"\nz_loss_coef = 0.1\nn_expert_groups = 4\nn_limited_groups = 2\n'
    "bias_update_rate = 0.05\nroute_scale = 1.5",
    "none": 'balance = "none"\nnormalize_top_k = false',
    "quantile": 'balance = "quantile"\nscore_function = "sigmoid"\ntop_k = 3\nlatent_dim = 20',
    "one each": "top_k = 1\nbias_update_rate = 0.05",
}


def experts_text(variant: str, parallel: str = "", micro: int = 1, experts: int = 8) -> str:
    moe = f"[model.moe]\nn_experts = {experts}\nexpert_dim = 24\n{BALANCE[variant]}"
    keys = tiny_config(parallel=parallel, model=f"n_kv_heads = 4\n{moe}", micro=micro)
    return keys.replace("n_kv_heads = 2\n", "")


@functools.cache
def experts_expected(variant: str, experts: int = 8, twist: Twist = PLAIN) -> WholeRecord:
    return reference(experts_text(variant, experts=experts), twist)


ONE_STAGE = ["GPipe", "1F1B"]
SCHEDULES = [
    *ONE_STAGE,
    "Interleaved1F1B",
    "LoopedBFS",
    "InterleavedZeroBubble",
    "ZBVZeroBubble",
    "DualPipeV",
]
EXPERTS = "[model.moe]\nn_experts = 8\ntop_k = 2\nexpert_dim = 24\nn_dense_layers = 1\n"
MODELS = {
    "plain": "",
    "tied": "tie_embeddings = true\n",
    "everything": "qk_norm = true\nattention_bias = true\nsliding_window = 24\nlogit_soft_cap = 5.0\n",
    "experts": EXPERTS
    + "n_shared_experts = 1\nbalance = 'sequence_aux_loss'\naux_loss_coef = 0.1\nz_loss_coef = 0.01\n",
    "tied experts": "tie_embeddings = true\n" + EXPERTS + "balance = 'aux_loss'\naux_loss_coef = 0.1\n",
    "residuals": "residual = 'attention'\nresidual_block_size = 2\n",
    "residuals, experts": "residual = 'attention'\nresidual_block_size = 3\n" + EXPERTS + "latent_dim = 20\n",
    "biased experts": EXPERTS + "balance = 'bias'\nscore_function = 'sigmoid'\n",
}


def plain_text(model: str, layers: int = 8) -> str:
    return tiny_config(model=MODELS[model]).replace("n_layers = 3", f"n_layers = {layers}")


def pipeline_text(
    pp: int,
    schedule: str,
    model: str = "plain",
    *,
    layers: int = 8,
    parallel: str = "",
    pipeline: str = "",
    more: str = "",
    micro: int = 1,
) -> str:
    text = tiny_config(parallel=f"pp = {pp}\n{parallel}", model=MODELS[model], micro=micro)
    text = text.replace("n_layers = 3", f"n_layers = {layers}")
    return f"{text}\n[pipeline]\nschedule = '{schedule}'\n{pipeline}\n{more}"


@functools.cache
def pipeline_expected(model: str, layers: int = 8, twist: Twist = PLAIN) -> WholeRecord:
    return reference(plain_text(model, layers), twist)


def slow_unless(fast: bool):
    return () if fast else (pytest.mark.slow,)


def slow_or_fast(rows: list[tuple]) -> list:
    """Turn rows into test parameters. The last value of a row is the flag `fast`; rows with False are marked slow."""
    return [pytest.param(*row, marks=slow_unless(fast)) for *row, fast in rows]
