#!/usr/bin/env python
"""Measure this machine for train.py --plan, and write a file for --hardware. Takes about a minute.

python scripts/measure_hardware.py --output here.toml
python train.py --config debug.toml --plan --world-size 2 --hardware here.toml

Measures matrix products and attention by size, an elementwise operator by bytes, the overhead of an operator, and an
all-reduce of two ranks. Uses a GPU if there is one, otherwise the CPU and gloo. The all-reduce over NCCL needs two GPUs.
Processes on a CPU slow each other down. To plan several ranks on a CPU, set --processes to the number of ranks.
"""

from __future__ import annotations

import json
import math
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # works from a clone, installed or not

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
import torch.nn.functional as F

from forge.observe.hardware import GIB
from forge.runtime.cores import cores
from forge.runtime.files import replace_atomically
from forge.tools.plan.node import clock_of, median_s
from scripts.options import Options, exit_code_of, local_path, positive, require_output

MeasuredRates = list[list[float]]
Action = Callable[[], object]
# Takes an action and returns the seconds of a call.
Timer = Callable[[Action], float]
Turns = Iterator[list[torch.Tensor]]
# If a call takes this many seconds, skip larger sizes. On a CPU that is slow in bfloat16, they would take minutes.
LONG = 0.3
# Seconds of calls between two readings of a GPU's clock. A reading waits for the GPU, which takes as long as a small
# operator: 19 microseconds on an H200.
READING_S = 5e-3


def main(argv: list[str]) -> int:
    """Measure, write the file and return the exit code."""
    parser = Options(description=__doc__)
    add = parser.add_argument
    add(
        "--output",
        type=local_path,
        default=Path("hardware.toml"),
        help="file to write (default: hardware.toml)",
    )
    add(
        "--threads",
        type=positive,
        default=torch.get_num_threads(),
        help="PyTorch threads per process on a CPU (default: all)",
    )
    add(
        "--processes",
        type=positive,
        default=1,
        metavar="N",
        help="number of processes that compute at the same time on a CPU (default: 1)",
    )
    add("--tiny", action="store_true", help="use toy sizes, to try the script: the rates are useless")
    given = parser.parse_args(argv)

    def work() -> None:
        require_output(given.output)
        measured = measure(given.threads, given.processes, tiny=given.tiny)
        replace_atomically(given.output, to_toml(measured).encode())
        print(f"wrote {given.output}")

    return exit_code_of(work)


def measure(threads: int, computing: int = 1, *, tiny: bool = False) -> dict[str, Any]:
    """Measure this machine and return the keys of a hardware file.

    threads: number of threads per process. computing: number of processes that compute at the same time, including this
    process. tiny: use toy sizes, which give no usable rates.
    """
    torch.set_num_threads(threads)
    card = torch.cuda.is_available()
    device = torch.device("cuda" if card else "cpu")
    largest = 64 if tiny else 8192 if card else 2048
    dtypes = (torch.bfloat16, torch.float32) if card else (torch.float32, torch.bfloat16)
    timer = _timer(device, computing)
    with _others(0 if card else computing - 1, threads):
        products = {_name(dtype): _products(device, dtype, largest, timer) for dtype in dtypes}
        attention = {_name(dtype): _attention(device, dtype, largest, timer) for dtype in dtypes}
        elementwise = _elementwise(device, timer, 1 << (16 if tiny else 30 if card else 27))
        # On a GPU, each operator hides the launch of the next.
        operator_us = 0.0 if card else _operator_us(device, timer)
    link = _link(card, 1 << (16 if tiny else 28 if card else 24))
    host_memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    memory = torch.cuda.mem_get_info()[1] if card else host_memory
    return {
        "card": torch.cuda.get_device_name() if card else "",
        "memory_gib": round(memory / GIB, 2),
        "reserved_gib": 2.0 if card else 0.0,
        "memory_gb_per_s": elementwise[-1][1],
        "memory_efficiency": 1.0,
        "host_memory_gib": round(host_memory / GIB, 2) if card else 0.0,
        "cards_per_node": max(1, torch.cuda.device_count()) if card else cores(),
        "operator_us": operator_us,
        "node": link,
        "cluster": link,
        "elementwise": elementwise,
        "products": products,
        "attention": attention,
    }


