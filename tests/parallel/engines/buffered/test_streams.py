"""The engines are correct for any delay of a CUDA side stream. Simulated on a CPU."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from benchmarks.collectives import collectives_of
from forge.parallel.engines.buffered import engine as buffered_engine
from forge.parallel.engines.buffered import reduction
from forge.parallel.engines.buffered.buffer import AsyncCollectives, TemporaryBuckets
from tests.support.buffers import (
    ENGINES,
    SMALL,
    assert_close_gradients,
    engine_config,
    gradients_of_two_steps,
    plain_steps,
    with_collectives,
)
from tests.support.harness import run_ranks
from tests.support.layouts import slow_unless


class Late:
    """Replace `AsyncCollectives` by a stream that runs nothing before a wait, and then everything in order."""

    stream: deque[Late] = deque()

    def __init__(self, operations: Iterator[Any], _stream: object):
        self._operations = operations
        self.stream.append(self)

    def advance(self) -> None:
        """Nothing to do on CUDA."""

    def finish(self) -> None:
        while self in self.stream:
            for work in self.stream.popleft()._operations:
                work.wait()


def _late(rank: int, world: int, text: str) -> list[dict[str, torch.Tensor]]:
    reduction.AsyncCollectives = buffered_engine.AsyncCollectives = Late  # type: ignore[assignment,misc]
    release = TemporaryBuckets.release

    def release_poisoned(buckets: TemporaryBuckets, bucket: torch.Tensor) -> None:
        bucket.fill_(torch.nan)  # its next user may write anything
        release(buckets, bucket)

    TemporaryBuckets.release = release_poisoned  # type: ignore[method-assign]
    return gradients_of_two_steps(rank, world, text)


REPLICAS = "dp_replicate = 2\ndp_shard = 2"


@pytest.mark.parametrize(
    ("engine", "world", "keys", "formats"),
    [
        pytest.param(
            engine,
            world,
            keys,
            formats,
            marks=slow_unless((engine, world) == ("zero2", 2) or "float64" in formats),
        )
        for engine, world, keys in [
            *((engine, 2, "") for engine in ENGINES),
            ("zero2", 4, f'{REPLICAS}\nshard_optimizer_over = "dp"'),
        ]
        for formats in [("float64",) * 3, ("float32", "bfloat16", "bfloat16")]
    ],
)
def test_a_late_side_stream_changes_no_bit(engine: str, world: int, keys: str, formats) -> None:
    text = engine_config(engine, keys + SMALL, micro=1, formats=formats)
    for mine, other in zip(
        run_ranks(_late, world, text)[0], run_ranks(gradients_of_two_steps, world, text)[0], strict=True
    ):
        assert_close_gradients(mine, other, 0.0)


def _both_ways(rank: int, world: int, text: str) -> tuple[dict[str, int], bool]:
    cpu, sent = torch.device("cpu"), []
    counted = collectives_of(lambda: sent.extend(with_collectives(cpu, text))).number()
    return counted, all(map(torch.equal, sent, plain_steps(cpu, text)))


@pytest.mark.parametrize("engine", ENGINES)
def test_one_process_sending_to_itself_computes_the_same(engine: str) -> None:
    text = engine_config(engine, SMALL, micro=4)
    ((counted, same),) = run_ranks(_both_ways, 1, text)
    kinds = {"all_reduce"} if engine == "ddp" else {"all_gather", "reduce_scatter", "all_reduce"}
    assert same and counted.keys() - {"broadcast"} == kinds


class Stream:
    """Record each stream's waits."""

    def __init__(self, name: str, log: list[str]):
        self.name, self.log = name, log

    def wait_stream(self, other: Stream) -> None:
        self.log.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: str) -> None:
        self.log.append(f"{self.name} waits for {event}")

    def record_event(self) -> str:
        self.log.append(f"end of {self.name}")
        return f"end of {self.name}"


def test_the_side_stream_waits_for_the_computation_and_the_computation_for_it(monkeypatch) -> None:
    log: list[str] = []
    main, side = Stream("main", log), Stream("side", log)
    current = [main]

    @contextmanager
    def on(stream: Stream) -> Iterator[None]:
        current.append(stream)
        yield
        current.pop()

    class Work:
        def wait(self) -> None:
            log.append(f"waited on {current[-1].name}")

    def operations() -> Iterator[Any]:
        log.append(f"cast on {current[-1].name}")
        yield Work()
        log.append(f"added on {current[-1].name}")
        yield Work()

    monkeypatch.setattr(torch.cuda, "current_stream", lambda: current[-1])
    monkeypatch.setattr(torch.cuda, "stream", on)
    running = AsyncCollectives(operations(), side)  # type: ignore[arg-type]
    launched = ["side waits for main", "cast on side", "waited on side", "added on side", "waited on side"]
    assert log == [*launched, "end of side"]
    running.advance()
    assert log == [*launched, "end of side"]
    running.finish()
    assert log[len(launched) + 1 :] == ["main waits for end of side"]
