"""One CUDA card in under eight minutes: the 8B and 1B Llama-3 shapes at 4096 tokens, with the state in two forms.

    python benchmarks/gpu.py                       what fits in --minutes, the most informative first
    python benchmarks/gpu.py --only "8b B 1x8"     rows whose name contains this

    A     parameters, gradients and both moments in bfloat16: what most published speeds are measured with
    B     float32 parameters and gradients, bfloat16 moments, bfloat16 products: what one would train with
    1x8   microbatches of 1 sequence, 8 of them in a step
    bare  a plain PyTorch loop of the same model, microbatches and state

Every row is a process of its own that trains a fresh model on learnable data, and is refused if its loss does not fall: what
crashes costs one row. The table is printed and written to benchmarks/results/ after each.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # works from a clone, installed or not

import torch

from benchmarks.kernels import largest_other, shares, times_of
from benchmarks.loops import BareLoop, ForgeLoop, configure, joined, known_peak, make_batches
from benchmarks.measure import (
    Spread,
    environment,
    markdown,
    parser,
    require_learning,
    take_turns,
    write_results,
)
from forge.config import Config
from forge.errors import BAD_CONFIG, UserError
from forge.model import flops_per_token
from forge.observe.hardware import GIB
from forge.parallel.build import build_meta_model
from scripts.options import exit_code_of

SHAPES = {"8b": "7b.toml", "1b": "1b.toml"}
STATES = {
    "A": ("--precision.storage=bfloat16", "--precision.reduce=bfloat16", "--optimizer.moment_dtype=bfloat16"),
    "B": ("--precision.storage=float32", "--precision.reduce=float32", "--optimizer.moment_dtype=bfloat16"),
}
COMPILE = ("--compile.enabled=true", "--compile.loss=true")
OPTIONS = {
    "bare": (),
    "eager": (),
    "compile": COMPILE,
    "compiled update": ("--compile.optimizer=true",),
    "AC full": ("--activation_checkpoint.mode=full",),
    "AC selective": ("--activation_checkpoint.mode=selective",),
    "float8 rowwise": ("--precision.float8=rowwise",),
    "float8 tensorwise": ("--precision.float8=tensorwise",),
}
# In the order in which they are measured: where time runs out, the last ones are missing.
ROWS = (
    "8b B 1x8, compile",
    "8b B 1x8, compile, float8 rowwise",
    "8b A 2x4, compile",
    "8b A 2x4, bare, compile",
    "8b A 4x2, compile, AC full",
    "8b B 1x8, compile, compiled update",
    "8b A 2x4, compile, compiled update",
    "8b B 4x2, compile, AC full",
    "8b A 2x4, bare",
    "8b B 1x8, eager",
    "8b B 1x8, compile, float8 tensorwise",
    "8b B 4x2, compile, AC full, float8 rowwise",
    "8b B 2x4, compile, AC selective",
    "1b B 2x4, compile",
    "1b A 2x4, compile",
    "1b A 2x4, bare, compile",
    "1b B 2x4, compile, float8 rowwise",
    "1b B 2x4, eager",
)
# What the configs compile and recompute for the cards that they name is a row's own choice here.
COMMON = (
    "--compile.enabled=false",
    "--compile.loss=false",
    "--activation_checkpoint.mode=none",
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
    "--optimizer.lr=1e-2",
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

    @staticmethod
    def of(fields: dict[str, Any]) -> Row:
        """The row that another process has written as JSON."""
        rate = fields["tokens_per_second"]
        return Row(**fields | {"tokens_per_second": rate and Spread(**rate)})


def main(arguments: list[str] | None = None) -> int:
    given, overrides = _parser().parse_known_args(arguments)
    return exit_code_of(lambda: measure(given, overrides))


def measure(given: argparse.Namespace, overrides: list[str]) -> list[Row]:
    """Measures row after row until all are done or the time is up; prints and writes the table after each."""
    if not torch.cuda.is_available() and not given.tiny:
        raise UserError("benchmarks/gpu.py needs a CUDA card; --tiny shows on a CPU that it works")
    if given.row:
        given.row_file.write_text(json.dumps(vars(_attempt(given.row, given, overrides)), default=vars))
        return []
    plan = [name for name in ROWS if given.only in name]
    if not plan:
        raise UserError(f"--only {given.only}: no row's name contains that; the rows are {'; '.join(ROWS)}")
    began = time.monotonic()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    about = environment(device) | {"settings": _settings(given, device)}
    rows: list[Row] = []
    for name in plan:
        left = 60 * given.minutes - (time.monotonic() - began)
        if left < (1 if given.tiny else 30):
            rows.append(Row(name, "not run: no time left"))
        else:
            print(f"{name} ...", file=sys.stderr, flush=True)
            rows.append(_in_a_process(name, given, overrides, left))
        path = write_results("gpu", given.output, about, {"rows": [vars(row) for row in rows]}, _table(rows))
        print(_table(rows[-1:]).splitlines()[-1], flush=True)
    print(_table(rows))
    print(f"\nwritten to {path}", file=sys.stderr)
    return rows


def _in_a_process(name: str, given: argparse.Namespace, overrides: list[str], seconds: float) -> Row:
    """The row, measured by a process that has the card for itself; one that says why not if it does not end well."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "row.json"
        command = [sys.executable, __file__, "--row", name, "--row-file", str(file), *overrides]
        for key in ("rounds", "steps", "warmup"):
            command += [f"--{key}", str(getattr(given, key))]
        command += ["--tiny"] if given.tiny else []
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
        except subprocess.TimeoutExpired:
            return Row(name, f"not measured within the {seconds:.0f} s that were left")
        if done.returncode == BAD_CONFIG:
            raise UserError(done.stderr.strip())
        if not file.exists():
            last = (done.stderr.strip().splitlines() or ["no message"])[-1][:200]
            return Row(name, f"failed with exit code {done.returncode}: {last}")
        return Row.of(json.loads(file.read_text()))


