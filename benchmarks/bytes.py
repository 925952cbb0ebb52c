"""Bytes read and written by each operator of an optimizer step, per model parameter, without forward and backward.

    python benchmarks/bytes.py                                    every engine and precision on one process and two; a minute
    python benchmarks/bytes.py --worlds 1 --only bfloat16

A dispatch mode sees every operator of a real step with two microbatches. It counts each tensor read or written by the
operator once. A compiled function counts as one operator. The function is traced, not compiled. The script times nothing,
because the small model stays in a CPU's caches. Prints the table and writes it, with date, versions and settings, to
benchmarks/results/. Other --section.key=value options override the config.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # works from a clone, installed or not

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from benchmarks.loops import TINY, configure
from benchmarks.measure import environment, markdown, parser, publish
from benchmarks.ranks import Row, rows_of_ranks
from forge.batch import Batch
from forge.config import check_world
from forge.data.build import build_dataset
from forge.data.loader import Loader
from forge.model import parameter_counts
from forge.optim import build_optimizer
from forge.optim.compiled import CompiledAdamW
from forge.parallel.build import build_meta_model, build_parallel_model
from forge.parallel.mesh import make_meshes
from forge.parallel.step.gradients import report_gradients
from forge.train.step import apply_gradients, compute_gradients
from scripts.options import exit_code_of, positive

PRECISIONS = {
    "float32": ("--precision.compute=float32",),
    "float32 masters, bfloat16 moments": (
        "--precision.compute=bfloat16",
        "--optimizer.moment_dtype=bfloat16",
    ),
    "all bfloat16": (
        "--precision.compute=bfloat16",
        "--precision.storage=bfloat16",
        "--precision.reduce=bfloat16",
        "--optimizer.moment_dtype=bfloat16",
    ),
}
# Few tokens, because the counts do not depend on their number, and many CPUs multiply slowly in bfloat16.
SHAPE = (
    "--model.n_layers=1",
    "--model.dim=512",
    "--model.ffn_dim=1408",
    "--model.vocab_size=1024",
    "--train.seq_len=16",
    "--train.micro_batch_size=1",
)
ENGINES = ("fsdp2", "zero1", "zero2", "ddp")
PARTS = ("zeroing", "first microbatch", "each other", "norm", "clip", "update", "masters to compute")
FREE = ("empty", "empty_like", "empty_strided", "detach", "_local_scalar_dense")
OVERWRITES = ("copy_", "zero_", "fill_", "_foreach_copy_", "_foreach_zero_")
COPIES = ("_to_copy", "copy_", "_foreach_copy_", "all_gather_copy_in", "cat", "split_with_sizes_copy")
# The table shows these two parts, but leaves them out of the sum.
ACCUMULATION = ("first microbatch", "each other")


class Traffic(TorchDispatchMode):
    """A dispatch mode that counts bytes read and written, by `part` of the step and by operator, without collectives.

    masters: storages of the float32 parameters that fsdp2 gathers.

    gradients: storages of the gradients during forward and backward; otherwise None. If set, only two kinds of operators
    count: copies of `masters`, and writes to the gradients. The cast of the written values counts with the write.
    """

    def __init__(self, masters: set[int]) -> None:
        super().__init__()
        self.operators: Counter[tuple[str, str]] = Counter()
        self.part = ""
        self.gradients: set[int] | None = None
        self._masters = masters
        self._casts: dict[int, tuple[str, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._overloadpacket.__name__
        if func.is_view or name in FREE or func.namespace in ("c10d", "_c10d_functional"):
            return result
        read, written, fresh = accesses(func, args, kwargs or {}, result)
        nbytes = sum(t.nbytes for t in [*read, *written, *fresh])
        if self.gradients is None:
            self.operators[self.part, name] += nbytes
            return result
        for t in fresh:
            self._casts.pop(_storage(t), None)
        if any(_storage(t) in self.gradients for t in written):
            self.operators[self.part, name] += nbytes
            for cast in (self._casts.pop(_storage(t), None) for t in read):
                if cast is not None:
                    self.operators[self.part, cast[0]] += cast[1]
        elif name in COPIES and self.part == PARTS[1] and any(_storage(t) in self._masters for t in read):
            self.operators[PARTS[-1], name] += nbytes
        elif name == "_to_copy":
            self._casts[_storage(fresh[0])] = name, nbytes
        return result

    def count_as(self, part: str, of: Any, method: str) -> None:
        """Wrap `of.method`. After a call begins, all further operators count as `part` of the step."""
        call = getattr(of, method)

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.part = part
            return call(*args, **kwargs)

        setattr(of, method, counted)

    def totals(self) -> dict[str, int]:
        return {part: sum(n for (of, _), n in self.operators.items() if of == part) for part in PARTS}


def accesses(
    func: Any, args: Any, kwargs: dict[str, Any], result: Any
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Return the tensors that an operator reads, the tensors that it writes in place, and its new results."""
    name = func._overloadpacket.__name__
    arguments = func._schema.arguments
    given = [
        *zip(arguments, args, strict=False),
        *((a, kwargs[a.name]) for a in arguments if a.name in kwargs),
    ]
    only_reads = {"grads"} if name == "_fused_adamw_" and kwargs.get("grad_scale") is None else set()
    # An overwritten tensor is not read.
    overwrites = name in OVERWRITES or func._overloadname.endswith("out")
    read, written = [], []
    for argument, value in given:
        writes = (
            argument.alias_info is not None
            and argument.alias_info.is_write
            and argument.name not in only_reads
        )
        written += tensors_of(value) if writes else []
        read += [] if writes and overwrites else tensors_of(value)
    return read, written, [t for t in tensors_of(result) if all(t is not old for old in written)]