@contextmanager
def _others(count: int, threads: int) -> Iterator[None]:
    """Keep `count` other processes computing during the body."""
    context = processes.get_context("spawn")
    ready = context.Semaphore(0)
    busy = [context.Process(target=_compute, args=(threads, ready), daemon=True) for _ in range(count)]
    for process in busy:
        process.start()
    for _ in busy:
        ready.acquire()
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.join()


def _compute(threads: int, ready: Any) -> None:
    """Compute products and sums, like a training rank, until killed or orphaned. ready: released after the set-up."""
    parent = os.getppid()
    torch.set_num_threads(threads)
    a, b = (torch.randn(512, 512) for _ in range(2))
    ready.release()
    while os.getppid() == parent:
        torch.add(a @ b, b)


def _products(device: torch.device, dtype: torch.dtype, largest: int, timer: Timer) -> MeasuredRates:
    """Time the three matrix products of a linear layer in training: output, input gradient and weight gradient.

    Return [FLOPs of a product, 10^12 FLOP/s] for growing sizes.
    """
    found = []
    size = 16
    while 2 * size <= largest:
        turns = _in_turns([(4 * size, size), (2 * size, size), (4 * size, 2 * size)], device, dtype)

        def train(turns: Turns = turns) -> None:
            x, weight, grad = next(turns)
            torch.matmul(x, weight.T)
            torch.matmul(grad, weight)
            torch.matmul(grad.T, x)

        operations, seconds = 16.0 * size**3, timer(train) / 3
        found.append([operations, operations / seconds / 1e12])
        if seconds > LONG:
            break
        size *= 2
    return found


