from __future__ import annotations

import time
from collections.abc import Callable
from itertools import islice
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from forge.config import check_world, parse_toml_text
from forge.config.keys import to_literal
from forge.observe.memory_report import MemoryReport
from forge.optim.moments import Moments
from forge.run.out_of_memory import explaining_exhaustion, planned_peaks, usable_changes
from forge.runtime.distributed import RanksFailed, cause_of, ran_out_of_memory
from forge.runtime.errors import UserError
from forge.tools.plan.peak import planned_peak
from forge.train.trainer import Trainer
from tests.support.checkpoints import rows
from tests.support.configs import load, tiny
from tests.support.equivalence import tiny_config
from tests.support.harness import run_ranks

CPU = torch.device("cpu")


def _no_plan(work: Callable[[], None], patience_s: float) -> None:
    """Replace `CrashReporter.once`."""


OUT_OF_MEMORY = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: you tried"),
    MemoryError(),
    RanksFailed(
        "making the optimizer failed on rank 3", cause_of(torch.OutOfMemoryError("CUDA out of memory"))
    ),
]


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=lambda error: type(error).__name__)
def test_running_out_becomes_a_user_error_with_exit_code_1(tmp_path, caplog, error) -> None:
    assert ran_out_of_memory(error)
    config = load(tmp_path, "--train.global_batch_size=8", "--train.micro_batch_size=4")
    report = MemoryReport(CPU)
    degrees = check_world(config, 1)
    with pytest.raises(UserError) as raised, explaining_exhaustion(report, config, degrees, _no_plan):
        raise error
    assert raised.value.exit_code == 1
    assert "before the first step" in caplog.text and "parallel.dp_shard = 2" in caplog.text


def test_other_errors_pass_through() -> None:
    config = tiny()
    with (
        pytest.raises(RuntimeError, match="shapes"),
        explaining_exhaustion(MemoryReport(CPU), config, check_world(config, 1), _no_plan),
    ):
        raise RuntimeError("shapes differ")


def _make_optimizer(rank: int, world: int, text: str) -> tuple[str, bool]:
    def exhaust(*_: Any) -> None:
        raise MemoryError("no memory left")

    if rank == 1:
        Moments.__init__ = exhaust  # type: ignore[method-assign]
    shapes = {"layers.0.attention.wq.weight": (8, 4), "norm.weight": (4,)}
    shards = [rows(name, torch.ones(shape), rank, world) for name, shape in shapes.items()]
    model = SimpleNamespace(shards=shards, copies={})
    meshes = SimpleNamespace(stage=dist.group.WORLD)
    trainer: Any = SimpleNamespace(config=parse_toml_text(text), model=model, meshes=meshes)
    with pytest.raises(RanksFailed) as raised:
        Trainer._make_optimizer(trainer)
    return str(raised.value), ran_out_of_memory(raised.value)


@pytest.mark.parametrize("key", ['name = "muon"', 'moment_dtype = "int8"'])
def test_memory_exhausted_in_the_optimizer_of_one_rank_is_reported_on_every_rank(key) -> None:
    message = "making the optimizer failed on rank 1: MemoryError: no memory left"
    assert run_ranks(_make_optimizer, 2, f"{tiny_config()}[optimizer]\n{key}\n") == [(message, True)] * 2


WORLDS = [
    (1, ["--train.micro_batch_size=4"]),
    (1, ["--train.micro_batch_size=1"]),
    (4, ["--train.micro_batch_size=3", "--train.global_batch_size=12"]),
    (4, ["--train.micro_batch_size=1", "--parallel.dp_replicate=2"]),
]


@pytest.mark.parametrize("state_dominates", [False, True])
@pytest.mark.parametrize(("world", "options"), WORLDS)
def test_x2_the_three_keys_are_valid_as_printed(tmp_path, world, options, state_dominates) -> None:
    options = ["--train.global_batch_size=32", *options]
    config = load(tmp_path, *options)
    changes = list(islice(usable_changes(config, check_world(config, world), state_dominates, False), 3))
    assert len({key for (key, _, _), _ in changes}) == 3
    for (key, value, effect), changed in changes:
        extra = ["--parallel.dp_shard=-1"] if key == "parallel.dp_replicate" else []
        assert changed == load(tmp_path, *options, f"--{key}={to_literal(value)}", *extra)
        check_world(changed, world * 2 if "processes" in effect else world)


def test_the_first_suggestion_depends_on_the_largest_consumer(tmp_path) -> None:
    config = load(tmp_path, "--train.global_batch_size=32", "--train.micro_batch_size=4")
    degrees = check_world(config, 2)

    def first(state_dominates: bool) -> tuple[str, Any]:
        (key, value, _), _ = next(usable_changes(config, degrees, state_dominates, on_gpu=True))
        return key, value

    assert first(False) == ("train.micro_batch_size", 2)
    assert first(True) == ("parallel.dp_shard", 4)


@pytest.mark.parametrize(
    ("step", "wanted"),
    [
        (2, {"phase[0].micro_batch_size": 4, "phase[0].seq_len": 8}),  # the last step of the phase
        (3, {"train.micro_batch_size": 1, "train.seq_len": 16}),
    ],
)
def test_a_key_that_the_failed_steps_phase_overrides_is_changed_in_the_phase(
    tmp_path, step: int, wanted: dict[str, int]
) -> None:
    options = ["--train.global_batch_size=8", "--train.micro_batch_size=2"]
    table = "[{{until_tokens=256,seq_len={},micro_batch_size={}}}]"
    config = load(tmp_path, *options, f"--phase={table.format(16, 8)}")
    usable = list(usable_changes(config, check_world(config, 1), False, True, step))
    found = {key: value for (key, value, _), _ in usable if key.endswith(("micro_batch_size", "seq_len"))}
    assert found == wanted
    if step == 2:
        assert usable[0][1] == load(tmp_path, *options, f"--phase={table.format(16, 4)}")


@pytest.mark.parametrize("state_dominates", [False, True])
def test_narrow_moments_and_recomputation_come_before_offloading(tmp_path, state_dominates: bool) -> None:
    config = load(tmp_path)
    changes = list(usable_changes(config, check_world(config, 1), state_dominates, on_gpu=True))
    keys = [key for (key, _, _), _ in changes]
    assert {"optimizer.moment_dtype", "activation_checkpoint.mode"} < set(keys)
    assert keys[-1] == "parallel.cpu_offload"
    modes = [value for (key, value, _), _ in changes if key == "activation_checkpoint.mode"]
    assert modes == ["full", "offload"]


@pytest.mark.processes
def test_suggestions_have_the_planners_peaks_or_none_if_unplannable(tmp_path) -> None:
    config = load(tmp_path, "--train.global_batch_size=8", "--train.micro_batch_size=4")
    uneven = load(tmp_path, "--parallel.dp_shard=3", "--train.global_batch_size=3")
    found = planned_peaks([(config, 1), (uneven, 4)], 1, CPU, 60)
    assert found == [planned_peak(config, 1, 1, False), None]


@pytest.mark.processes
def test_planning_ends_after_its_timeout() -> None:
    start = time.monotonic()
    assert planned_peaks([(tiny(), 1)], 1, CPU, 0.1) == [None]
    assert time.monotonic() - start < 5