def tensors_of(value: Any) -> list[Tensor]:
    """Return the tensors in a tree of lists, tuples and dicts."""
    return [t for t in tree_leaves(value) if isinstance(t, Tensor)]


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def main(arguments: list[str] | None = None) -> int:
    """Measure, write the results and return the exit code."""
    given, overrides = _parser().parse_known_args(arguments)
    return exit_code_of(lambda: measure(given, overrides))


def measure(given: argparse.Namespace, overrides: list[str]) -> None:
    """Count the bytes of every row; print and write the table."""
    about = environment(torch.device("cpu"))
    keys = [*(TINY if given.tiny else SHAPE), *overrides]
    config = configure(given.config, *keys)
    about["settings"] = {
        "config": Path(given.config).stem,
        "device": "cpu",
        "dim": config.model.dim,
        "layers": config.model.n_layers,
        "vocab": config.model.vocab_size,
        "microbatches": 2,
    }
    rows = [row for world in given.worlds for row in rows_of_ranks(world, _rows, given, keys)]
    publish("bytes", given.output, about, {"rows": rows}, _table(rows))


def _rows(device: torch.device, given: argparse.Namespace, overrides: list[str]) -> list[Row]:
    world, rows = dist.get_world_size(), []
    # In one process, zero1, zero2 and ddp use the same memory, so only fsdp2 and zero1 are measured.
    for engine in ENGINES if world > 1 else ENGINES[:2]:
        for precision, options in PRECISIONS.items():
            for compiled in (False, True):
                name = f"{engine}, {precision}{', compiled' if compiled else ''}"
                if given.only in name:
                    keys = (*options, f"--parallel.data_parallel={engine}", *overrides)
                    keys += ("--compile.optimizer=true", "--compile.backend=eager") if compiled else ()
                    rows.append({"ranks": world, "name": name} | traffic_of(given.config, keys, device))
    return rows


