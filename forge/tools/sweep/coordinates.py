"""Coordinate check of a parametrization: how much activations change in training, by width (arXiv:2203.03466, appendix D.1).

If a parametrization transfers learning rates across widths, the change of each activation in the first steps does not
depend on the width. If a change grows with the width, the best learning rate of a narrow model is too high for a wide
model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor, nn

from forge.config import Config
from forge.data.build import build_dataset
from forge.data.loader import stack_windows
from forge.model import Transformer
from forge.optim import build_optimizer
from forge.parallel.build import build_meta_model
from forge.parallel.initialize import describe, initialize
from forge.parallel.precision import DTYPES
from forge.runtime.errors import UserError
from forge.shard import Shard

# Keys of [model] scaled with model.dim. Heads keep their size, and their number grows.
SIZES = ("n_heads", "n_kv_heads", "ffn_dim")
OF_TABLES = {
    "moe": ("expert_dim", "latent_dim"),
    "mla": ("q_lora_rank", "kv_lora_rank"),
    "linear_attention": ("n_key_heads", "n_value_heads"),
}


def of_width(config: Config, dim: int) -> Config:
    """Return `config` with `model.dim = dim`. Scale the other sizes inside blocks in proportion.

    Raises UserError if a scaled size is not an integer or out of range.
    """
    tree = config.model_dump(mode="json", exclude_none=True)
    model, ratio = tree["model"], dim / config.model.dim
    places = [(model, key) for key in ("dim", *SIZES)]
    places += [(model[table], key) for table, keys in OF_TABLES.items() if table in model for key in keys]
    for table, key in places:
        size = table[key] * ratio
        if size != int(size) or (table[key] and size < 1):
            raise UserError(
                f"width {dim}: would scale {key} = {table[key]} to {size:g}, which is not an integer; take widths that are "
                f"multiples of model.dim = {config.model.dim}"
            )
        table[key] = int(size)
    try:
        return type(config).model_validate(tree)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        raise UserError(f"width {dim}: {key} = {first['input']}: {first['msg']}") from None


def changes_of_activations(config: Config, steps: int) -> dict[str, float]:
    """Train `steps` optimizer steps in one process. Return activation -> root mean square of its change, on a fixed batch.

    Steps use the learning rate `optimizer.lr` without a schedule, the global batch of the config, and no clipping.
    """
    torch.manual_seed(config.run.seed)
    model = build_meta_model(config)
    model.to_empty(device="cpu")
    wholes = [Shard.whole(name, parameter) for name, parameter in model.named_parameters()]
    starts, shards = describe(model, wholes, config)
    initialize(shards, starts, config.run.seed)
    model.reset_buffers(DTYPES[config.precision.compute])
    optimizer = build_optimizer(shards, config.optimizer)
    batches = _batches(config)
    tokens, _ = next(batches)
    before = _activations(model, tokens)
    for _, (inputs, labels) in zip(range(steps), batches, strict=False):
        model.zero_grad()
        model.set_loss_scale(torch.tensor(1 / labels.numel()))
        sums = model(inputs, labels)
        (sums[0] / labels.numel()).backward()
        optimizer.step(config.optimizer.lr, torch.zeros(()))
    after = _activations(model, tokens)
    return {name: float((after[name] - before[name]).square().mean().sqrt()) for name in before}


def growth(sizes: dict[int, float]) -> float:
    """Return the exponent p of size ~ width^p, the slope of log(size) over log(width). sizes: width -> size of a change.

    Return nan for a single width, and for a size of 0, e.g. of a frozen layer.
    """
    if len(sizes) < 2 or not all(sizes.values()):
        return math.nan
    xs, ys = zip(*((math.log(width), math.log(size)) for width, size in sizes.items()), strict=True)
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    covariance = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True))
    return covariance / sum((x - mean_x) ** 2 for x in xs)


def check_widths(
    config: Config, widths: Sequence[int], steps: int, report: Callable[[int], None] = lambda width: None
) -> dict[str, dict[int, float]]:
    """Call `changes_of_activations` for each width. Return activation -> width -> change.

    report: called with each width before its training.
    """
    found: dict[str, dict[int, float]] = {}
    # Make all configs first, to report a wrong width before any training.
    for width, scaled in {width: of_width(config, width) for width in widths}.items():
        report(width)
        for name, size in changes_of_activations(scaled, steps).items():
            found.setdefault(name, {})[width] = size
    return found


def _batches(config: Config) -> Iterator[tuple[Tensor, Tensor]]:
    dataset, train, first = build_dataset(config), config.train, 0
    while True:
        samples = range(first, first + train.global_batch_size)
        rows = (dataset[sample] for sample in samples)
        batch = stack_windows(rows, len(samples), train.seq_len, False, first)
        yield batch.tokens, batch.labels
        first += train.global_batch_size


def _activations(model: Transformer, tokens: Tensor) -> dict[str, Tensor]:
    """Run the model. Return float64 outputs of embedding, attentions, feed-forwards and blocks, and the logits, by name."""
    found: dict[str, Tensor] = {}
    with torch.no_grad(), _watching(model, found):
        found["logits"] = model(tokens).double()
    return found


@contextmanager
def _watching(model: Transformer, found: dict[str, Tensor]) -> Iterator[None]:
    named: dict[str, nn.Module] = {} if model.embedding is None else {"embedding": model.embedding}
    for layer in model.trunk:
        block: Any = model.layers[layer]
        named |= {f"{layer} attention": block.attention, f"{layer} feed-forward": block.feed_forward}
        named[f"{layer} stream"] = block

    def keep(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, arguments: Any, output: Tensor) -> None:
            found[name] = output.detach().double()

        return hook

    handles = [module.register_forward_hook(keep(name)) for name, module in named.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
