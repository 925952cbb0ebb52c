"""One CUDA card in under eight minutes: the 1B and 8B Llama-3 shapes at 4096 tokens, with the state in two forms.

    python benchmarks/gpu.py                    everything that fits in --minutes; what does not is listed
    python benchmarks/gpu.py --only 1b          rows whose name contains this

    A   parameters, gradients and both moments in bfloat16: what most published speeds are measured with
    B   float32 parameters and gradients, bfloat16 moments, bfloat16 products: what one would train with

Every row trains a fresh model on learnable data and is refused if its loss does not fall. The table is written to
benchmarks/results/ after each row, so a run that is cut short leaves what it measured.
"""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # works from a clone, installed or not

import torch

from benchmarks.kernels import largest_other, shares, times_of
from benchmarks.loops import ForgeLoop, configure, joined, known_peak
from benchmarks.measure import (
    Spread,
    environment,
    markdown,
    parser,
    require_learning,
    take_turns,
    write_results,
)
from forge.errors import BAD_CONFIG, UserError
from forge.model import flops_per_token
from forge.observe.hardware import GIB
from forge.parallel.build import build_meta_model
from scripts.options import exit_code_of

# Name -> (config that has the shape, its batch on one card).
SHAPES = {
    "1b": ("1b.toml", ("--train.micro_batch_size=2", "--train.global_batch_size=8")),
    "8b": ("7b.toml", ("--train.micro_batch_size=1", "--train.global_batch_size=2")),
}
STATES = {
    "A": ("--precision.storage=bfloat16", "--precision.reduce=bfloat16", "--optimizer.moment_dtype=bfloat16"),
    "B": ("--precision.storage=float32", "--precision.reduce=float32", "--optimizer.moment_dtype=bfloat16"),
}
COMPILE = ("--compile.enabled=true", "--compile.loss=true")
# In the order in which they are measured: where time runs out, the last ones are missing.
VARIANTS = {
    "compile": COMPILE,
    "eager": (),
    "compile, AC full": (*COMPILE, "--activation_checkpoint.mode=full"),
    "compile, AC selective": (*COMPILE, "--activation_checkpoint.mode=selective"),
    "compile, float8 rowwise": (*COMPILE, "--precision.float8=rowwise"),
    "compile, float8 tensorwise": (*COMPILE, "--precision.float8=tensorwise"),
    "compile, AC full, float8 rowwise": (
        *COMPILE,
        "--activation_checkpoint.mode=full",
        "--precision.float8=rowwise",
    ),
}
COMMON = (
    "--train.seq_len=4096",
    "--precision.compute=bfloat16",
    "--optimizer.lr=3e-4",
    "--metrics.log_interval=1",
)
TINY = (
    "--model.dim=64",
    "--model.n_layers=2",
    "--model.n_heads=4",
    "--model.n_kv_heads=2",
    "--model.ffn_dim=128",
    "--model.vocab_size=128",
    "--train.seq_len=64",
    "--train.global_batch_size=2",
    "--train.micro_batch_size=1",
    "--optimizer.lr=1e-2",
    "--compile.backend=aot_eager",
)


@dataclass(frozen=True)
class Row:
    """One measurement; `note` says why there is none."""

    name: str
    note: str = ""
    tokens_per_second: Spread | None = None
    mfu: float | None = None
    allocated_gib: float = 0.0
    reserved_gib: float = 0.0
    outside: float = 0.0  # share of kernel time that is neither products nor attention
    attention: float = 0.0
    idle: float | None = None  # share of a step in which the card runs no kernel
    first_step_s: float = 0.0
    first_loss: float = 0.0
    last_loss: float = 0.0
    largest_outside: tuple[tuple[str, float], ...] = ()


def main(arguments: list[str] | None = None) -> int:
    given, overrides = _parser().parse_known_args(arguments)
    return exit_code_of(lambda: measure(given, overrides))


def measure(given: argparse.Namespace, overrides: list[str]) -> list[Row]:
    """Measures row after row until all are done or the time is up, and writes the table after each."""
    if not torch.cuda.is_available() and not given.tiny:
        raise UserError("benchmarks/gpu.py needs a CUDA card; --tiny shows on a CPU that it works")
    plan = list(_plan(given))
    if not plan:
        raise UserError(
            f"--only {given.only}: no row's name contains that, as {', '.join(SHAPES)} or {', '.join(STATES)} do"
        )
    began = time.monotonic()
    device = joined().device
    about = environment(device) | {"settings": _settings(given, device)}
    rows: list[Row] = []
    longest = 0.0
    for name, config_name, options in plan:
        row_began = time.monotonic()
        if 60 * given.minutes - (row_began - began) < longest:
            rows.append(Row(name, "not run: no time left"))
        else:
            print(f"{name} ...", file=sys.stderr, flush=True)
            rows.append(
                _attempt(
                    name, config_name, [*options, *(TINY if given.tiny else ()), *overrides], given, device
                )
            )
            longest = max(longest, time.monotonic() - row_began)
        table = _table(rows)
        path = write_results("gpu", given.output, about, {"rows": [vars(row) for row in rows]}, table)
    print(_table(rows))
    print(f"\nwritten to {path}", file=sys.stderr)
    return rows


