"""Concurrency on a CUDA GPU: NCCL collectives on their own stream, with one rank."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from forge.checkpoint.store import Stager
from forge.parallel.engines.buffered.buffer import AsyncCollectives, gather_parts, sum_to_parts
from forge.runtime import compat
from forge.runtime.world import World, join
from forge.shard import Shard
from tests.support.buffers import SMALL, engine_config, plain_steps, with_collectives

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda", 0)
LONG = 1_000_000_000  # cycles, about half a second


@pytest.fixture(scope="module")
def group() -> Iterator[dist.ProcessGroup]:
    join(World(rank=0, size=1, local_rank=0, launcher="python"))
    yield dist.distributed_c10d._get_default_group()
    dist.destroy_process_group()


def test_gpu_tensors_travel_over_nccl_and_others_over_gloo(group: dist.ProcessGroup) -> None:
    assert (
        group._get_backend(CUDA).name() == "nccl" and group._get_backend(torch.device("cpu")).name() == "gloo"
    )
    dist.all_reduce(torch.ones(3, device=CUDA, dtype=torch.float64))
    dist.all_reduce(torch.ones(3, dtype=torch.float64))
    sent: list[object] = [{"a": 1}]
    dist.broadcast_object_list(sent, src=0)
    dist.barrier()


def test_timeouts_are_raised_for_both(group: dist.ProcessGroup) -> None:
    compat.raise_timeouts(7200)
    for device in (CUDA, torch.device("cpu")):
        assert group._get_backend(device).options._timeout == timedelta(seconds=7200)  # type: ignore[attr-defined]


def test_the_flight_recorder_has_seen_a_collective(group: dist.ProcessGroup) -> None:
    dist.all_reduce(torch.ones(3, device=CUDA))
    torch.cuda.synchronize()
    record = compat.flight_record()
    assert record is not None and b"all_reduce" in record


@pytest.mark.parametrize("symmetric", [False, True])
def test_side_stream_collectives_read_finished_results_and_are_waited_for(
    group: dist.ProcessGroup, symmetric: bool
) -> None:
    if symmetric and not group._get_backend(CUDA).supports_tensor_alloc(CUDA):  # type: ignore[attr-defined]
        pytest.skip("this GPU has no multicast")
    stream = compat.side_stream(CUDA)
    with compat.communication_memory(CUDA, [group], symmetric=symmetric):
        whole = torch.zeros(1 << 20, device=CUDA)
    torch.cuda._sleep(LONG)
    whole.fill_(3.0)  # runs after the wait, and the collective runs after it
    summed = AsyncCollectives(sum_to_parts(whole, [group], [group]), stream)
    gathered = AsyncCollectives(gather_parts(whole, [group]), stream)
    assert not torch.cuda.current_stream().query(), "launching must not wait"
    summed.finish()
    gathered.finish()
    assert (whole + 1).sum().item() == 4.0 * whole.numel()


@pytest.mark.parametrize("engine", ["ddp", "zero1", "zero2"])
def test_an_engine_with_nccl_collectives_computes_the_same_as_without(
    group: dist.ProcessGroup, engine: str
) -> None:
    text = engine_config(engine, SMALL, micro=4)
    sent, alone = with_collectives(CUDA, text), plain_steps(CUDA, text)
    assert all(
        torch.allclose(mine, other, rtol=0, atol=1e-9) for mine, other in zip(sent, alone, strict=True)
    )


def test_a_staged_copy_is_complete_when_training_continues() -> None:
    values = torch.zeros(1 << 22, device=CUDA)
    torch.cuda._sleep(LONG)
    values.fill_(5.0)
    staged = Stager().stage({"model.a": (Shard.whole("a", values), values)})
    values.zero_()
    ((_, piece),) = staged["model.a"]._pieces.items()
    assert piece.is_pinned() and bool((piece == 5.0).all())
