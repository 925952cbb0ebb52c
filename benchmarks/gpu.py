"""One GPU in ten minutes: the tests marked `gpu`, then 1B and 8B Llama-3 shapes and a mixture of experts, at 4096 tokens.

    python benchmarks/gpu.py                       the tests, then as many rows as fit into --minutes
    python benchmarks/gpu.py --only "8b B 1x8"     rows with this text in their name, without the tests; may be repeated
    python benchmarks/gpu.py --hardware h100       plan the memory of each row for an H100; measure nothing

    A     parameters, gradients and both moments in bfloat16, as in most published speeds
    B     float32 parameters and gradients, bfloat16 moments, bfloat16 products, as in a real run
    1x8   8 microbatches of 1 sequence per step
    a3b   8 of the 48 layers of Qwen3 30B-A3B: 128 experts, 8 of them for each token
    bare  a plain PyTorch loop with equal model, microbatches and state
    hf    transformers' Llama in the bare loop

The script first plans each row, and skips the row if its memory does not fit. Each row runs in its own process, so a crash
costs one row. A row trains a fresh model on learnable data. If the loss does not fall, the script refuses the row. After
each row, the script prints the table, and writes it to benchmarks/results/ with the results of the tests.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # works from a clone, installed or not

import torch

from benchmarks.gpu_tests import run_tests, summary
from benchmarks.kernels import largest_other, shares, times_of
from benchmarks.loops import BareLoop, ForgeLoop, LlamaLoop, configure, joined, known_peak, make_batches
from benchmarks.measure import (
    Spread,
    environment,
    markdown,
    parser,
    require_learning,
    take_turns,
    write_results,
)
from forge.config import Config, check_world
from forge.model import flops_per_token
from forge.observe.hardware import GIB
from forge.parallel.build import build_meta_model
from forge.runtime.errors import BAD_CONFIG, UserError
from forge.tools.plan.hardware import Hardware, Link, card_of, find_hardware
from forge.tools.plan.plan import make_plan
from scripts.options import exit_code_of

SHAPES: dict[str, tuple[str, ...]] = {
    "8b": ("7b.toml", "--optimizer.lr=1e-5"),  # at 1e-4 and more its loss rises in the first steps
    "1b": ("1b.toml",),
    "a3b": ("qwen3-30b-a3b.toml", "--model.n_layers=8", "--parallel.ep=1"),
}
STATES = {
    "A": ("--precision.storage=bfloat16", "--precision.reduce=bfloat16", "--optimizer.moment_dtype=bfloat16"),
    "B": ("--precision.storage=float32", "--precision.reduce=float32", "--optimizer.moment_dtype=bfloat16"),
}
COMPILE = ("--compile.enabled=true", "--compile.loss=true")
OPTIONS = {
    "bare": (),
    "hf": (),
    "eager": (),
    "compile": COMPILE,
    "compiled update": ("--compile.optimizer=true",),
    "AC full": ("--activation_checkpoint.mode=full",),
    "AC selective": ("--activation_checkpoint.mode=selective",),
    "AC offload": ("--activation_checkpoint.mode=offload",),
    # FSDP2 then holds the gathered parameters of one unit at a time.
    "reshard": ("--parallel.reshard_after_forward=always",),
    "float8 rowwise": ("--precision.float8=rowwise",),
    "float8 tensorwise": ("--precision.float8=tensorwise",),
}
# Variants measured in a plain PyTorch loop instead of forge's.
BARE = {"bare": BareLoop, "hf": LlamaLoop}
# In the order of measurement. If time runs out, the last rows are missing. Rows that fit into 80 GB come first.
ROWS = (
    "1b B 2x4, compile",
    "1b A 2x4, compile",
    "1b A 2x4, compile, compiled update",
    "1b A 2x4, bare, compile",
    "1b A 2x4, hf, compile",
    "1b B 2x4, compile, float8 rowwise",
    "1b B 2x4, compile, compiled update",
    "8b A 2x4, compile, AC full, reshard",
    "8b A 2x4, compile, AC full, reshard, float8 rowwise",
    "8b A 2x4, compile, AC full, reshard, compiled update",
    "8b A 2x4, eager, AC full, reshard",
    "a3b B 2x4, compile",
    "a3b B 2x4, compile, compiled update",
    "a3b B 2x4, eager",
    "8b B 1x8, compile, AC full",
    "8b B 1x8, compile",
    "8b B 1x8, compile, float8 rowwise",
    "8b A 2x4, compile",
    "8b A 2x4, bare, compile",
    "8b B 1x8, compile, compiled update",
    "8b B 2x4, compile, AC selective",
    "8b B 2x4, compile, AC offload",
    "8b B 1x8, eager",
    "8b B 1x8, compile, float8 tensorwise",
    "1b B 2x4, eager",
)
# Bytes of a logit in a bare loop's backward: log-probability and gradient in float32, and four of copies. forge's loss
# works in chunks.
BARE_LOGIT = 12
# Each row sets compilation and recomputation. This overrides the config's choice for its GPUs.
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
    "--model.head_dim=16",
    "--model.ffn_dim=128",
    "--model.vocab_size=128",
    "--train.seq_len=64",
    "--optimizer.lr=1e-2",
)
TINY_EXPERTS = ("--model.moe.n_experts=4", "--model.moe.top_k=2", "--model.moe.expert_dim=64")


@dataclass(frozen=True)
class Row:
    """One row of the table. note: why the measurement is missing. launches: kernels of one step."""

    name: str
    note: str = ""
    tokens_per_second: Spread | None = None
    mfu: float | None = None
    allocated_gib: float = 0.0
    reserved_gib: float = 0.0
    outside: float = 0.0  # share of kernel time outside matrix products and attention
    attention: float = 0.0
    idle: float | None = None  # share of a step without a running kernel
    launches: int | None = None
    first_step_s: float = 0.0
    first_loss: float = 0.0
    last_loss: float = 0.0
    largest_outside: tuple[tuple[str, float], ...] = ()
    planned_gib: float | None = None
    planned_tokens_per_second: float | None = None

    @staticmethod
    def of(fields: dict[str, Any]) -> Row:
        """Return the row with these fields, read from the JSON of another process."""
        rate = fields["tokens_per_second"]
        return Row(**fields | {"tokens_per_second": rate and Spread(**rate)})


def main(arguments: list[str] | None = None) -> int:
    """Measure, write the results and return the exit code."""
    given, overrides = _parser().parse_known_args(arguments)
    return exit_code_of(lambda: measure(given, overrides))


def measure(given: argparse.Namespace, overrides: list[str]) -> list[Row]:
    """Run the tests, then row after row until the time is up; print and write the table after each row."""
    if not torch.cuda.is_available() and not (given.tiny or given.hardware):
        raise UserError(
            "benchmarks/gpu.py needs a GPU; --hardware NAME plans its rows, --tiny runs them on a CPU"
        )
    if given.row:
        given.row_file.write_text(json.dumps(vars(_attempt(given.row, given, overrides)), default=vars))
        return []
    for text in given.only:
        if not any(text in name for name in ROWS):
            raise UserError(f"--only {text}: no row's name contains that; the rows are {'; '.join(ROWS)}")
    names = [name for name in ROWS if not given.only or any(_chooses(text, name) for text in given.only)]
    if given.hardware:
        hardware = find_hardware(given.hardware)
        rows = [Row(name, plan_of(name, given, overrides, hardware).show()) for name in names]
        print(markdown(["model, state, variant", "plan"], [[row.name, row.note] for row in rows]))
        return rows
    began = time.monotonic()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    about = environment(device) | {"settings": _settings(given, device)}
    results: dict[str, Any] = {}
    # A plan takes seconds of one core, so plans are made in parallel with the tests and earlier rows.
    hardware, planner = this_gpu(), ThreadPoolExecutor(1)
    plans = {name: planner.submit(plan_of, name, given, overrides, hardware) for name in names if hardware}
    if not (given.tiny or given.only):
        results["tests"] = run_tests(30 * given.minutes)
        print(summary(results["tests"]), flush=True)
    rows = []
    for name in names:
        left = 60 * given.minutes - (time.monotonic() - began)
        if left < (1 if given.tiny else 30):
            rows.append(Row(name, "not run: no time left"))
        else:
            print(f"{name} ...", file=sys.stderr, flush=True)
            plan = plans[name].result() if hardware else None
            if plan and not plan.fits:
                rows.append(Row(name, f"skipped: {plan.show()}"))
            else:
                row = _in_a_process(name, given, overrides, left)
                rows.append(row if plan is None else _beside(row, plan))
        results["rows"] = [vars(row) for row in rows]
        path = write_results("gpu", given.output, about, results, _table(rows))
        print(_table(rows[-1:]).splitlines()[-1], flush=True)
    planner.shutdown(cancel_futures=True)
    print(_table(rows))
    if "tests" in results:
        print(summary(results["tests"]))
    print(f"\nwritten to {path}", file=sys.stderr)
    return rows


def _chooses(text: str, name: str) -> bool:
    """Return whether `--only text` chooses row `name`. A row's full name chooses this row, other text each name with it."""
    return text == name if text in ROWS else text in name