def _in_turns(shapes: list[tuple[int, ...]], device: torch.device, dtype: torch.dtype) -> Turns:
    """Return an endless cycle of lists of random tensors with these shapes.

    The cycle is long enough for a list to leave the caches before its next use, as in a training step.
    """
    size = dtype.itemsize * sum(math.prod(shape) for shape in shapes)
    number = max(1, min(64, (1 << (30 if device.type == "cuda" else 27)) // size))
    return cycle(
        [[torch.randn(*shape, device=device, dtype=dtype) for shape in shapes] for _ in range(number)]
    )


def _attention(device: torch.device, dtype: torch.dtype, largest: int, timer: Timer) -> MeasuredRates:
    """Time causal attention of 8 heads of size 64, forward and backward, for growing sequences.

    Return [FLOPs of an operator, 10^12 FLOP/s]. A call counts 7 products over half the scores: 2 in forward, 5 in backward.
    """
    found = []
    seq = 32
    while seq <= largest:
        q, k, v = (
            torch.randn(1, 8, seq, 64, device=device, dtype=dtype, requires_grad=True) for _ in range(3)
        )

        def both(q: torch.Tensor = q, k: torch.Tensor = k, v: torch.Tensor = v) -> None:
            F.scaled_dot_product_attention(q, k, v, is_causal=True).backward(v.detach())

        operations = 7 * 2.0 * 8 * 64 * seq * (seq + 1) / 2
        seconds = timer(both)
        # Forward and backward are two operators, with about half of the FLOPs each.
        found.append([operations / 2, operations / seconds / 1e12])
        if seconds > LONG:
            break
        seq *= 2
    return found


def _elementwise(device: torch.device, timer: Timer, largest: int) -> MeasuredRates:
    found = []
    size = 1 << 14
    while size <= largest:
        turns = _in_turns([(size // 12,)] * 3, device, torch.float32)

        def multiply(turns: Turns = turns) -> None:
            a, b, product = next(turns)
            torch.mul(a, b, out=product)

        found.append([float(size), size / timer(multiply) / 1e9])
        size *= 4
    return found


def _operator_us(device: torch.device, timer: Timer, number: int = 100) -> float:
    """Return the mean microseconds of an operator on eight numbers, over forward and backward of `number` operators."""
    x = torch.zeros(8, device=device, requires_grad=True)

    def chain() -> None:
        y = x
        for _ in range(number):
            y = y * 1.0
        y.sum().backward()

    return timer(chain) / (2 * number) * 1e6


def _timer(device: torch.device, processes: int) -> Timer:
    """Return a function that takes an action and returns the median seconds of a call.

    On a GPU, many calls are timed together, so that the host launches the next call while the GPU works. On a CPU, one
    process with one thread is timed by its processor time, which excludes other work on the machine. Several processes are
    timed by wall-clock time, which includes their mutual slowdown.
    """
    if device.type == "cuda":
        return lambda action: _median_of_many(action, clock_of(device))
    clock = time.process_time if processes == torch.get_num_threads() == 1 else time.perf_counter
    return lambda action: median_s(action, clock)


def _median_of_many(action: Action, clock: Callable[[], float]) -> float:
    """Return the median seconds of a call. Each reading of the clock covers about READING_S seconds of calls."""
    calls = max(1, int(READING_S / median_s(action, clock)))

    def repeated() -> None:
        for _ in range(calls):
            action()

    return median_s(repeated, clock) / calls


def _link(card: bool, size: int) -> dict[str, float]:
    """Time an all-reduce of two ranks. Return its latency in microseconds, and the link's bandwidth in one direction in GB/s.

    With a single GPU, return placeholders and print a note.
    """
    if card and torch.cuda.device_count() < 2:
        print(
            "with one GPU, the link between GPUs is not measured; write its numbers into [node] and [cluster]",
            file=sys.stderr,
        )
        return {"gb_per_s": 50.0, "latency_us": 20.0}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = processes.get_context("spawn")
    answer = context.SimpleQueue()
    # On a CPU, use two sizes as in real steps. Threads wake late for such sizes, but not for a few bytes.
    sizes = (32 if card else size // 16, size)
    processes.spawn(_rank, (port, card, sizes, answer), nprocs=2)
    few, many = answer.get()
    # In a ring of two ranks, every byte moves once in each direction.
    per_byte = max(many - few, 1e-9) / (sizes[1] - sizes[0])
    return {"gb_per_s": 1e-9 / per_byte, "latency_us": max(few - sizes[0] * per_byte, 0.0) * 1e6}


def _rank(rank: int, port: int, card: bool, sizes: tuple[int, ...], answer: Any) -> None:
    if card:
        torch.cuda.set_device(rank)
    torch.set_num_threads(1)
    device = torch.device("cuda", rank) if card else torch.device("cpu")
    store = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("nccl" if card else "gloo", init_method=store, rank=rank, world_size=2)
    found = [_together(torch.zeros(size // 4, device=device), device) for size in sizes]
    if rank == 0:
        answer.put(found)
    dist.barrier()
    dist.destroy_process_group()


def _together(tensor: torch.Tensor, device: torch.device, times: int = 40) -> float:
    """Return the mean seconds of an all-reduce of `tensor`, without the first eighth of the `times` calls. Collective.

    On a CPU, each rank computes a product before each call, as in a step.
    """
    found = []
    factor = torch.randn(384, 384)
    for _ in range(times):
        if device.type == "cpu":
            torch.matmul(factor, factor)
        start = time.perf_counter()
        dist.all_reduce(tensor)
        if device.type == "cuda":
            torch.cuda.synchronize()
        found.append(time.perf_counter() - start)
    return statistics.mean(found[times // 8 :])


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def to_toml(measured: dict[str, Any]) -> str:
    """Return the hardware file as TOML: keys, then tables."""
    head = f"# Measured on {time.strftime('%Y-%m-%d')} with PyTorch {torch.__version__}."
    lines = [
        head,
        *(f"{key} = {_literal(value)}" for key, value in measured.items() if not isinstance(value, dict)),
    ]
    for key, table in measured.items():
        if isinstance(table, dict):
            lines += ["", f"[{key}]", *(f"{name} = {_literal(value)}" for name, value in table.items())]
    return "\n".join(lines) + "\n"


def _literal(value: Any) -> str:
    if isinstance(value, list):
        return json.dumps([[float(f"{number:.4g}") for number in pair] for pair in value])
    return json.dumps(float(f"{value:.4g}") if isinstance(value, float) else value)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
