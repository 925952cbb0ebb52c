"""Local states of nodes. Ranks' folders take the place of nodes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from forge.checkpoint import load
from forge.checkpoint.folders import steps
from forge.checkpoint.local import LocalTier
from forge.checkpoint.nodes import Nodes
from forge.runtime.causes import Cause
from forge.runtime.distributed import RanksFailed
from forge.runtime.errors import UserError
from tests.support.checkpoints import cut, inject, named, numbers, rows
from tests.support.harness import run_ranks

SHAPES = {"layers.weight": (7, 5), "layers.bias": (9,), "scalar": ()}


def shards(rank: int, world: int, value: float, make=cut):
    return [make(name, numbers(shape) + value, rank, world) for name, shape in SHAPES.items()]


def tier_of(rank: int, folder: Path, nodes: str, peers: int = 1) -> LocalTier:
    """Return rank's LocalTier. nodes: one letter per rank, the name of its node, e.g. "aabb"."""
    return LocalTier(folder / nodes[rank], peers)


def save(tier: LocalTier, rank: int, world: int, step: int) -> str | None:
    tensors = named(shards(rank, world, float(step)))
    tier.save(step, tensors, {"step": step}, {"config.toml": b"[run]\n"}, {"dp": world})
    (outcome,) = tier.wait()
    return outcome.error


def save_steps(rank: int, world: int, folder: Path, nodes: str, upto: int, peers: int = 1) -> None:
    tier = tier_of(rank, folder, nodes, peers)
    for step in range(1, upto + 1):
        assert save(tier, rank, world, step) is None


def restore(rank: int, world: int, folder: Path, nodes: str, after: int = -1) -> tuple[int | None, list[str]]:
    """Load the newest state on other ranks and another layout. Return its step and the problems of newer states."""
    tier = tier_of(rank, folder, nodes)
    step = tier.newest(after)
    if step is None:
        return None, tier.problems
    wanted = shards(rank, world, float(step), rows)
    targets = shards(rank, world, 0.0, rows)
    load(tier.path(step), named(targets), fetch=functools.partial(tier.fetch, step))
    for target, expected in zip(targets, wanted, strict=True):
        torch.testing.assert_close(target.data, expected.data, rtol=0, atol=0)
    return step, tier.problems


def files(folder: Path, step: int) -> list[str]:
    return sorted(path.name for path in (folder / f"step-{step:08d}").glob("*.distcp"))


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_a_lost_node_is_covered_by_its_peer_on_fewer_ranks_and_another_layout(tmp_path) -> None:
    run_ranks(save_steps, 6, tmp_path, "aabbcc", 2)
    assert files(tmp_path / "b", 2) == [f"__{rank}_0.distcp" for rank in range(4)]
    found = run_ranks(restore, 4, tmp_path, "aacc")
    assert found == [(2, [])] * 4


def test_a_new_empty_node_gets_its_files_from_others(tmp_path) -> None:
    run_ranks(save_steps, 4, tmp_path, "aabb", 1)
    assert run_ranks(restore, 6, tmp_path, "nnaabb") == [(1, [])] * 6


def test_a_returning_process_reads_its_own_files(tmp_path) -> None:
    run_ranks(save_steps, 2, tmp_path, "aa", 1)
    assert run_ranks(restore, 2, tmp_path, "aa") == [(1, [])] * 2
    assert run_ranks(restore, 2, tmp_path, "aa", 1) == [(None, [])] * 2


def test_a_node_keeps_two_states_and_leaves_nothing_of_others(tmp_path) -> None:
    run_ranks(save_steps, 2, tmp_path, "ab", 4)
    for name in "ab":
        assert sorted(path.name for path in (tmp_path / name).iterdir()) == ["step-00000003", "step-00000004"]


def test_two_nodes_lost_at_once_with_one_copy_leave_no_state_and_with_two_copies_one(tmp_path) -> None:
    run_ranks(save_steps, 4, tmp_path / "one", "abcd", 2)
    [(step, problems), _] = run_ranks(restore, 2, tmp_path / "one", "ad")
    assert step is None
    assert problems[0] == "the local state of step 2 is incomplete: 1 of 4 files are on no node"
    run_ranks(save_steps, 4, tmp_path / "two", "abcd", 2, 2)
    assert run_ranks(restore, 2, tmp_path / "two", "ad") == [(2, [])] * 2