@dataclass(frozen=True)
class RowPlan:
    """The plan of one row. needed: bytes at the peak. available: bytes of the GPU. kinds: bytes at the peak by kind.

    tokens_per_second: planned speed; None for a bare loop, because forge plans only its own step.
    """

    needed: int
    available: int
    kinds: dict[str, int]
    tokens_per_second: float | None

    @property
    def fits(self) -> bool:
        return self.needed <= self.available

    def show(self) -> str:
        parts = ", ".join(f"{name} {size / GIB:.1f}" for name, size in self.kinds.items() if size)
        outcome = "fits" if self.fits else "does not fit"
        return f"{outcome}: {self.needed / GIB:.1f} of {self.available / GIB:.1f} GiB ({parts})"


def plan_of(name: str, given: argparse.Namespace, overrides: list[str], hardware: Hardware) -> RowPlan:
    """Plan the memory and the speed of a row."""
    bare = bare_loop(name) is not None
    # Plan a bare loop with "reshard", because it has only one copy of its weights.
    config = config_of(name + ", reshard" if bare else name, given, overrides)
    plan = make_plan(config, check_world(config, 1), hardware)
    needed = plan.worst.needed
    kinds = {kind: size for kind, size in plan.worst.memory.items() if kind != "peak"}
    if bare:
        logits = config.train.micro_batch_size * config.train.seq_len * config.model.vocab_size * BARE_LOGIT
        needed, kinds = needed + logits, kinds | {"logits": logits}
    speed = None if bare or plan.speed is None else plan.speed.tokens_per_second
    return RowPlan(needed, hardware.memory_bytes, kinds, speed)