def _attempt(name: str, given: argparse.Namespace, overrides: list[str]) -> Row:
    """The row, or a row that says why not."""
    shape, state, (micro, microbatches), variants = parts_of(name)
    options = [*COMMON, *STATES[state], *(option for variant in variants for option in OPTIONS[variant])]
    options += [f"--train.micro_batch_size={micro}", f"--train.global_batch_size={micro * microbatches}"]
    if given.tiny:
        options += [*TINY, *(("--compile.backend=aot_eager",) if "compile" in name else ())]
    try:
        return _measure(name, configure(SHAPES[shape], *options, *overrides), given, joined().device)
    except UserError as error:
        if error.exit_code == BAD_CONFIG:
            raise
        return Row(name, f"refused: {error}")
    except torch.OutOfMemoryError:
        return Row(name, "out of memory")
    except (RuntimeError, NotImplementedError, ImportError) as error:  # of the compiler, of a missing kernel
        return Row(name, f"failed: {type(error).__name__}: {str(error).splitlines()[0][:200]}")


def parts_of(name: str) -> tuple[str, str, tuple[int, int], list[str]]:
    """Return the shape, the state, microbatch size and number, and the variants of a row."""
    head, *variants = name.split(", ")
    shape, state, batch = head.split()
    micro, number = batch.split("x")
    return shape, state, (int(micro), int(number)), variants


def _measure(name: str, config: Config, given: argparse.Namespace, device: torch.device) -> Row:
    with tempfile.TemporaryDirectory() as folder:
        loop: ForgeLoop | BareLoop
        if ", bare" in name:
            loop = BareLoop(name, config, make_batches(config, 4, device), device)
            if config.compile.enabled:
                for layer in loop.model.layers.values():  # type: ignore[operator, union-attr]
                    layer.compile(backend=config.compile.backend)
        else:
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
        "of bare, compiled",
        "MFU",
        "GiB allocated (reserved)",
        "outside products and attention",
        "attention",
        "card idle",
        "first step s",
        "loss from",
        "to",
    ]
    rates = {row.name: row.tokens_per_second for row in rows}
    lines = []
    for row in rows:
        if row.tokens_per_second is None:
            lines.append([row.name, row.note, *[""] * (len(head) - 2)])
            continue
        bare = rates.get(f"{row.name.split()[0]} A 2x4, bare, compile")
        lines.append(
            [
                row.name,
                row.tokens_per_second.show(0),
                "" if bare is None else f"{row.tokens_per_second.median / bare.median:.2f}",
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
        "A": "all-bfloat16 state",
        "B": "float32 parameters and gradients, bfloat16 moments",
        "rounds": given.rounds,
        "steps per round": given.steps,
        "warm-up steps": given.warmup + 1,
    }


def _parser() -> argparse.ArgumentParser:
    made = parser(__doc__, rounds=3, steps=2, warmup=2)
    end = "what has not ended then is cut off (%(default)s)"
    made.add_argument("--minutes", type=float, default=8.0, metavar="M", help=end)
    made.add_argument("--only", default="", metavar="TEXT", help="rows whose name contains this (all)")
    made.add_argument(
        "--row", default="", metavar="NAME", help="measure this one in this process, for --row-file"
    )
    made.add_argument("--row-file", type=Path, metavar="FILE", help="where the row of --row goes, as JSON")
    return made


if __name__ == "__main__":
    sys.exit(main())
