"""The reference: a plain module in one process, without any layout.

The reference computes the whole global batch in one forward, clips with PyTorch's functions, and updates routers with
separate code. It shares three things with a layout: the model, the optimizer, and the description of the parameters for the
optimizer (kinds, heads, learning rates, largest logits). Without this description, the optimizer would compute other updates.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from forge.batch import Batch
from forge.config import Config, check_world, parse_toml_text
from forge.model import Normal, Transformer, Uniform
from forge.optim import Optimizer
from forge.optim.optimizer import gradient
from forge.parallel.build import build_meta_model
from forge.parallel.float8 import compute_in_float8
from forge.parallel.initialize import describe, fill_random
from forge.parallel.layout import bounds_logits, make_layout
from forge.parallel.logits import LargestLogits
from forge.parallel.mesh import make_meshes
from forge.runtime.errors import UserError
from forge.shard import Box, Shard
from forge.tools.verify.borders import Borders
from forge.tools.verify.checkpoints import keep_whole, save
from forge.tools.verify.held_out import held_out_of
from forge.tools.verify.hooks import UserHooks
from forge.tools.verify.pieces import TensorKey, assemble
from forge.tools.verify.record import CPU, Settings, WholeRecord, batches, plans_of
from forge.tools.verify.shrink import one_process
from forge.train.phases import apply_plan


def plain_model(config: Config, device: torch.device = CPU) -> Transformer:
    """Return the model of `config` with its initial values, unsharded, on `device`."""
    model = build_meta_model(config)
    model.to_empty(device=device)
    starts, _ = describe(model, whole_shards(model), config)
    for name, parameter in model.named_parameters():
        start = starts[name]
        if isinstance(start, Normal | Uniform):
            box = Box((0,) * parameter.ndim, tuple(parameter.shape))
            fill_random(parameter.data, box, parameter.shape, start, config.run.seed, name)
        else:
            torch.nn.init.constant_(parameter, start)
    model.reset_buffers(torch.float64)
    compute_in_float8(model, config.precision, device.type)
    return model


def whole_shards(model: Transformer) -> list[Shard]:
    """Return each parameter of `model` as a shard covering the whole tensor."""
    return [Shard.whole(name, parameter) for name, parameter in model.named_parameters()]


def record_plain(text: str, settings: Settings, device: torch.device = CPU) -> WholeRecord:
    """Run the steps of the configuration `text` in one process, without its layout. Return the recording.

    Needs a process group of one rank if `settings.own_folder` is set, if there are hooks, or if the optimizer communicates.
    """
    config = parse_toml_text(text)
    model = plain_model(config, device)
    routers = model.routers.values()
    settings.twist.begin([router.weight.data for router in routers], [router.bias for router in routers])
    _, shards = describe(model, whole_shards(model), config)
    logits = _largest_logits(model, shards, config, device)
    optimizer = settings.optimizer(shards, config, dist.group.WORLD if dist.is_initialized() else None)
    initial = {("initial", shard.name): shard.data.detach().clone().cpu() for shard in shards}
    record = WholeRecord([initial], [])
    borders = Borders([model]) if settings.borders else None
    hooks = UserHooks.of(one_process(config), device, model, optimizer, shards, settings.own_folder)
    hooks.begin(0)
    read = zip(batches(config, 0, 1, settings, device), plans_of(config, settings.steps), strict=True)
    for number, (batch, plan) in enumerate(read, start=1):
        apply_plan(plan, None, [model], optimizer)
        lr = settings.lr * plan.lr / config.optimizer.lr
        step: dict[TensorKey, Tensor] = {}
        hooks.call("before_step", number)
        hooks.call("before_data", number)
        hooks.call("after_data", number)
        with hooks.around("gradients", number):
            valid = (batch.labels >= 0).sum().clamp(min=1)
            losses = _backward(model, batch, valid, shards, borders, record, step)
            if not losses.isfinite().all():
                raise UserError(f"the loss of step {number} is not finite, so nothing can be compared")
            if logits is not None:
                logits.complete()
                cast(Any, optimizer).bound_logits(logits.by_parameter)
            norm = torch.nn.utils.get_total_norm([gradient(shard) for shard in shards])
            step["norm", "gradient"] = norm.double()
            hooks.process_last_result()
        limit = settings.max_norm or float("inf")
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), limit, norm)
        with hooks.around("optimizer", number):
            optimizer.step(lr, torch.zeros((), device=device))
        if logits is not None:
            logits.reset()
        with torch.no_grad():
            moved = _move_routers(model, valid)
        sums = torch.cat([losses.detach().double(), valid.double().reshape(1)])
        hooks.launched(number, lr, sums, norm, moved)
        hooks.call("after_step", number)
        step |= {("router", name): state for name, state in moved.items()}
        step |= {("parameter", name): p.detach().clone() for name, p in model.named_parameters()}
        step |= {
            ("optimizer", f"{slot} of {shard.name}"): assemble(shard, values)
            for slot, shard, values in optimizer.tensors()
        }
        record.steps.append(step)
        if settings.held_out and number == 1:
            step |= held_out_of(model, config, device)
            if borders is not None:
                borders.take()
        if settings.own_folder is not None and number == settings.steps - 1:
            hooks.process_last_result()
            hooks.call("before_save", number)
            wholes = _save(settings.own_folder, number, model, shards, optimizer)
            step |= {(kind, name): v for name, v in wholes.items() for kind in ("saved", "loaded")}
        if number == settings.steps:
            hooks.end()
        step |= {key: pieces[0].values for key, pieces in hooks.take().items()}
    hooks.close()
    for step in record.steps:
        for key, tensor in step.items():
            step[key] = tensor.cpu()
    return record


def _backward(
    model: Transformer,
    batch: Batch,
    valid: Tensor,
    shards: list[Shard],
    borders: Borders | None,
    record: WholeRecord,
    step: dict[TensorKey, Tensor],
) -> Tensor:
    """Return the losses of `batch`, as the model returns them. Set the gradient of each shard's parameter.

    Losses are divided by `valid`, the number of predicted tokens. Add losses, inputs and outputs of modules, and gradients
    to `step`, and the order of the modules to `record`.
    """
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
    for shard in shards:
        shard.parameter.grad = gradient(shard)
        step["gradient", shard.name] = gradient(shard).clone()
    return losses


def _largest_logits(
    model: Transformer, shards: list[Shard], config: Config, device: torch.device
) -> LargestLogits | None:
    """Return an observer of the largest attention logits, for QK-Clip. None if the optimizer does not use QK-Clip."""
    if not bounds_logits(config):
        return None
    alone = one_process(config)
    return LargestLogits([model], shards, make_layout(alone, make_meshes(check_world(alone, 1), device.type)))


def _checkpoint(
    model: Transformer, shards: list[Shard], optimizer: Optimizer
) -> dict[str, tuple[Shard, Tensor]]:
    """Return a dict from name to (shard, values) of all checkpointed tensors, named as in forge.train.state.all_tensors."""
    tensors = {f"model.{shard.name}": (shard, shard.data) for shard in shards}
    for layer, router in model.routers.items():
        for leaf in ("bias", "previous_counts"):
            shard = Shard.whole(f"layers.{layer}.feed_forward.router.{leaf}", getattr(router, leaf))
            tensors[f"model.{shard.name}"] = shard, shard.data
    slots = optimizer.tensors()
    return tensors | {f"optimizer.{shard.name}.{slot}": (shard, values) for slot, shard, values in slots}


def _save(
    folder: str, step: int, model: Transformer, shards: list[Shard], optimizer: Optimizer
) -> dict[str, Tensor]:
    """Write the checkpoint of `step` into `folder`. Return a dict from name to unsharded tensor."""
    saved = _checkpoint(model, shards, optimizer)
    save(folder, step, saved, optimizer)
    wholes = {name: assemble(shard, values) for name, (shard, values) in saved.items()}
    keep_whole(folder, wholes)
    return wholes


def _quantile(bins: list[int], share: float) -> float:
    """Return the interpolated quantile `share` (0 to 1) of a histogram, as a number of bins from its left end."""
    below = 0
    for index, count in enumerate(bins):
        if count and below + count >= share * sum(bins):
            return index + (share * sum(bins) - below) / count
        below += count
    return 0.0


def _move_routers(model: Transformer, valid: Tensor) -> dict[str, Tensor]:
    """Update the state of every router by one step, expert by expert.

    Return a dict from name to state, with the names of `record_on_rank`.
    """
    moved = {}
    for layer, router in model.routers.items():
        moe, counts = router.config, router.counts.tolist()
        if moe.balance == "bias":
            for expert, count in enumerate(counts):
                even = sum(counts) / moe.n_experts
                router.bias[expert] += moe.bias_update_rate * ((count < even) - (count > even))
        if moe.balance == "quantile":
            low, high = router.bias.min().item() - 1, router.bias.max().item() + 1
            solved = [_quantile(row, moe.top_k / moe.n_experts) for row in router.required.tolist()]
            if sum(counts):
                middle = sum(solved) / len(solved)
                width = (high - low) / router.required.shape[1]
                router.bias.copy_(torch.tensor([width * (place - middle) for place in solved]))
            router.required.zero_()
        router.previous_counts = router.counts.clone()
        losses = (router.losses / max(1, sum(counts) / moe.top_k)).tolist()
        ends = router.bias.min().item(), router.bias.max().item()
        moved[f"layers.{layer}"] = torch.tensor(
            [*counts, *losses, router.dropped.item(), *ends], dtype=torch.float64
        )
        moved |= {f"{layer}.{name}": getattr(router, name).clone() for name in ("bias", "previous_counts")}
        router.sums.zero_()
    return moved