def _beside(row: Row, plan: RowPlan) -> Row:
    return replace(row, planned_gib=plan.needed / GIB, planned_tokens_per_second=plan.tokens_per_second)


def this_gpu() -> Hardware | None:
    """Return the hardware of this process's GPU, with the memory reported by CUDA; None without a GPU."""
    if not torch.cuda.is_available():
        return None
    name, memory = torch.cuda.get_device_name(), torch.cuda.get_device_properties(0).total_memory / GIB
    link = Link(gb_per_s=1, latency_us=0)  # no plan of one rank depends on it
    known = card_of(name) or Hardware(
        card=name, memory_gib=memory, memory_gb_per_s=1, cards_per_node=1, node=link, cluster=link
    )
    return known.model_copy(update={"memory_gib": memory})


def _in_a_process(name: str, given: argparse.Namespace, overrides: list[str], seconds: float) -> Row:
    """Measure a row in a new process. Return the row; if the process fails, its note has the reason."""
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
    """Measure a row in this process. Return the row; if measuring fails, its note has the reason."""
    try:
        return _measure(name, config_of(name, given, overrides), given, joined().device)
    except UserError as error:
        if error.exit_code == BAD_CONFIG:
            raise
        return Row(name, f"refused: {error}")
    except torch.OutOfMemoryError:
        return Row(name, "out of memory")
    except (
        RuntimeError,
        NotImplementedError,
        ImportError,
    ) as error:  # e.g. the compiler fails, or a kernel is missing
        return Row(name, f"failed: {type(error).__name__}: {str(error).splitlines()[0][:200]}")


