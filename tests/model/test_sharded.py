"""The model under FSDP2 reads parameters only while gathered, and float32 parts stay float32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.testing import assert_close

from tests.support.harness import run_ranks
from tests.support.small_models import batch, gradients, small_config, small_model

OPTIONS = [{}, {"tie_embeddings": True, "qk_norm": True, "attention_bias": True, "sliding_window": 3}]


def _sharded_step(rank: int, world: int, options: dict[str, Any]) -> tuple[Any, Any]:
    model = small_model(small_config(**options))
    for unit in (*model.layers.values(), model):
        fully_shard(unit)
    for unit in (*model.layers.values(), model):
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)
    tokens, labels = batch(sequences=world)
    losses = model(tokens[rank : rank + 1], labels[rank : rank + 1])
    losses[0].backward()
    return losses.tolist(), {name: p.grad.full_tensor().tolist() for name, p in model.named_parameters()}


@pytest.mark.parametrize("options", OPTIONS, ids=["untied", "tied"])
def test_fully_sharded_model_equals_one_process(options: dict[str, Any]) -> None:
    losses, grads = zip(*run_ranks(_sharded_step, 2, options), strict=True)
    model = small_model(small_config(**options))
    whole = model(*batch())
    whole[0].backward()
    assert_close(torch.tensor(losses, dtype=torch.float64).sum(0), whole.detach(), rtol=1e-12, atol=1e-12)
    for name, grad in gradients(model).items():
        assert_close(torch.tensor(grads[0][name], dtype=torch.float64), grad, rtol=1e-11, atol=1e-12)


def _dtypes_in_blocks(rank: int, world: int) -> set[torch.dtype]:
    model = small_model(small_config(sliding_window=3), dtype=torch.float32)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    seen = set()
    for unit in (*model.layers.values(), model):
        fully_shard(unit, mp_policy=policy)
    for block in model.layers.values():
        block.attention.register_forward_pre_hook(
            lambda _, inputs: seen.add((inputs[0].dtype, inputs[1].cos.dtype))
        )
    losses = model(*batch())
    losses[0].backward()
    return seen | {losses.dtype}


def test_mixed_precision_leaves_the_rotary_tables_and_the_loss_in_float32() -> None:
    assert run_ranks(_dtypes_in_blocks, 1) == [{(torch.bfloat16, torch.float32), torch.float32}]
