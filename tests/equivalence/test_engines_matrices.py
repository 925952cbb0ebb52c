"""An optimizer of whole matrices sees the same ones under every engine and layout.

Momentum of every matrix is made nearly orthogonal before it is applied, so an update is right only if all of the matrix
was there.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from forge.config import parse_toml_text
from forge.optim.matrices import WholeMatrices
from tests.support.buffers import SMALL, batches
from tests.support.building import built
from tests.support.equivalence import TOLERANCE, plain_model, tiny_config, wholes
from tests.support.harness import run_ranks
from tests.support.layouts import experts_text

STEPS, LR, MOMENTUM = 3, 0.02, 0.9
ENGINES = ("ddp", "zero1", "zero2", "fsdp2")
REPLICAS = "dp_replicate = 2\ndp_shard = 2"
OVER_REPLICAS = f'{REPLICAS}\nshard_optimizer_over = "dp"'


def orthogonal(matrix: Tensor) -> Tensor:
    """The nearest orthogonal matrix, roughly: five Newton-Schulz steps (Jordan et al., "Muon", 2024)."""
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if tall else matrix
    x = x / (x.norm() + 1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.T if tall else x


def config_text(model: str, parallel: str = "") -> str:
    if model == "experts":
        return experts_text("sequence_aux_loss", parallel, micro=2)
    return tiny_config(parallel=parallel, micro=2)


@functools.cache
def expected(model: str) -> tuple[list[float], dict[str, Tensor]]:
    """Losses of three steps of a plain module in one process, and its parameters after them."""
    config = parse_toml_text(config_text(model))
    net, losses = plain_model(config), []
    momenta = {name: torch.zeros_like(p) for name, p in net.named_parameters() if p.ndim > 1}
    for _, batch in zip(range(STEPS), batches(config), strict=False):
        valid = (batch.labels >= 0).sum().double()
        net.set_loss_scale(1 / valid)
        found = net(batch.tokens, batch.labels, batch.positions, batch.documents)
        net.zero_grad()
        (found[0] / valid).backward()
        losses.append((found[1] / valid).item())
        with torch.no_grad():
            for name, parameter in net.named_parameters():
                update = parameter.grad
                if name in momenta:
                    update = momenta[name].mul_(MOMENTUM).add_(parameter.grad)
                    flat = update.reshape(-1, *update.shape[-2:])
                    update = torch.stack([orthogonal(one) for one in flat]).view_as(update)
                parameter -= LR * update
    return losses, {name: parameter.detach().clone() for name, parameter in net.named_parameters()}


def train(rank: int, world: int, text: str) -> dict[str, Any]:
    model, config, meshes = built(text, world)
    shards = [shard for shard in model.shards if len(shard.global_shape) > 1]
    others = [shard for shard in model.shards if len(shard.global_shape) == 1]
    matrices = WholeMatrices(shards, meshes.stage, dtype=torch.float64, round_numel=4000)
    momenta = [torch.zeros_like(shard.data) for shard in shards]
    losses = []
    for _, batch in zip(range(STEPS), batches(config, meshes.data_rank, meshes.data_ranks), strict=False):
        sums = model.forward_backward(batch, model.count_tokens(batch))
        model.finalize_gradients()
        losses.append((sums.cross_entropy / sums.tokens).item())
        for momentum, shard in zip(momenta, shards, strict=True):
            momentum.mul_(MOMENTUM).add_(shard.grad)
        updates = [momentum.clone() for momentum in momenta]
        matrices.replace(updates, orthogonal)
        for shard, update in zip(shards, updates, strict=True):
            shard.data.sub_(LR * update)
        for shard in others:
            shard.data.sub_(LR * shard.grad)
        model.after_update()
        model.zero_gradients()
    parameters = wholes(model.shards, [shard.data for shard in model.shards])
    copies = {s.name: s.data.clone() for s in model.shards if s.replicas is not None and s.boxes}
    ranks = {
        s.name: tuple(torch.distributed.get_process_group_ranks(s.replicas))
        for s in model.shards
        if s.name in copies
    }
    return {"losses": losses, "parameters": parameters if rank == 0 else {}, "copies": copies, "ranks": ranks}


def _layouts() -> list[Any]:
    cases = []
    for engine in ENGINES:
        over = OVER_REPLICAS if engine.startswith("zero") else REPLICAS
        layouts = {
            "2 ranks": (2, "", "dense"),
            "tp": (4, "tp = 2", "dense"),
            "replicas": (4, REPLICAS, "dense"),
            "replicas that share": (4, over, "dense"),
            "pp": (4, "pp = 2", "dense"),
            "ep": (4, "ep = 2", "experts"),
            "ep in replicas": (4, f"ep = 2\n{REPLICAS}", "experts"),
            "tp and ep": (4, "tp = 2\nep = 2", "experts"),
        }
        for name, (world, keys, model) in layouts.items():
            fast = name in ("2 ranks", "tp", "replicas", "ep") and (
                engine in ("fsdp2", "zero1") or world == 2
            )
            marks = () if fast else pytest.mark.slow
            if name != "replicas that share" or over != REPLICAS:
                cases.append(pytest.param(engine, world, keys, model, marks=marks, id=f"{engine}-{name}"))
    return cases


@pytest.mark.parametrize(("engine", "world", "keys", "model"), _layouts())
def test_three_steps_are_those_of_one_plain_process(engine: str, world: int, keys: str, model: str) -> None:
    small = "" if engine == "fsdp2" else SMALL
    found = run_ranks(train, world, config_text(model, f'data_parallel = "{engine}"\n{keys}{small}'))
    losses, parameters = expected(model)
    assert all(one["losses"] == pytest.approx(losses, rel=0, abs=TOLERANCE) for one in found)
    assert found[0]["parameters"].keys() == parameters.keys()
    for name, parameter in parameters.items():
        difference = (found[0]["parameters"][name] - parameter).abs().max().item()
        assert difference <= TOLERANCE, f"{name}: differs by {difference:.3e}"
    for one in found:
        for name, copy in one["copies"].items():
            for rank in one["ranks"][name]:
                assert torch.equal(copy, found[rank]["copies"][name]), f"{name} is another on rank {rank}"
