"""Groups of ranks on simulated GPUs: only groups for objects or CPU tensors connect gloo."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch.distributed as dist

from forge.hook import Hook
from forge.train.trainer import Trainer
from tests.simulated_gpu.needed import simulated_gpu
from tests.support import gpu_variants as variants
from tests.support.runs import Run

pytestmark = simulated_gpu


class Listing(Hook):
    """Write the ranks and backends of rank 0's NCCL groups to `groups.json` in the run directory."""

    def __init__(self, trainer: Trainer):
        stage = trainer.meshes.stage
        found = [
            (dist.get_process_group_ranks(group), backend, group is stage)
            for group, (backend, _) in dist.distributed_c10d._world.pg_map.items()
            if group is not dist.group.WORLD and "nccl" in backend
        ]
        if dist.get_rank() == 0:
            (trainer.reporter.directory.root / "groups.json").write_text(json.dumps(found))


@pytest.mark.parametrize("offload", [False, True])
def test_only_the_group_of_a_stage_has_gloo_without_cpu_parameters(offload: bool, tmp_path: Path) -> None:
    options = ["--parallel.tp=2", "--parallel.pp=2", "--optimizer.name=muon", "--train.steps=1"]
    options += ['--train.hooks=["tests.simulated_gpu.test_groups:Listing"]']
    if offload:
        options += ["--parallel.cpu_offload=true", "--parallel.tp=1", "--optimizer.name=adamw"]
    run = Run(tmp_path, *variants.BASE[:-1], *options, base=[])
    codes = run.start(world=4).join()
    groups = json.loads((run.path / "groups.json").read_text())
    assert len(groups) >= 3
    for ranks, backend, is_stage in groups:
        assert backend == ("cpu:gloo,cuda:nccl" if is_stage or offload else "cuda:nccl"), ranks
    assert codes == [0] * 4, run.output()[-4000:]
