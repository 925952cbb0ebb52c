"""Every shipped config builds on the world of its first line, with meta tensors and a fake process group."""

import re
from pathlib import Path

import pytest

from tests.support.harness import start_ranks
from tests.support.layouts import slow_unless

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.toml"))


# kimi-k3 takes over a minute: 93 layers, and Muon over 4,096 ranks. The others have a smaller config of the same family.
SLOW = ("kimi-k3", "13b", "70b", "llama3-70b", "gpt-oss-120b")


@pytest.mark.parametrize(
    "path", [pytest.param(path, id=path.stem, marks=slow_unless(path.stem not in SLOW)) for path in CONFIGS]
)
def test_a_shipped_config_builds_on_its_world(path: Path, tmp_path) -> None:
    world = int(re.match(r"# For (\d+) process", path.read_text())[1])
    report = tmp_path / "report"
    assert start_ranks(_build, 1, path, world, report).join() == [0], report.read_text()


def _build(rank: int, ranks: int, path: Path, world: int, report: Path) -> None:
    import traceback

    try:
        _build_on_fake_ranks(path, world)
    except BaseException:
        report.write_text(traceback.format_exc())
        raise


def _build_on_fake_ranks(path: Path, world: int) -> None:
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from forge.config import check_world, load_config
    from forge.model import parameter_counts
    from forge.parallel.build import apply_layout, build_meta_model
    from forge.parallel.layout import make_layout
    from forge.parallel.mesh import make_meshes

    config = load_config([f"--config={path}"])
    dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
    meshes = make_meshes(check_world(config, world), "cpu")
    engine = apply_layout(build_meta_model(config), make_layout(config, meshes))
    engine.allocate(torch.device("meta"))
    whole = sum(shard.global_shape.numel() for shard in engine.shards)
    assert whole == parameter_counts(build_meta_model(config)).total
    degrees = meshes.degrees
    # Rank 0 holds its share, rounded up to whole rows, of all parameters but routers, and whole routers.
    shared = [
        shard for shard in engine.shards if not shard.name.endswith(("router.weight", "shared_gate.weight"))
    ]
    held = sum(box.numel for shard in shared for box in shard.boxes)
    of_all = sum(shard.global_shape.numel() for shard in shared)
    assert 0 <= held * degrees.dp_shard * degrees.cp * degrees.tp / of_all - 1 < 0.02
