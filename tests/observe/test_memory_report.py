import pytest
import torch

from forge.config import check_world
from forge.errors import UserError
from forge.observe.memory_report import MemoryReport, advice, ran_out_of_memory
from forge.shard import Box, Shard
from tests.support.configs import load, tiny
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
    """Bytes of activations, what was reported, and the table, after steps of which the first takes 768 MiB."""
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


def test_activations_are_what_the_first_step_adds_and_are_reported_once() -> None:
    # In a process of its own: the peak of one never falls, and that of the tests' may be above what is taken here.
    ((activations, reported, table),) = run_ranks(_first_steps, 1)
    assert activations == pytest.approx(768 * MIB, rel=0.2)
    [(kind, fields)] = reported
    assert kind == "memory" and fields["optimizer_bytes"] == 8000 and fields["activations_bytes"] > 0
    assert "activations" in table and "growth of the process" in table


OUT_OF_MEMORY = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: you tried"),
    MemoryError(),
]


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=lambda error: type(error).__name__)
def test_running_out_becomes_a_user_error_with_exit_code_1(tmp_path, caplog, error) -> None:
    assert ran_out_of_memory(error)
    config = load(tmp_path, "--train.global_batch_size=8", "--train.micro_batch_size=4")
    report = MemoryReport(CPU)
    with pytest.raises(UserError) as raised, report.explaining(config, check_world(config, 1)):
        raise error
    assert raised.value.exit_code == 1
    assert "before the first step" in caplog.text and "parallel.dp_shard = 2" in caplog.text


def test_other_errors_pass_through() -> None:
    config = tiny()
    with (
        pytest.raises(RuntimeError, match="shapes"),
        MemoryReport(CPU).explaining(config, check_world(config, 1)),
    ):
        raise RuntimeError("shapes differ")


WORLDS = [
    (1, ["--train.micro_batch_size=4"]),
    (1, ["--train.micro_batch_size=1"]),
    (4, ["--train.micro_batch_size=3", "--train.global_batch_size=12"]),
    (4, ["--train.micro_batch_size=1", "--parallel.dp_replicate=2"]),
]


@pytest.mark.parametrize("state_dominates", [False, True])
@pytest.mark.parametrize(("world", "options"), WORLDS)
def test_x2_the_three_keys_are_accepted_as_they_stand(tmp_path, world, options, state_dominates) -> None:
    options = ["--train.global_batch_size=32", *options]
    config = load(tmp_path, *options)
    lines = advice(config, check_world(config, world), state_dominates, on_card=False)
    assert len({line.split(" = ")[0] for line in lines}) == 3
    for line in lines:
        assignment, _, effect = line.partition("  # ")
        key, _, value = assignment.partition(" = ")
        extra = ["--parallel.dp_shard=-1"] if key == "parallel.dp_replicate" else []
        changed = load(tmp_path, *options, f"--{key}={value}", *extra)
        check_world(changed, world * 2 if "processes" in effect else world)


def test_what_to_change_first_depends_on_what_takes_the_memory(tmp_path) -> None:
    config = load(tmp_path, "--train.global_batch_size=32", "--train.micro_batch_size=4")
    degrees = check_world(config, 2)
    assert advice(config, degrees, False, on_card=True)[0].startswith("train.micro_batch_size = 2")
    assert advice(config, degrees, True, on_card=True)[0].startswith("parallel.dp_shard = 4")
