"""A mixture of experts, compared with a dense model with as many active parameters, and with padded experts.

    python benchmarks/moe.py                     32 experts, 4 per token; on the CPU or on the first GPU
    python benchmarks/moe.py --experts 8 --top-k 2 --train.micro_batch_size=4

All contenders take turns in one process. Prints the table and writes it, with date, versions and settings, to
benchmarks/results/. benchmarks/README.md explains the rows. Other --section.key=value options override the config for
every contender.
"""

from __future__ import annotations

import argparse
import functools
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # works from a clone, installed or not

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.loops import TINY, ForgeLoop, configure, joined, known_peak, settings_of
from benchmarks.measure import (
    Spread,
    against_bar,
    environment,
    markdown,
    parser,
    publish,
    ratio,
    require_learning,
    take_turns,
)
from forge.config import Config
from forge.model import Experts, flops_per_token, parameter_counts
from forge.model.experts import RowGroups
from forge.parallel.build import build_meta_model
from forge.runtime.cores import cores
from forge.runtime.errors import UserError
from scripts.options import exit_code_of, positive

DENSE, MOE, PADDED = "dense, as many active parameters", "experts", "experts, padded"
SKEWED, PADDED_SKEWED = "experts, skewed load", "experts, padded, skewed load"
BASES = {DENSE: DENSE, MOE: DENSE, PADDED: MOE, SKEWED: PADDED_SKEWED, PADDED_SKEWED: PADDED_SKEWED}
# Row -> smallest accepted ratio of the row's speed to that of its base, at the default size on a CPU.
BARS = {MOE: 0.6, SKEWED: 1.5}
# A microbatch large enough for 256 rows per expert on average, at the default size.
SIZE = ("--train.micro_batch_size=8",)


def padded(experts: Experts, rows: Tensor, groups: RowGroups, *_held: Any) -> Tensor:
    """Replace `Experts.compute` by batched matrix products. Each expert's rows are padded to the largest number of rows.

    Synchronises with the device, because the host reads the largest number.
    """
    counts = groups.counts
    longest = int(counts.max())
    first = counts.cumsum(0) - counts
    expert = torch.repeat_interleave(counts)
    place = torch.arange(rows.shape[0], device=rows.device) - first[expert] + longest * expert
    batch = rows.new_zeros(counts.numel() * longest, rows.shape[1]).index_copy(0, place, rows)
    gate, up = (batch.unflatten(0, (-1, longest)) @ experts.w13.mT).chunk(2, -1)
    return (F.silu(gate) * up @ experts.w2.mT).flatten(0, 1)[place]


class ExpertsLoop(ForgeLoop):
    """forge's step on a mixture of experts with random routing. A token draws expert i with weight i^-skew.

    Every contender thus has the same load from the first step, independent of the router. pad: use `padded`.
    """

    def __init__(self, name: str, config: Config, folder: Path, pad: bool, skew: float):
        super().__init__(name, config, folder)
        (self.model,) = self.trainer.model.parts
        for router in self.model.routers.values():
            router.choose = functools.partial(draw, skew, router.config.top_k)
        for module in self.model.modules():
            if pad and isinstance(module, Experts):
                module.compute = functools.partial(padded, module)

    def load(self) -> float:
        """Return the largest load of an expert in the last step, as a multiple of an even share; mean over layers."""
        counts = torch.stack([router.previous_counts for router in self.model.routers.values()]).double()
        return (counts.amax(1) / counts.mean(1)).mean().item()


def draw(skew: float, top_k: int, scores: Tensor) -> Tensor:
    """Draw `top_k` different experts per token by the Gumbel trick.

    scores: `[..., n_experts]`; only the shape counts. Returns int64 `[..., top_k]`.
    """
    numbers = torch.arange(1, scores.shape[-1] + 1, device=scores.device)
    gumbel = -torch.empty_like(scores).exponential_().log()
    return (gumbel - skew * numbers.log()).topk(top_k).indices


def main(arguments: list[str] | None = None) -> int:
    """Measure, write the results and return the exit code."""
    given, overrides = _parser().parse_known_args(arguments)
    return exit_code_of(lambda: measure(given, [*(TINY if given.tiny else ()), *overrides]))


