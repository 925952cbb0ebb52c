"""forge's training step against a bare PyTorch loop of the same model, taking turns in one process.

    python benchmarks/throughput.py                          the debug model; on CPU or on the first CUDA card
    python benchmarks/throughput.py --config 160m.toml --train.micro_batch_size=4

Prints the table and writes it, with date, versions and settings, to benchmarks/results/. What each row is: see
benchmarks/README.md. Other --section.key=value options override the config for every contender.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # works from a clone, installed or not

import torch

from benchmarks.loops import (
    TINY,
    BareLoop,
    ForgeLoop,
    LlamaLoop,
    alone,
    configure,
    known_peak,
    make_batches,
    settings_of,
    why_no_llama,
)
from benchmarks.measure import (
    Contender,
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
from forge.errors import UserError
from forge.model import flops_per_token
from forge.parallel.build import build_meta_model
from scripts.options import exit_code_of

BARE, FORGE = "bare, float32", "forge, float32"
# Row -> (base, least ratio), on the debug model on a CPU.
BARS = {FORGE: (BARE, 0.97), "forge, bfloat16 compute": (BARE, 1.25)}
# Features at world size 1, each against forge without it. Rounding, recomputation and compilation pay on large
# models; the rows say what they cost or give on this one.
FEATURES = {
    "compile": ("--compile.enabled=true",),
    "activation checkpointing, full": ("--activation_checkpoint.mode=full",),
    "activation checkpointing, selective": ("--activation_checkpoint.mode=selective",),
    "float8 rowwise": ("--precision.float8=rowwise",),
    "float8 tensorwise": ("--precision.float8=tensorwise",),
}


def main(arguments: list[str] | None = None) -> int:
    given, overrides = _parser().parse_known_args(arguments)
    return exit_code_of(lambda: measure(given, [*(TINY if given.tiny else ()), *overrides]))


def measure(given: argparse.Namespace, overrides: list[str]) -> None:
    """Runs all contenders, refuses what does not learn, prints and writes the table."""
    torch.set_num_threads(given.threads)
    device = alone().device
    plain = configure(given.config, "--precision.compute=float32", *overrides)
    about = environment(device) | {"settings": settings_of(given, plain, device)}
    skipped: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        contenders = _contenders(given, overrides, plain, device, Path(folder), skipped)
        seconds = take_turns(
            contenders, rounds=given.rounds, steps=given.steps, warmup=given.warmup, device=device
        )
        losses = {contender.name: contender.losses() for contender in contenders}
        for contender in contenders:
            contender.close()
    for name, values in losses.items():
        require_learning(name, values)
    configs = {contender.name: contender.config for contender in contenders}  # type: ignore[attr-defined]
    barred = device.type == "cpu" and Path(given.config).stem == "debug" and not overrides
    rows = [_row(name, configs[name], seconds, losses[name], device, barred) for name in seconds]
    table = _table(rows, skipped)
    publish("throughput", given.output, about, {"rows": rows, "skipped": skipped}, table)


def _contenders(
    given: argparse.Namespace,
    overrides: list[str],
    plain: Config,
    device: torch.device,
    folder: Path,
    skipped: dict[str, str],
) -> list[Contender]:
    """Every row that can be; why another cannot goes to `skipped`."""
    batches = make_batches(plain, given.warmup + given.rounds * given.steps, device)
    found: list[Contender] = [
        BareLoop(BARE, plain, batches, device),
        ForgeLoop(FORGE, plain, folder / "float32"),
    ]
    narrow = "--precision.compute=bfloat16"
    bfloat16 = configure(given.config, *overrides, narrow)
    found.append(ForgeLoop("forge, bfloat16 compute", bfloat16, folder / "bfloat16"))
    if reason := why_no_llama():
        skipped["transformers' Llama, float32"] = reason
    else:
        found.append(LlamaLoop("transformers' Llama, float32", plain, batches, device))
    for name, options in FEATURES.items() if given.features else ():
        compute = narrow if "float8" in name else "--precision.compute=float32"
        title = f"forge, {compute.split('=')[1]}, {name}"
        try:
            loop = ForgeLoop(title, configure(given.config, *overrides, compute, *options), folder / name)
            loop.step()
            found.append(loop)
        except UserError as error:
            skipped[title] = str(error)
        except (
            RuntimeError,
            NotImplementedError,
            ImportError,
        ) as error:  # of the compiler, of a missing kernel
            skipped[title] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return found


def _row(
    name: str,
    config: Config,
    seconds: dict[str, list[float]],
    losses: list[float],
    device: torch.device,
    barred: bool,
) -> dict[str, Any]:
    mine = seconds[name]
    train = config.train
    rate = Spread.of([train.global_batch_size * train.seq_len / s for s in mine])
    peak = known_peak(config, device)
    features = name.count(",") > 1
    base = BARE if not features else FORGE if "float32" in name else "forge, bfloat16 compute"
    bar = BARS.get(name) if barred else None
    return {
        "name": name,
        "tokens_per_second": rate,
        "step_ms": Spread.of([1000 * s for s in mine]),
        "mfu": rate.median * flops_per_token(build_meta_model(config), train.seq_len) / peak
        if peak
        else None,
        "base": base,
        "ratio": ratio(seconds[base], mine),
        "bar": bar[1] if bar else None,
        "first_loss": losses[0],
        "last_loss": losses[-1],
    }


def _table(rows: list[dict[str, Any]], skipped: dict[str, str]) -> str:
    head = ["loop", "tokens/s", "ms per step", "MFU", "times as fast as", "ratio", "bar", "loss from", "to"]
    lines = []
    for row in rows:
        lines.append(
            [
                row["name"],
                row["tokens_per_second"].show(0),
                row["step_ms"].show(1),
                "peak not known" if row["mfu"] is None else f"{row['mfu']:.3f}",
                row["base"],
                row["ratio"].show(),
                against_bar(row["bar"], row["ratio"].median),
                f"{row['first_loss']:.4f}",
                f"{row['last_loss']:.4f}",
            ]
        )
    lines += [[name, "not measured", "", "", "", reason, "", "", ""] for name, reason in skipped.items()]
    rounds = rows[0]["ratio"].rounds
    return f"{markdown(head, lines)}\n\nMedian of {rounds} rounds (lowest to highest); ratios are taken round by round."


def _parser() -> argparse.ArgumentParser:
    cores = len(os.sched_getaffinity(0))
    made = parser(__doc__, config="the model and its batch", rounds=9, steps=2, warmup=3, threads=cores)
    made.add_argument("--features", action="store_true", help="also compile, checkpointing and float8")
    return made


if __name__ == "__main__":
    sys.exit(main())
