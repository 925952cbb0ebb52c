"""A checkpoint of one layout loads exactly in any other."""

import random
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from forge.checkpoint import Checkpoints, load
from forge.checkpoint.store import Stager
from forge.runtime.errors import UserError
from forge.shard import Shard
from tests.support.checkpoints import cut, named, numbers, rows, whole
from tests.support.harness import run_ranks

LAYOUTS = {"cut": cut, "rows": rows, "whole": lambda name, full, rank, world: whole(name, full)}


def shapes() -> dict[str, tuple[int, ...]]:
    """Return fixed awkward shapes and some random ones."""
    drawn = random.Random(0)
    found = {"scalar": (), "one": (1,), "vector": (7,), "tall": (5, 1), "row": (1, 9), "experts": (3, 4, 5)}
    for i in range(20):
        found[f"random.{i}"] = tuple(drawn.randint(1, 6) for _ in range(drawn.randint(1, 4)))
    return found


def shards(layout: str, rank: int, world: int, dtype: torch.dtype, blank: bool = False) -> list[Shard]:
    made = [
        LAYOUTS[layout](name, numbers(shape, dtype) * 1.1, rank, world) for name, shape in shapes().items()
    ]
    if blank:
        for shard in made:
            shard.data.fill_(float("nan"))
    return made


def save_in(rank: int, world: int, folder: str, layout: str, dtype: torch.dtype) -> None:
    checkpoints = Checkpoints(Path(folder), mode="sync")
    (outcome,) = checkpoints.save(1, named(shards(layout, rank, world, dtype)), {}, {}, {})
    assert outcome.error is None, outcome.error


def load_in(rank: int, world: int, folder: str, layout: str, dtype: torch.dtype, saved: torch.dtype) -> None:
    targets = shards(layout, rank, world, dtype, blank=True)
    load(Path(folder) / "step-00000001", named(targets))
    for target, expected in zip(targets, shards(layout, rank, world, saved), strict=True):
        torch.testing.assert_close(target.data, expected.data.to(dtype), rtol=0, atol=0, msg=target.name)


@pytest.mark.parametrize(
    "saved, loaded",
    [
        (("cut", 3), [("whole", 1), ("rows", 2), ("cut", 2)]),
        (("rows", 4), [("rows", 3), ("cut", 1)]),
        (("whole", 2), [("rows", 2)]),
    ],
)
def test_any_layout_loads_any_others_checkpoint(saved, loaded, tmp_path):
    run_ranks(save_in, saved[1], str(tmp_path), saved[0], torch.float32)
    for layout, world in loaded:
        run_ranks(load_in, world, str(tmp_path), layout, torch.float32, torch.float32)


@pytest.mark.parametrize(
    "saved, wanted",
    [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32), (torch.float32, torch.float64)],
)
def test_values_are_cast_to_the_dtype_of_the_target(saved, wanted, tmp_path):
    run_ranks(save_in, 2, str(tmp_path), "cut", saved)
    run_ranks(load_in, 1, str(tmp_path), "rows", wanted, saved)


def test_other_programs_find_flat_names_in_the_folder(tmp_path):
    run_ranks(save_in, 3, str(tmp_path), "cut", torch.float32)
    dcp_to_torch_save(tmp_path / "step-00000001", tmp_path / "plain.pt")
    tensors = torch.load(tmp_path / "plain.pt", weights_only=True)
    assert {f"model.{name}": shape for name, shape in shapes().items()} == {
        name: tuple(tensor.shape) for name, tensor in tensors.items()
    }
    for name, shape in shapes().items():
        assert torch.equal(tensors[f"model.{name}"], numbers(shape) * 1.1)


def load_with_plain_dcp(rank: int, world: int, folder: str) -> None:
    tensors = {"model.experts": torch.zeros(3, 4, 5)}
    dcp.load(tensors, checkpoint_id=folder)
    assert torch.equal(tensors["model.experts"], numbers((3, 4, 5)) * 1.1)


def test_plain_dcp_loads_the_folder(tmp_path):
    run_ranks(save_in, 2, str(tmp_path), "rows", torch.float32)
    run_ranks(load_with_plain_dcp, 1, str(tmp_path / "step-00000001"))


def test_replicas_write_each_tensor_once_and_share_the_work(tmp_path):
    run_ranks(save_in, 2, str(tmp_path / "two"), "whole", torch.float32)
    run_ranks(save_in, 1, str(tmp_path / "one"), "whole", torch.float32)
    sizes = [path.stat().st_size for path in sorted((tmp_path / "two" / "step-00000001").glob("*.distcp"))]
    (single,) = (path.stat().st_size for path in (tmp_path / "one" / "step-00000001").glob("*.distcp"))
    assert len(sizes) == 2 and sum(sizes) == single and min(sizes) > single / 4