def measure(given: argparse.Namespace, overrides: list[str]) -> None:
    """Measure all contenders, refuse those whose loss does not fall, print and write the table."""
    torch.set_num_threads(given.threads)
    device = joined().device
    dense, experts = _configs(given, overrides)
    moe = experts.model.moe
    assert moe is not None
    mixture = {"experts": moe.n_experts, "top-k": moe.top_k, "expert_dim": moe.expert_dim, "skew": given.skew}
    about = environment(device) | {"settings": settings_of(given, experts, device, **mixture)}
    with tempfile.TemporaryDirectory() as folder:
        loops: list[ForgeLoop] = [ForgeLoop(DENSE, dense, Path(folder) / "dense")]
        for name in (MOE, PADDED, SKEWED, PADDED_SKEWED):
            skew = given.skew if "skewed" in name else 0.0
            loops.append(ExpertsLoop(name, experts, Path(folder) / name, "padded" in name, skew))
        seconds = take_turns(
            loops, rounds=given.rounds, steps=given.steps, warmup=given.warmup, device=device
        )
        barred = device.type == "cpu" and not given.tiny and not overrides and given.experts == 32
        rows = [_row(loop, seconds, device, barred) for loop in loops]
        for loop in loops:
            require_learning(loop.name, loop.losses())
            loop.close()
    table = _table(rows)
    publish("moe", given.output, about, {"rows": rows}, table)


def _configs(given: argparse.Namespace, overrides: list[str]) -> tuple[Config, Config]:
    """Return the configs of a dense model and of a mixture of experts.

    The total width of a token's experts is the width of the dense feed-forward.
    """
    dense = configure(given.config, *SIZE, *overrides)
    width, rest = divmod(dense.model.ffn_dim, given.top_k)
    if rest:
        raise UserError(f"--top-k = {given.top_k}: must divide model.ffn_dim = {dense.model.ffn_dim}")
    moe = f"{{n_experts = {given.experts}, top_k = {given.top_k}, expert_dim = {width}}}"
    return dense, configure(given.config, *SIZE, f"--model.moe={moe}", *overrides)


def _row(
    loop: ForgeLoop, seconds: dict[str, list[float]], device: torch.device, barred: bool
) -> dict[str, Any]:
    name, config = loop.name, loop.config
    rate = Spread.of([config.train.global_batch_size * config.train.seq_len / s for s in seconds[name]])
    whole = build_meta_model(config)
    peak, counts, losses = known_peak(config, device), parameter_counts(whole), loop.losses()
    return {
        "name": name,
        "parameters": counts.total,
        "active": counts.active,
        "tokens_per_second": rate,
        "mfu": rate.median * flops_per_token(whole, config.train.seq_len) / peak if peak else None,
        "load": loop.load() if isinstance(loop, ExpertsLoop) else None,
        "base": BASES[name],
        "ratio": ratio(seconds[BASES[name]], seconds[name]),
        "bar": BARS.get(name) if barred else None,
        "first_loss": losses[0],
        "last_loss": losses[-1],
    }


def _table(rows: list[dict[str, Any]]) -> str:
    head = ["model", "parameters", "active", "largest load", "tokens/s", "MFU", "times as fast as", "ratio"]
    lines = []
    for row in rows:
        lines.append(
            [
                row["name"],
                f"{row['parameters'] / 1e6:.1f} M",
                f"{row['active'] / 1e6:.1f} M",
                "" if row["load"] is None else f"{row['load']:.2f}",
                row["tokens_per_second"].show(0),
                "peak not known" if row["mfu"] is None else f"{row['mfu']:.3f}",
                row["base"],
                row["ratio"].show(),
                against_bar(row["bar"], row["ratio"]),
                f"{row['first_loss']:.4f}",
                f"{row['last_loss']:.4f}",
            ]
        )
    rounds = rows[0]["ratio"].rounds
    return (
        f"{markdown([*head, 'bar', 'loss from', 'to'], lines)}\n\n"
        f"Median of {rounds} rounds (lowest to highest); ratios are taken round by round. "
        "Largest load: of the most visited expert, in even shares."
    )


def _parser() -> argparse.ArgumentParser:
    number_of_cores = cores()
    made = parser(__doc__, config="the dense model", rounds=7, steps=2, warmup=3, threads=number_of_cores)
    add = made.add_argument
    add("--experts", type=positive, default=32, metavar="N", help="routed experts (%(default)s)")
    add("--top-k", type=positive, default=4, metavar="N", help="experts that a token visits (%(default)s)")
    add(
        "--skew",
        type=float,
        default=0.75,
        metavar="X",
        help="a token draws expert i with weight i^-X (%(default)s)",
    )
    return made


if __name__ == "__main__":
    sys.exit(main())