def config_of(name: str, given: argparse.Namespace, overrides: list[str]) -> Config:
    """Return the config of row `name`; later overrides win."""
    shape, state, (micro, microbatches), variants = parts_of(name)
    file, *sizes = SHAPES[shape]
    options = [
        *COMMON,
        *sizes,
        *STATES[state],
        *(option for variant in variants for option in OPTIONS[variant]),
    ]
    options += [f"--train.micro_batch_size={micro}", f"--train.global_batch_size={micro * microbatches}"]
    if given.tiny:
        options += [*TINY, *(("--compile.backend=aot_eager",) if "compile" in name else ())]
        options += TINY_EXPERTS if shape == "a3b" else ()
    return configure(file, *options, *overrides)


def bare_loop(name: str) -> type[BareLoop] | None:
    """Return the class of the row's bare loop; None for a row of forge's loop."""
    return next((BARE[variant] for variant in parts_of(name)[3] if variant in BARE), None)


def parts_of(name: str) -> tuple[str, str, tuple[int, int], list[str]]:
    """Return the shape, the state, (microbatch size, number of microbatches), and the variants of a row."""
    head, *variants = name.split(", ")
    shape, state, batch = head.split()
    micro, number = batch.split("x")
    return shape, state, (int(micro), int(number)), variants


def _measure(name: str, config: Config, given: argparse.Namespace, device: torch.device) -> Row:
    with tempfile.TemporaryDirectory() as folder:
        loop: ForgeLoop | BareLoop
        if plain := bare_loop(name):
            loop = plain(name, config, make_batches(config, 4, device), device)
            if config.compile.enabled:
                for layer in loop.layers():
                    layer.compile(backend=config.compile.backend)
        else:
            loop = ForgeLoop(name, config, Path(folder))
        try:
            began = time.perf_counter()
            loop.step()
            first = loop.losses()  # synchronizes with the device
            first_step_s = time.perf_counter() - began
            seconds = take_turns(
                [loop], rounds=given.rounds, steps=given.steps, warmup=given.warmup, device=device
            )
            times, launches = times_of(loop.step, device)
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
        launches=launches,
        # The step time is from unprofiled steps, because profiling lengthens steps but not kernels. Overlapping kernels
        # count twice, so kernel time may exceed the step time.
        idle=max(0.0, 1 - busy_s / Spread.of(seconds[name]).median),
    )


def _table(rows: list[Row]) -> str:
    head = [
        "model, state, variant",
        "tokens/s",
        "planned",
        "of bare, compiled",
        "MFU",
        "GiB allocated (reserved)",
        "planned",
        "outside products and attention",
        "attention",
        "GPU idle",
        "kernels per step",
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
                "" if row.planned_tokens_per_second is None else f"{row.planned_tokens_per_second:,.0f}",
                "" if bare is None else f"{row.tokens_per_second.median / bare.median:.2f}",
                "peak not known" if row.mfu is None else f"{row.mfu:.3f}",
                f"{row.allocated_gib:.1f} ({row.reserved_gib:.1f})",
                "" if row.planned_gib is None else f"{row.planned_gib:.1f}",
                f"{row.outside:.1%}",
                f"{row.attention:.1%}",
                "" if row.idle is None else f"{row.idle:.1%}",
                "" if row.launches is None else f"{row.launches:,}",
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
    made.add_argument("--minutes", type=float, default=10.0, metavar="M", help=end)
    made.add_argument(
        "--hardware", default="", metavar="NAME", help="only plan the rows, for this GPU (h100)"
    )
    only = "the row of this name, or rows whose name contains this (all); may be repeated"
    made.add_argument("--only", action="append", default=[], metavar="TEXT", help=only)
    made.add_argument(
        "--row", default="", metavar="NAME", help="measure this one in this process, for --row-file"
    )
    made.add_argument("--row-file", type=Path, metavar="FILE", help="where the row of --row goes, as JSON")
    return made


if __name__ == "__main__":
    sys.exit(main())