def _plan(given: argparse.Namespace) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """(row's name, config, overrides), in the order of measuring."""
    for variant, options in VARIANTS.items():
        for shape, (config, batch) in SHAPES.items():
            for state, precision in STATES.items():
                name = f"{shape} {state}, {variant}"
                if given.only in name:
                    yield name, config, (*COMMON, *batch, *precision, *options)


def _attempt(
    name: str, config: str, options: list[str], given: argparse.Namespace, device: torch.device
) -> Row:
    """The row, or a row that says why not. What it held on the card is free again afterwards."""
    try:
        return _measure(name, config, options, given, device)
    except UserError as error:
        if error.exit_code == BAD_CONFIG:
            raise
        return Row(name, f"refused: {error}")
    except torch.OutOfMemoryError:
        return Row(name, "out of memory")
    except (RuntimeError, NotImplementedError, ImportError) as error:  # of the compiler, of a missing kernel
        return Row(name, f"failed: {type(error).__name__}: {str(error).splitlines()[0][:200]}")
    finally:
        torch.compiler.reset()
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)


def _measure(
    name: str, config_name: str, options: list[str], given: argparse.Namespace, device: torch.device
) -> Row:
    config = configure(config_name, *options)
    with tempfile.TemporaryDirectory() as folder:
        loop = ForgeLoop(name, config, Path(folder))
        try:
            began = time.perf_counter()
            loop.step()
            first = loop.losses()  # waits for the device
            first_step_s = time.perf_counter() - began
            seconds = take_turns(
                [loop], rounds=given.rounds, steps=given.steps, warmup=given.warmup, device=device
            )
            times = times_of(loop.step, device)
            losses = loop.losses()
        finally:
            loop.close()
    require_learning(name, losses)
    step_tokens = config.train.global_batch_size * config.train.seq_len
    rate = Spread.of([step_tokens / value for value in seconds[name]])
    peak = known_peak(config, device)
    part = shares(times)
    row = Row(
        name,
        tokens_per_second=rate,
        mfu=rate.median * flops_per_token(build_meta_model(config), config.train.seq_len) / peak
        if peak
        else None,
        outside=part["other"],
        attention=part["attention"],
        first_step_s=first_step_s,
        first_loss=first[0],
        last_loss=losses[-1],
        largest_outside=tuple(largest_other(times)),
    )
    if device.type != "cuda":
        return row
    busy_s = sum(microseconds for _, microseconds in times) / 1e6
    return replace(
        row,
        allocated_gib=torch.cuda.max_memory_allocated(device) / GIB,
        reserved_gib=torch.cuda.max_memory_reserved(device) / GIB,
        # Of an unprofiled step: recording makes steps longer, kernels not. Kernels that overlap count twice: not below 0.
        idle=max(0.0, 1 - busy_s / Spread.of(seconds[name]).median),
    )


def _table(rows: list[Row]) -> str:
    head = [
        "model, state, variant",
        "tokens/s",
        "MFU",
        "GiB allocated (reserved)",
        "outside products and attention",
        "attention",
        "card idle",
        "first step s",
        "loss from",
        "to",
    ]
    lines = []
    for row in rows:
        if row.tokens_per_second is None:
            lines.append([row.name, row.note, *[""] * (len(head) - 2)])
            continue
        lines.append(
            [
                row.name,
                row.tokens_per_second.show(0),
                "peak not known" if row.mfu is None else f"{row.mfu:.3f}",
                f"{row.allocated_gib:.1f} ({row.reserved_gib:.1f})",
                f"{row.outside:.1%}",
                f"{row.attention:.1%}",
                "" if row.idle is None else f"{row.idle:.1%}",
                f"{row.first_step_s:.1f}",
                f"{row.first_loss:.2f}",
                f"{row.last_loss:.2f}",
            ]
        )
    return markdown(head, lines)


def _settings(given: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    return {
        "device": device.type,
        "seq_len": 64 if given.tiny else 4096,
        "sequences per step (microbatch)": "1b: 8 (2), 8b: 2 (1)" if not given.tiny else "2 (1)",
        "A": "all-bfloat16 state",
        "B": "float32 parameters and gradients, bfloat16 moments",
        "rounds": given.rounds,
        "steps per round": given.steps,
        "warm-up steps": given.warmup + 1,
    }


def _parser() -> argparse.ArgumentParser:
    made = parser(__doc__, rounds=3, steps=3, warmup=2)
    end = "no row begins that may end later (%(default)s)"
    made.add_argument("--minutes", type=float, default=8.0, metavar="M", help=end)
    made.add_argument("--only", default="", metavar="TEXT", help="rows whose name contains this (all)")
    return made


if __name__ == "__main__":
    sys.exit(main())