def test_a_flipped_bit_is_found_and_the_peer_s_copy_is_used_or_else_the_state_before(tmp_path) -> None:
    run_ranks(save_steps, 2, tmp_path, "ab", 2)
    flip(tmp_path / "a" / "step-00000002" / "__0_0.distcp")
    [(step, problems), _] = run_ranks(restore, 2, tmp_path, "ab")
    assert step == 2
    assert problems == ["the local state of step 2 on node 0: __0_0.distcp has a wrong checksum"]
    # By now a new state has replaced the damaged one.
    for name in "ab":
        flip(tmp_path / name / "step-00000002" / "__0_0.distcp")
    assert [step for step, _ in run_ranks(restore, 2, tmp_path, "ab")] == [1, 1]


def test_a_damaged_manifest_or_index_is_taken_from_another_node(tmp_path) -> None:
    run_ranks(save_steps, 2, tmp_path, "ab", 1)
    flip(tmp_path / "a" / "step-00000001" / "manifest.json")
    flip(tmp_path / "a" / "step-00000001" / ".metadata")
    assert [step for step, _ in run_ranks(restore, 2, tmp_path, "ab")] == [1, 1]


def make_unreadable(path: Path) -> None:
    """Make every read of the file fail with EIO."""
    path.unlink()
    path.symlink_to("/proc/self/mem")


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "trainer.json", "manifest.json"])
def test_e5_an_unreadable_file_on_one_node_is_taken_from_its_peer(tmp_path, name) -> None:
    run_ranks(save_steps, 2, tmp_path, "ab", 2)
    make_unreadable(tmp_path / "a" / "step-00000002" / name)
    [(step, problems), _] = run_ranks(restore, 2, tmp_path, "ab")
    assert step == 2
    if name.endswith(".distcp"):
        assert problems == [
            "the local state of step 2 on node 0: __0_0.distcp cannot be read: Input/output error"
        ]
    assert all(
        (tmp_path / "a" / "step-00000002" / name).read_bytes() == path.read_bytes()
        for path in (tmp_path / "b" / "step-00000002").glob(name)
    )


def test_e5_a_flipped_bit_in_a_small_file_of_the_first_node_does_not_cost_the_state(tmp_path) -> None:
    run_ranks(save_steps, 2, tmp_path, "ab", 2)
    for name in ("trainer.json", ".metadata"):
        flip(tmp_path / "a" / "step-00000002" / name)
    assert [step for step, _ in run_ranks(restore, 2, tmp_path, "ab")] == [2, 2]


def failing_save(rank: int, world: int, folder: Path, fault: str) -> tuple[str | None, str | None]:
    tier = tier_of(rank, folder, "ab")
    assert save(tier, rank, world, 1) is None
    inject(fault)
    first = save(tier, rank, world, 2)
    inject(None)
    return first, save(tier, rank, world, 3)


def test_a_failed_state_on_one_rank_fails_on_all_and_the_next_state_is_kept(tmp_path) -> None:
    found = run_ranks(failing_save, 2, tmp_path, "local.before_manifest:2:*:raise")
    assert all("injected" in (first or "") and then is None for first, then in found)
    for name in "ab":
        assert steps(tmp_path / name) == [1, 3]
        assert not list((tmp_path / name).glob(".*"))


def agreements(rank: int, world: int, folder: Path) -> list[str]:
    from forge.runtime import distributed

    tier, found, attempt = tier_of(rank, folder, "ab"), [], distributed._attempt

    def record(what: str, work: Callable[[], object]) -> object:
        found.append(what)
        return attempt(what, work)

    distributed._attempt = record
    assert save(tier, rank, world, 1) is None
    return found