def traffic_of(config_name: str, keys: tuple[str, ...], device: torch.device) -> Row:
    """Return the bytes that this rank reads and writes per model parameter, in one step with two microbatches.

    The key "bytes" has the bytes by part of the step, the key "operators" by part and operator.
    """
    config = configure(config_name, *keys)
    ranks = dist.get_world_size()
    meshes = make_meshes(check_world(config, ranks), device.type)
    model = build_parallel_model(config, meshes, device)
    compiled = config.compile if config.compile.optimizer else None
    optimizer = build_optimizer(model.shards, config.optimizer, meshes.stage, compiled, model.copies)
    batches = Loader(
        build_dataset(config),
        global_batch_size=2 * ranks * config.train.micro_batch_size,
        rank=meshes.data_rank,
        ranks=meshes.data_ranks,
        device=device,
    )
    traffic = Traffic({_storage(shard.data) for shard in model.shards})
    if isinstance(optimizer, CompiledAdamW):
        _count_compiled(optimizer, traffic)
    traffic.count_as("update", optimizer, "step")
    traffic.count_as("masters to compute", model, "after_update")
    traffic.count_as("zeroing", model, "zero_gradients")
    (engine,), begin = model._engines, model._engines[0].begin_microbatch
    places = {_storage(buffer.gradients) for buffer in getattr(engine, "buffers", ())}

    def begin_counted(*, last: bool) -> None:
        begin(last=last)
        traffic.part = ACCUMULATION[last]

    def step(watch: Callable[..., Any]) -> None:
        batch: Batch = next(batches)
        with watch(ACCUMULATION[0], places):
            sums = compute_gradients(model, batch)
        with watch("norm"):
            report = report_gradients(model.shards, sums.objective, stop=False)
        with watch("clip"):
            apply_gradients(model, optimizer, report, config.optimizer.lr, config.train.grad_clip_norm)

    @contextmanager
    def watching(part: str, gradients: set[int] | None = None) -> Iterator[None]:
        traffic.part, traffic.gradients = part, gradients
        with traffic:
            yield

    engine.begin_microbatch = begin_counted  # type: ignore[method-assign]
    step(lambda *_: nullcontext())  # kernels are compiled
    traffic.operators.clear()
    step(watching)
    batches.close()
    numel = parameter_counts(build_meta_model(config)).total
    operators = {
        f"{part}: {name}": nbytes / numel for (part, name), nbytes in traffic.operators.most_common()
    }
    return {"bytes": {part: n / numel for part, n in traffic.totals().items()}, "operators": operators}


def _count_compiled(optimizer: CompiledAdamW, traffic: Traffic) -> None:
    """Make `traffic` count each compiled kernel as one read of its operands and one write of its results."""
    update, rounding = optimizer._kernel, optimizer.moments.rounding

    def add(name: str, *tensors: Tensor) -> None:
        traffic.operators[traffic.part, name] += sum(t.nbytes for t in tensors)

    def counted(*operands: Any) -> None:
        with _disable_current_modes():
            update(*operands)
        master, grad, first, second, rounded, noise, numbers = operands
        changed = [master, first, second]
        add("compiled", *changed, grad, *changed, *noise, numbers, *(() if rounded is None else (rounded,)))

    optimizer._kernel = counted
    if rounding is not None:
        draw = rounding.bits

        def counted_bits(keys: Tensor, updates: Tensor) -> Tensor:
            with _disable_current_modes():
                bits = draw(keys, updates)
            add("compiled noise", keys, updates, bits)
            return bits

        rounding.bits = counted_bits


def _table(rows: list[Row]) -> str:
    head = ["ranks", "engine, precision", *PARTS, "sum without accumulation"]
    lines = []
    for row in rows:
        found = row["bytes"]
        whole = sum(n for part, n in found.items() if part not in ACCUMULATION)
        lines.append(
            [str(row["ranks"]), row["name"], *(f"{found[part]:.1f}" for part in PARTS), f"{whole:.1f}"]
        )
    return (
        f"{markdown(head, lines)}\n\nBytes that one rank reads and writes, per parameter of the whole model. "
        "Stochastic rounding draws random bits for each row and column. This reads and writes 12 bytes for each if "
        "compiled, a few hundred if not; in large matrices that is negligible. "
        "Gradient accumulation is counted only in gradient buffers; an engine without them shows 0."
    )


def _parser() -> argparse.ArgumentParser:
    made = parser(__doc__, config="the model and its precision")
    made.add_argument(
        "--worlds", type=positive, nargs="+", default=[1, 2], metavar="N", help="numbers of ranks (1 2)"
    )
    made.add_argument("--only", default="", metavar="TEXT", help="rows whose name contains this (all)")
    return made


if __name__ == "__main__":
    sys.exit(main())