def staged_names(rank: int, world: int) -> list[str]:
    return sorted(Stager().stage(named(shards("whole", rank, world, torch.float32))))


def test_each_replica_stages_only_its_own_writes():
    one, other = run_ranks(staged_names, 2)
    assert sorted(one + other) == sorted(f"model.{name}" for name in shapes()) and one and other


def save_stages(rank: int, world: int, folder: str) -> None:
    mine = named([cut(f"layers.{rank}.weight", numbers((3, 3)), 0, 1)])
    checkpoints = Checkpoints(Path(folder), mode="sync")
    (outcome,) = checkpoints.save(1, mine, {}, {}, {})
    assert outcome.error is None, outcome.error
    for _, values in mine.values():
        values.zero_()
    checkpoints.load(checkpoints.path(1), mine)
    assert all(torch.equal(shard.data, numbers((3, 3)).view(-1)) for shard, _ in mine.values())


def test_ranks_may_hold_different_tensors_as_pipeline_stages_do(tmp_path):
    run_ranks(save_stages, 2, str(tmp_path))
    tensors = {"model.layers.0.weight": torch.zeros(3, 3), "model.layers.1.weight": torch.zeros(3, 3)}
    run_ranks(load_all, 1, str(tmp_path / "step-00000001"), list(tensors))


def load_all(rank: int, world: int, folder: str, wanted: list[str]) -> None:
    targets = {name: cut(name, torch.zeros(3, 3), 0, 1) for name in wanted}
    load(Path(folder), {name: (shard, shard.data) for name, shard in targets.items()})
    assert all(torch.equal(shard.data, numbers((3, 3)).view(-1)) for shard in targets.values())


def load_transposed(rank: int, world: int, folder: str) -> None:
    shard = whole("experts", torch.zeros(5, 4, 3).permute(2, 1, 0))
    targets = [shard, *(whole(name, torch.zeros(s)) for name, s in shapes().items() if name != "experts")]
    load(Path(folder), named(targets))
    assert torch.equal(shard.data, numbers((3, 4, 5)) * 1.1)


def test_non_contiguous_values_are_filled(tmp_path):
    run_ranks(save_in, 1, str(tmp_path), "whole", torch.float32)
    run_ranks(load_transposed, 1, str(tmp_path / "step-00000001"))


def misfit(rank: int, world: int, folder: str, wanted: dict[str, tuple[int, ...]]) -> str:
    targets = {name: cut(name, torch.zeros(shape), rank, world) for name, shape in wanted.items()}
    with pytest.raises(UserError) as error:
        load(Path(folder), {name: (shard, shard.data) for name, shard in targets.items()})
    assert all(not shard.data.any() for shard in targets.values())
    return str(error.value)


def save_two(rank: int, world: int, folder: str) -> None:
    tensors = {name: whole(name, numbers((4,))) for name in ("model.a", "model.b", "optimizer.a.exp_avg")}
    pairs = {name: (shard, shard.data) for name, shard in tensors.items()}
    Checkpoints(Path(folder), mode="sync").save(1, pairs, {}, {}, {})


def test_a_checkpoint_of_another_model_is_refused_with_the_names(tmp_path):
    run_ranks(save_two, 1, str(tmp_path))
    folder = str(tmp_path / "step-00000001")
    (lacking, same) = run_ranks(misfit, 2, folder, {"model.a": (4,), "model.b": (4,), "model.c": (4,)})
    assert lacking == same and "lacks model.c" in lacking and "model.a" in lacking
    (shape,) = run_ranks(misfit, 1, folder, {"model.a": (4,), "model.b": (2, 2)})
    assert "model.b is 4 in the checkpoint and 2x2 in the model" in shape
    (extra,) = run_ranks(misfit, 1, folder, {"model.a": (4,)})
    assert "model.b" in extra and "exp_avg" not in extra


def weights_only(rank: int, world: int, folder: str) -> None:
    targets = {name: whole(name, torch.zeros(4)) for name in ("model.a", "model.b")}
    load(Path(folder), {name: (shard, shard.data) for name, shard in targets.items()}, dist.group.WORLD)
    assert all(torch.equal(shard.data, numbers((4,))) for shard in targets.values())


def test_weights_load_alone_from_a_training_checkpoint(tmp_path):
    run_ranks(save_two, 1, str(tmp_path))
    run_ranks(weights_only, 2, str(tmp_path / "step-00000001"))
