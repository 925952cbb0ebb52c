"""Parts of a step on a CUDA GPU. tests/model/test_experts.py covers experts without tokens, test_runs.py covers float8."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from forge.config import check_world, parse_toml_text
from forge.model import IGNORE
from forge.model.split_product import linear
from forge.optim import build_optimizer
from forge.parallel.build import build_parallel_model
from forge.parallel.mesh import make_meshes
from forge.parallel.step.gradients import report_gradients
from forge.parallel.step.model import ParallelModel
from forge.runtime.world import World, join
from forge.tools.verify.record import every_batch
from forge.train.step import apply_gradients, compute_gradients
from tests.support.buffers import engine_config

pytestmark = pytest.mark.gpu
CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
EXPERTS = "\n[model.moe]\nn_experts = 4\ntop_k = 2\nexpert_dim = 16\n"
NARROW = ("float32", "bfloat16", "float32")


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    join(World(rank=0, size=1, local_rank=0, launcher="python"))
    yield
    dist.destroy_process_group()


def make(text: str, device: torch.device) -> ParallelModel:
    config = parse_toml_text(text)
    return build_parallel_model(config, make_meshes(check_world(config, 1), device.type), device)


@pytest.mark.parametrize("experts", ["", EXPERTS], ids=["dense", "experts"])
def test_a_microbatch_without_valid_tokens_adds_nothing(experts: str) -> None:
    text = engine_config("zero1", micro=4, batch=8) + experts
    found: list[list[Tensor]] = []
    models = {device: make(text, device) for device in (CPU, CUDA)}
    for mine, other in zip(models[CUDA].shards, models[CPU].shards, strict=True):
        mine.data.copy_(other.data)  # initial values depend on the device type
    for device, model in models.items():
        batch = next(iter(every_batch(parse_toml_text(text)))).to(device)
        batch.labels[:4] = IGNORE
        sums = model.forward_backward(batch, model.count_tokens(batch))
        model.finalize_gradients()
        found.append(
            [sums.values.cpu(), *(shard.grad.cpu() for shard in model.shards if shard.grad is not None)]
        )
    for cpu, cuda in zip(*found, strict=True):
        torch.testing.assert_close(cuda, cpu, rtol=0, atol=1e-9)


@pytest.mark.parametrize("moments", ["float32", "bfloat16"])
def test_a_compiled_update_equals_the_plain_one(moments: str) -> None:
    # FlexAttention needs 16 elements per head.
    text = engine_config("zero1", micro=8, formats=NARROW)
    text = text.replace("n_heads = 4\nn_kv_heads = 2", "n_heads = 2\nn_kv_heads = 1")
    text += f'\n[optimizer]\nmoment_dtype = "{moments}"\n[compile]\noptimizer = true\n'
    config, found = parse_toml_text(text), []
    for compiled in (None, config.compile):
        model = make(text, CUDA)
        optimizer = build_optimizer(model.shards, config.optimizer, None, compiled, model.copies)
        random = torch.Generator(CUDA).manual_seed(0)
        for _, batch in zip(range(3), every_batch(config), strict=False):
            compute_gradients(model, batch.to(CUDA))
            # Equal gradients: those of bfloat16 differ after the first rounding, and so would the updates.
            for shard in model.shards:
                assert shard.grad is not None
                shard.grad.normal_(generator=random)
            report = report_gradients(model.shards, torch.zeros((), device=CUDA), stop=False)
            apply_gradients(model, optimizer, report, lr=1e-3, max_norm=0.1)
        found.append([shard.data.clone() for shard in model.shards])
    for plain, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours, plain, rtol=0, atol=1e-5)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_router_multiplies_bfloat16_inputs_at_float32_accuracy(compiled: bool) -> None:
    random = torch.Generator(CUDA).manual_seed(0)
    drawn = [
        torch.randn(*shape, device=CUDA, generator=random) for shape in ((512, 1024), (64, 1024), (512, 64))
    ]
    x, weight, grad = drawn[0].bfloat16(), drawn[1], drawn[2] * 1e-6
    exact = (
        x.double() @ weight.double().t(),
        grad.double() @ weight.double(),
        grad.double().t() @ x.double(),
    )
    of_x, of_weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    out = (torch.compile(linear, fullgraph=True) if compiled else linear)(of_x, of_weight)
    found = out, *torch.autograd.grad(out, (of_x, of_weight), grad)
    for values, expected, bound in zip(found, exact, (2e-5, 2e-3, 2e-5), strict=True):
        assert (values.double() - expected).norm() < bound * expected.norm()
