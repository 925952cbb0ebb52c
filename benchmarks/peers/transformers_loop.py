"""A transformers model in a plain loop, with transformers' loss; with several processes under fully_shard."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from benchmarks.peers.task import Curve, Task


def train(task: Task, rank: int, world: int) -> Curve:
    """Make all steps; return the curve. If `world` > 1, joins the ranks; collective."""
    # transformers' grouped matrix product of experts does not support float64.
    experts = {"experts_implementation": "eager"} if task.dtype == "float64" else {}
    model = AutoModelForCausalLM.from_pretrained(task.weights, dtype=getattr(torch, task.dtype), **experts)
    model.train()
    if world > 1:
        dist.init_process_group("gloo")
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
    optimizer = torch.optim.AdamW(
        model.parameters(), betas=task.betas, eps=task.eps, weight_decay=task.weight_decay, fused=True
    )
    curve = Curve()
    for tokens, labels, rate in zip(*task.rows_of(rank, world), task.rates, strict=True):
        # shift_labels: the labels are next tokens already. All ranks have the same number of labels, so the mean of the
        # ranks' means is the mean over the batch.
        loss = model(input_ids=tokens, labels=labels, shift_labels=labels).loss
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), task.max_norm)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach() / world
        if world > 1:
            dist.all_reduce(mean)
        curve.append(mean.item(), (norm.full_tensor() if isinstance(norm, DTensor) else norm).item(), rate)
    return curve
