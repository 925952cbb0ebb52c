"""forge's training step, compared with a bare PyTorch loop of forge's model, in turns in one process.

    python benchmarks/throughput.py                          the debug model; on CPU or on the first GPU
    python benchmarks/throughput.py --config 160m.toml --train.micro_batch_size=4

Prints the table and writes it, with date, versions and settings, to benchmarks/results/. benchmarks/README.md
explains the rows. Other --section.key=value options override the config for every contender.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # works from a clone, installed or not

import torch

from benchmarks.loops import (
    TINY,
    BareLoop,
    ForgeLoop,
    LlamaLoop,
    compare,
    configure,
    joined,
    make_batches,
    settings_of,
    why_no_bfloat16,
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
)
from benchmarks.ranks import rows_of_ranks
from forge.runtime.cores import cores
from forge.runtime.errors import UserError
from scripts.options import exit_code_of, positive

BARE, FORGE = "bare, float32", "forge, float32"
NARROW_BARE, NARROW_FORGE = "bare, bfloat16", "forge, bfloat16"
TWO = ", two processes"
# Row -> (base, smallest accepted ratio of the row's speed to the base's), on a CPU with the shape below.
BARS = {
    FORGE: (BARE, 1.0),
    NARROW_FORGE: (NARROW_BARE, 1.12),
    FORGE + TWO: (BARE + TWO, 1.0),
    NARROW_FORGE + TWO: (NARROW_BARE + TWO, 1.06),
}
# Overrides of debug.toml for a command line without overrides: one microbatch per process.
SHAPE = ("--model.n_layers=6", "--model.vocab_size=8192", "--train.seq_len=512", "--train.micro_batch_size=4")
# Features at world size 1, each compared with forge without the feature. Stochastic rounding, recomputation and compilation
# pay off on large models. The rows give the cost or gain on this small model.
FEATURES = {
    "compile": ("--compile.enabled=true",),
    "activation checkpointing, full": ("--activation_checkpoint.mode=full",),
    "activation checkpointing, selective": ("--activation_checkpoint.mode=selective",),
    "float8 rowwise": ("--precision.float8=rowwise",),
    "float8 tensorwise": ("--precision.float8=tensorwise",),
}


def main(arguments: list[str] | None = None) -> int:
    """Measure, write the results and return the exit code."""
    given, overrides = _parser().parse_known_args(arguments)
    given.barred = given.config == "debug.toml" and not given.tiny and not overrides
    if given.barred:
        overrides = [*SHAPE, "--train.global_batch_size=4"]
    return exit_code_of(lambda: measure(given, [*(TINY if given.tiny else ()), *overrides]))


def measure(given: argparse.Namespace, overrides: list[str]) -> None:
    """Measure all contenders, refuse those whose loss does not fall, print and write the table."""
    torch.set_num_threads(given.threads)
    device = joined().device
    plain = configure(given.config, "--precision.compute=float32", *overrides)
    about = environment(device) | {"settings": settings_of(given, plain, device)}
    skipped: dict[str, str] = {}
    found = compare(lambda folder: _contenders(given, overrides, device, folder, skipped), given, device)
    if 2 in given.worlds and device.type == "cpu":
        batch = 2 * plain.train.global_batch_size
        more = [*overrides, f"--train.global_batch_size={batch}", "--parallel.data_parallel=fsdp2"]
        found += [row | {"name": row["name"] + TWO} for row in rows_of_ranks(2, _on_ranks, given, more)]
    seconds = {row["name"]: row["seconds"] for row in found}
    rows = [_row(row, seconds, device, given.barred and device.type == "cpu") for row in found]
    table = _table(rows, skipped)
    publish("throughput", given.output, about, {"rows": rows, "skipped": skipped}, table)


def _on_ranks(device: torch.device, given: argparse.Namespace, overrides: list[str]) -> list[dict[str, Any]]:
    return compare(lambda folder: _contenders(given, overrides, device, folder, None), given, device)


def _contenders(
    given: argparse.Namespace,
    overrides: list[str],
    device: torch.device,
    folder: Path,
    skipped: dict[str, str] | None,
) -> list[Contender]:
    """Return the contenders. skipped: a dict to fill with impossible row -> reason; None: return only rows with a bar."""
    plain, bfloat16 = (
        configure(given.config, *overrides, f"--precision.compute={dtype}")
        for dtype in ("float32", "bfloat16")
    )
    batches = make_batches(plain, given.warmup + given.rounds * given.steps, device)
    found: list[Contender] = [
        BareLoop(BARE, plain, batches, device),
        ForgeLoop(FORGE, plain, folder / "float32"),
    ]
    slow = why_no_bfloat16(device)
    if not slow or given.tiny:
        found.append(BareLoop(NARROW_BARE, bfloat16, batches, device))
        found.append(ForgeLoop(NARROW_FORGE, bfloat16, folder / "bfloat16"))
    if skipped is None:
        return found
    if slow and not given.tiny:
        skipped |= {name: slow for name in (NARROW_BARE, NARROW_FORGE)}
    narrow = "--precision.compute=bfloat16"
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
        ) as error:  # e.g. the compiler fails, or a kernel is missing
            skipped[title] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return found


def _row(
    found: dict[str, Any], seconds: dict[str, list[float]], device: torch.device, barred: bool
) -> dict[str, Any]:
    name, mine, losses = found["name"], found["seconds"], found["losses"]
    step = Spread.of(mine)
    base = _base(name)
    return {
        "name": name,
        "tokens_per_second": Spread.of([found["tokens"] / s for s in mine]),
        "step_ms": Spread.of([1000 * s for s in mine]),
        "mfu": found["seconds_at_peak"] and found["seconds_at_peak"] / step.median,
        "base": base,
        "ratio": ratio(seconds[base], mine),
        "bar": BARS[name][1] if barred and name in BARS else None,
        "first_loss": losses[0],
        "last_loss": losses[-1],
    }


def _base(name: str) -> str:
    if name in BARS:
        return BARS[name][0]
    if name.count(",") > 1 and not name.endswith(TWO):  # a feature
        return FORGE if "float32" in name else NARROW_FORGE
    return BARE + TWO if name.endswith(TWO) else BARE


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
                against_bar(row["bar"], row["ratio"]),
                f"{row['first_loss']:.4f}",
                f"{row['last_loss']:.4f}",
            ]
        )
    lines += [[name, "not measured", "", "", "", reason, "", "", ""] for name, reason in skipped.items()]
    rounds = rows[0]["ratio"].rounds
    return f"{markdown(head, lines)}\n\nMedian of {rounds} rounds (lowest to highest); ratios are taken round by round."


def _parser() -> argparse.ArgumentParser:
    number_of_cores = cores()
    made = parser(
        __doc__, config="the model and its batch", rounds=9, steps=2, warmup=3, threads=number_of_cores
    )
    made.add_argument(
        "--worlds",
        type=positive,
        nargs="+",
        default=[1, 2],
        metavar="N",
        help="numbers of processes: 1, or 1 2",
    )
    made.add_argument("--features", action="store_true", help="also compile, checkpointing and float8")
    return made


if __name__ == "__main__":
    sys.exit(main())
