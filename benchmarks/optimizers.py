"""Time and traffic of one update by each optimizer, by number of ranks, for a dense model and a mixture of experts.

    python benchmarks/optimizers.py                        debug.toml and moe_debug.toml on 1, 2 and 4 ranks
    python benchmarks/optimizers.py --worlds 2 --parallel.data_parallel=zero1
    python benchmarks/optimizers.py --worlds 4 --parallel.tp=2

All optimizers of one row run in turns in the same processes. Rows of one process also have PyTorch's Muon twice: unchanged,
with bfloat16 iterations (dense model only), and with float32 iterations. PyTorch's Muon has a separate parameter for each
expert. Prints the table and writes it, with date, versions and settings, to benchmarks/results/. Other
--section.key=value options override the config.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # works from a clone, installed or not

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.collectives import collectives_of
from benchmarks.loops import TINY, configure, settings_of
from benchmarks.measure import Spread, against_bar, environment, markdown, parser, publish, ratio, take_turns
from benchmarks.ranks import Row, rows_of_ranks
from forge.config import Config, check_world
from forge.data.build import build_dataset
from forge.data.loader import Loader
from forge.optim import build_optimizer
from forge.optim.optimizer import gradient
from forge.parallel.build import build_parallel_model
from forge.parallel.mesh import make_meshes
from forge.parallel.step.model import ParallelModel
from scripts.options import exit_code_of, positive

MODELS = {"dense": "debug.toml", "experts": "moe_debug.toml"}
TINY_EXPERTS = ("--model.moe.n_experts=4", "--model.moe.expert_dim=32")
OPTIMIZERS = {
    "adamw": ("--optimizer.name=adamw",),
    "muon": ("--optimizer.name=muon",),
    "muon, neuron": ("--optimizer.name=muon", "--optimizer.muon.second_moment=neuron"),
}
TORCH, TORCH_FLOAT32 = "torch.optim.Muon", "torch.optim.Muon, float32"
MIB = 2**20
# Smallest accepted ratio (time of PyTorch's Muon) / (time of forge's Muon) of an update, for one process on a CPU, both
# with float32 iterations.
BAR = 1.0


class Update:
    """Updates by one optimizer, all with the same gradient."""

    def __init__(self, name: str, step: Callable[[], None]):
        self.name, self.step = name, step

    def sent(self) -> tuple[dict[str, int], float]:
        """Return a dict from each collective of an update to its number of calls, and the MiB of all their tensors.

        Collectives of at most 256 bytes are left out.
        """
        calls = [(name, size) for name, size in collectives_of(self.step).calls if size > 256]
        return dict(Counter(name for name, _ in calls)), sum(size for _, size in calls) / MIB

    def losses(self) -> list[float]:
        return []

    def close(self) -> None: ...


def main(arguments: list[str] | None = None) -> int:
    """Measure, write the results and return the exit code."""
    given, overrides = _parser().parse_known_args(arguments)
    return exit_code_of(lambda: measure(given, overrides))


def measure(given: argparse.Namespace, overrides: list[str]) -> None:
    """Measure with every number of ranks; print and write the table."""
    about = environment(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    rows = [
        row
        for world in given.worlds
        for model in MODELS
        for row in rows_of_ranks(world, _measure, model, given, overrides)
    ]
    left_out = ("config", "layers")
    about["settings"] = {key: value for key, value in rows[0]["settings"].items() if key not in left_out}
    publish("optimizers", given.output, about, {"rows": rows}, _table(rows))


def _measure(
    device: torch.device, model_name: str, given: argparse.Namespace, overrides: list[str]
) -> list[Row]:
    world = dist.get_world_size()
    tiny = (*TINY, *(TINY_EXPERTS if model_name == "experts" else ())) if given.tiny else ()
    updates, configs = [], {}
    for name, options in OPTIMIZERS.items():
        config = configure(MODELS[model_name], *tiny, *overrides, *options)
        configs[name] = config
        updates.append(Update(name, _ours(config, device)))
    if world == 1:
        # On CPUs without bfloat16 products, PyTorch's unchanged Muon takes minutes for experts.
        for name, cast in ((TORCH, True), (TORCH_FLOAT32, False))[model_name == "experts" :]:
            updates.append(Update(name, _torchs(configs["muon"], device, cast)))
    seconds = take_turns(updates, rounds=given.rounds, steps=given.steps, warmup=given.warmup, device=device)
    rows = []
    for update in updates:
        collectives, sent = update.sent() if world > 1 else ({}, 0.0)
        ours = TORCH_FLOAT32 in seconds and update.name == "muon"
        rows.append(
            {
                "ranks": world,
                "model": model_name,
                "optimizer": update.name,
                "ms": Spread.of([1000 * s for s in seconds[update.name]]).show(1),
                "of_adamw": ratio(seconds[update.name], seconds["adamw"]).show(2),
                "of_torch": ratio(seconds[TORCH_FLOAT32], seconds[update.name]).show(2) if ours else "",
                "bar": BAR if ours and device.type == "cpu" and not given.tiny else None,
                "met": ratio(seconds[TORCH_FLOAT32], seconds[update.name]) if ours else 0.0,
                "collectives": collectives,
                "sent_mib": sent,
                "settings": settings_of(given, configs["muon"], device),
            }
        )
    return rows


def _with_gradients(config: Config, device: torch.device) -> tuple[ParallelModel, Any]:
    """Return the model with the gradient of one batch, and the group of ranks that divide matrices for the update."""
    degrees = check_world(config, dist.get_world_size())
    meshes = make_meshes(degrees, device.type)
    model = build_parallel_model(config, meshes, device)
    batches = Loader(
        build_dataset(config),
        global_batch_size=config.train.global_batch_size,
        rank=meshes.data_rank,
        ranks=meshes.data_ranks,
        device=device,
    )
    batch = next(batches)
    batches.close()
    model.forward_backward(batch, model.count_tokens(batch))
    model.finalize_gradients()
    return model, meshes.stage


def _ours(config: Config, device: torch.device) -> Callable[[], None]:
    model, group = _with_gradients(config, device)
    optimizer = build_optimizer(model.shards, config.optimizer, group)
    go = torch.zeros((), device=device)
    return lambda: optimizer.step(config.optimizer.lr, go)


def _torchs(config: Config, device: torch.device, cast: bool) -> Callable[[], None]:
    """Return a step of torch.optim.Muon for the parameters of forge's Muon, and of torch.optim.AdamW for all others.

    The gradients are the same as for forge's optimizers. cast: PyTorch's Muon iterates in bfloat16. False: in float32.
    """
    shards = _with_gradients(config, device)[0].shards
    matrices: list[Tensor] = []
    rest: list[Tensor] = []
    for shard in shards:
        whole = shard.data.view(shard.global_shape).clone()
        slope = gradient(shard).reshape(shard.global_shape).to(whole.dtype)
        own = shard.name.startswith("layers.") and len(shard.global_shape) > 1 and shard.kind != "router"
        several = zip(whole, slope, strict=True) if own and whole.dim() == 3 else [(whole, slope)]
        for values, grad in several:
            parameter = torch.nn.Parameter(values.clone())
            parameter.grad = grad.clone()
            (matrices if own else rest).append(parameter)
    options = {"lr": config.optimizer.lr, "adjust_lr_fn": config.optimizer.muon.adjust_lr}
    muon = torch.optim.Muon(matrices, **options)
    adamw = torch.optim.AdamW(rest, lr=config.optimizer.lr, fused=True)

    def step() -> None:
        bfloat16 = Tensor.bfloat16
        if not cast:
            Tensor.bfloat16 = Tensor.clone  # type: ignore[method-assign]
        try:
            muon.step()
        finally:
            Tensor.bfloat16 = bfloat16  # type: ignore[method-assign]
        adamw.step()

    return step


def _table(rows: list[Row]) -> str:
    head = ["ranks", "model", "optimizer", "ms per update", "of adamw's time"]
    head += ["torch.optim.Muon's time in float32, of ours", "bar", "collectives", "MiB in them"]
    lines = []
    for row in rows:
        sent = ", ".join(f"{number} {name}" for name, number in row["collectives"].items())
        lines.append(
            [
                str(row["ranks"]),
                row["model"],
                row["optimizer"],
                row["ms"],
                row["of_adamw"],
                row["of_torch"],
                against_bar(row["bar"], row["met"]),
                sent or "none",
                f"{row['sent_mib']:.1f}",
            ]
        )
    return f"{markdown(head, lines)}\n\nMedians of all rounds (lowest to highest); ratios are taken round by round."


def _parser() -> argparse.ArgumentParser:
    made = parser(__doc__, rounds=3, steps=1, warmup=1)
    made.add_argument(
        "--worlds", type=positive, nargs="+", default=[1, 2, 4], metavar="N", help="numbers of ranks (1 2 4)"
    )
    made.set_defaults(config="debug.toml and moe_debug.toml")
    return made


if __name__ == "__main__":
    sys.exit(main())
