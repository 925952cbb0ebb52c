import pytest
import torch

from forge.observe.memory_report import MemoryReport
from forge.shard import Box, Shard
from tests.support.harness import run_ranks

CPU = torch.device("cpu")
MIB = 2**20


def shard(elements: int) -> Shard:
    parameter = torch.zeros(elements)
    return Shard("w", parameter.shape, (Box((0,), (elements,)),), parameter)


def state(elements: int):
    one = shard(elements)
    return {"parameters": 4 * elements, "gradients": 4 * elements, "buckets": 0}, [
        (slot, one, torch.zeros(elements)) for slot in ("exp_avg", "exp_avg_sq")
    ]


def test_state_is_counted_in_bytes_of_this_rank() -> None:
    report = MemoryReport(CPU)
    report.count_state(*state(1000))
    assert report.bytes == {"parameters": 4000, "gradients": 4000, "optimizer": 8000}
    assert report.per_parameter(500) == (
        "32.00 bytes per parameter on this rank: parameters 8.00, gradients 8.00, optimizer 16.00"
    )


def _first_steps(rank: int, world: int) -> tuple[int, list, str]:
    """Return activation bytes, the report and the table, after steps whose first one takes 768 MiB."""
    reported: list = []
    report = MemoryReport(CPU, lambda kind, **fields: reported.append((kind, fields)))
    report.count_state(*state(1000))
    idle = torch.ones(2 * 2**30 // 8, dtype=torch.uint8)
    report.before_step(5)
    step = torch.ones(3 * 2**30 // 4, dtype=torch.uint8)
    report.after_step(5)
    del idle, step
    report.before_step(6)
    report.after_step(6)
    return report.bytes["activations"], reported, report.table()


def test_activations_are_the_first_steps_increase_and_are_reported_once() -> None:
    # In its own process: a process's peak never falls, and the tests' peak may exceed this allocation.
    ((activations, reported, table),) = run_ranks(_first_steps, 1)
    assert activations == pytest.approx(768 * MIB, rel=0.2)
    [(kind, fields)] = reported
    assert kind == "memory" and fields["optimizer_bytes"] == 8000 and fields["activations_bytes"] > 0
    assert "activations" in table and "growth of the process" in table