def test_ranks_agree_once_after_each_stage_of_a_state(tmp_path) -> None:
    """On many nodes each agreement costs a gather over all ranks."""
    expected = [
        "preparing the local state",
        "looking for room",
        "reading back what was written",
        "mapping files for the exchange between nodes",
        "exchanging files between nodes",
        "listing files",
        "completing the local state",
    ]
    first, other = run_ranks(agreements, 2, tmp_path)
    # Only the first rank lists files, for all.
    assert first == expected and other == [one for one in expected if one != "listing files"]


def unmappable(rank: int, world: int, folder: Path) -> tuple[str | None, str | None]:
    from forge.checkpoint import nodes

    def fail(*_: object, **__: object) -> None:
        raise OSError(5, "Input/output error")

    mapped, tier = nodes._map, tier_of(rank, folder, "ab")
    nodes._map = fail if rank == 1 else mapped
    first = save(tier, rank, world, 1)
    nodes._map = mapped
    return first, save(tier, rank, world, 2)


def test_a_file_that_one_rank_cannot_map_fails_the_state_on_all_and_no_rank_waits(tmp_path) -> None:
    for first, then in run_ranks(unmappable, 2, tmp_path, timeout=60):
        assert "mapping files for the exchange between nodes failed on rank 1" in (first or "")
        assert then is None
    assert steps(tmp_path / "a") == steps(tmp_path / "b") == [2]


def no_room(rank: int, world: int, folder: Path) -> str | None:
    from forge.checkpoint import local

    def full(*_: object) -> None:
        raise OSError(28, "the checkpoint needs 9 GB, but only 1 GB are free")

    local.require_room = full
    return save(tier_of(rank, folder, "ab"), rank, world, 1)


def test_a_full_node_reports_it_and_keeps_nothing(tmp_path) -> None:
    for error in run_ranks(no_room, 2, tmp_path):
        assert error is not None and "9 GB" in error
    assert not steps(tmp_path / "a")


def no_room_to_fetch(rank: int, world: int, folder: Path) -> str:
    from forge.checkpoint import local

    def full(where: Path, size: int) -> None:
        if size > 0 and folder / "c" in where.parents:
            raise OSError(28, f"{size} bytes are missing")

    local.require_room = full
    try:
        restore(rank, world, folder, "ac")
    except RanksFailed as error:
        assert error.cause is Cause.DISK_FULL and error.exit_code == 1
        return str(error)
    return ""


def test_a_node_without_room_for_the_files_of_others_says_so_before_it_maps_them(tmp_path) -> None:
    run_ranks(save_steps, 2, tmp_path, "ab", 2)
    for message in run_ranks(no_room_to_fetch, 2, tmp_path):
        assert "making room for local states failed on rank 1" in message and "bytes are missing" in message


def refuse(rank: int, world: int, folder: Path) -> str:
    tier = tier_of(rank, folder, "ab")
    save(tier, rank, world, 1)
    step = tier.newest(-1)
    assert step == 1
    try:
        load(tier.path(1), named([cut("other", numbers((3,)), rank, world)]), fetch=lambda names: None)
    except UserError as error:
        return str(error)
    return ""


def test_a_state_of_another_model_is_refused_like_any_checkpoint(tmp_path) -> None:
    for message in run_ranks(refuse, 2, tmp_path):
        assert "does not fit the configured model" in message


def test_peers_are_the_next_nodes_and_at_most_all_others() -> None:
    nodes = Nodes(((0, 1), (2,), (3, 4)), 3)
    assert nodes.peers(2, 1) == [0] and nodes.peers(0, 9) == [1, 2] and nodes.own == 2 and nodes.leads
    assert nodes.share(["a", "b", "c"]) == ["a", "c"]
    assert Nodes(((0, 1),), 1).peers(0, 3) == [] and not Nodes(((0, 1),), 1).leads


def groups(rank: int, world: int, folder: Path) -> tuple[tuple[int, ...], ...]:
    return Nodes.of(folder / "abab"[rank], dist.group.WORLD).ranks


def test_ranks_sharing_a_folder_form_a_node(tmp_path) -> None:
    assert run_ranks(groups, 4, tmp_path) == [((0, 2), (1, 3))] * 4
