"""The reference: a plain module in one process, without any layout.

It shares no code with a layout but the model itself and the optimizer: the whole global batch in one forward, clipped by
PyTorch, the balancing of routers written out.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from forge.config import Config, parse_toml_text
from forge.model import Normal, Transformer, Uniform
from forge.optim import Optimizer
from forge.parallel.build import build_meta_model
from forge.parallel.initialize import fill_random
from forge.shard import Box, Shard
from forge.verify.borders import Borders
from forge.verify.checkpoints import ONE, save
from forge.verify.pieces import Key
from forge.verify.record import CPU, Settings, WholeRecord, batches


def plain_model(config: Config, device: torch.device = CPU) -> Transformer:
    """Return the model of `config` in one process without any layout, at its start."""
    model = build_meta_model(config)
    model.to_empty(device=device)
    for name, parameter in model.named_parameters():
        start = model.initial_values()[name]
        if isinstance(start, Normal | Uniform):
            box = Box((0,) * parameter.ndim, tuple(parameter.shape))
            fill_random(parameter.data, box, parameter.shape, start, config.run.seed, name)
        else:
            torch.nn.init.constant_(parameter, start)
    model.reset_buffers(torch.float64)
    return model


def record_plain(text: str, settings: Settings, device: torch.device = CPU) -> WholeRecord:
    """Return what the steps of the configuration `text` compute in one process; its layout is not looked at.

    Needs a process group, of one rank, only for an optimizer that does and for `settings.folder`.
    """
    config = parse_toml_text(text)
    model = plain_model(config, device)
    routers = model.routers.values()
    settings.twist.begin([router.weight.data for router in routers], [router.bias for router in routers])
    shards = [Shard.whole(name, parameter) for name, parameter in model.named_parameters()]
    optimizer = settings.optimizer(shards, config, dist.group.WORLD if dist.is_initialized() else None)
    initial = {("initial", shard.name): shard.data.detach().clone().cpu() for shard in shards}
    record = WholeRecord([initial], [])
    borders = Borders([model]) if settings.borders else None
    for number, batch in enumerate(batches(config, 0, 1, settings, device), start=1):
        step: dict[Key, Tensor] = {}
        valid = (batch.labels >= 0).sum().clamp(min=1)
        model.set_loss_scale(1 / valid.double())
        losses = model(batch.tokens, batch.labels, batch.positions, batch.documents)
        model.zero_grad()
        (losses[0] / valid).backward()
        step["loss", "cross-entropy"] = (losses[1] / valid).detach().double()
        step["loss", "objective"] = (losses[0] / valid).detach().double()
        if borders is not None:
            seen = borders.take()
            step |= {("output" if one.output else "input", one.name): one.values for one in seen}
            record.order = [one.name for one in seen if one.output]
        for name, parameter in model.named_parameters():
            gradient = parameter.grad
            step["gradient", name] = torch.zeros_like(parameter) if gradient is None else gradient.clone()
        limit = settings.max_norm or float("inf")
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), limit)
        step["norm", "gradient"] = norm.double()
        optimizer.step(settings.lr, torch.zeros((), device=device))
        with torch.no_grad():
            step |= {("router", name): state for name, state in _move_routers(model, valid).items()}
        step |= {("parameter", name): p.detach().clone() for name, p in model.named_parameters()}
        step |= {
            ("optimizer", f"{slot} of {shard.name}"): values.clone()
            for slot, shard, values in optimizer.tensors()
        }
        if settings.folder is not None and number == settings.steps - 1:
            saved = _checkpoint(model, shards, optimizer)
            save(settings.folder, ONE, number, saved, optimizer)
            step |= {
                (kind, name): v.clone() for name, (_, v) in saved.items() for kind in ("saved", "loaded")
            }
        record.steps.append({key: tensor.cpu() for key, tensor in step.items()})
    return record


def _checkpoint(
    model: Transformer, shards: list[Shard], optimizer: Optimizer
) -> dict[str, tuple[Shard, Tensor]]:
    """What forge.train.state.all_tensors returns of a layout."""
    tensors = {f"model.{shard.name}": (shard, shard.data) for shard in shards}
    for layer, router in model.routers.items():
        for leaf in ("bias", "previous_counts"):
            shard = Shard.whole(f"layers.{layer}.feed_forward.router.{leaf}", getattr(router, leaf))
            tensors[f"model.{shard.name}"] = shard, shard.data
    slots = optimizer.tensors()
    return tensors | {f"optimizer.{shard.name}.{slot}": (shard, values) for slot, shard, values in slots}


def _move_routers(model: Transformer, valid: Tensor) -> dict[str, Tensor]:
    """One step of every router's state, written out expert by expert; keyed as in `record_on_rank`."""
    moved = {}
    for layer, router in model.routers.items():
        moe, counts = router.config, router.counts.tolist()
        if moe.balance == "bias":
            for expert, count in enumerate(counts):
                even = sum(counts) / moe.n_experts
                router.bias[expert] += moe.bias_update_rate * ((count < even) - (count > even))
        router.previous_counts = router.counts.clone()
        losses = (router.losses / max(1, sum(counts) / moe.top_k)).tolist()
        ends = router.bias.min().item(), router.bias.max().item()
        moved[f"layers.{layer}"] = torch.tensor(
            [*counts, *losses, router.dropped.item(), *ends], dtype=torch.float64
        )
        moved |= {f"{layer}.{name}": getattr(router, name).clone() for name in ("bias", "previous_counts")}
        for name in ("counts", "losses", "dropped"):
            getattr(router, name).zero_()
    return moved
