"""Lost, returning and spare nodes, and the local states of nodes. An agent takes the place of a node."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import pytest

from tests.faults.chaos import chaos
from tests.support.elastic import BATCH, FLOAT64_EXPERTS, Nodes, assert_same_course, elastic
from tests.support.runs import Run, wait_for

LOCAL = ["--checkpoint.local_interval=2", "--checkpoint.interval=6"]
# The run does not end before another node has joined.
GATE = '--train.hooks=["tests.support.node_hooks:Gate"]'
OWN_MEMORY = "tests.support.elastic:own_memory"


def kept(folder: Path, *options: str) -> Run:
    """Return a run whose nodes, of two ranks each, keep local states in `folder`/memory."""
    return Run(folder, *BATCH, *FLOAT64_EXPERTS, "--train.steps=14", *LOCAL, *options)


def killed_at(run: Run, step: int, world: int = 6, *options: str) -> None:
    codes = run.start(*options, world=world, fault=f"step:{step}:{world - 1}", patch=OWN_MEMORY).join()
    assert codes[-1] == -signal.SIGKILL and 0 not in codes


def goes_on(run: Run, world: int, *options: str) -> None:
    assert set(run.start(*options, world=world, patch=OWN_MEMORY).join()) == {0}, run.output()


def lose(run: Run, *nodes: int) -> None:
    for node in nodes:
        shutil.rmtree(run.path.parent / "memory" / f"node-{node}")


def states(run: Run, node: int) -> list[Path]:
    return sorted((run.path.parent / "memory" / f"node-{node}").rglob("step-*"))


def undisturbed_course(undisturbed) -> Run:
    return undisturbed(*BATCH, *FLOAT64_EXPERTS, "--train.steps=14", "--checkpoint.interval=6")


@pytest.mark.slow
def test_e4_a_lost_node_is_covered_by_its_peer_and_the_curve_is_the_same(tmp_path, undisturbed) -> None:
    run = kept(tmp_path)
    killed_at(run, 12, 4)
    lose(run, 1)
    goes_on(run, 2)
    [state] = run.events("local_state")
    assert (state["step"], state["newest_checkpoint"], state["nodes"]) == (10, 6, 1)
    assert run.events("resumed")[-1]["step"] == 10
    assert_same_course(run, undisturbed_course(undisturbed))
    # A finished run has removed its local states.
    assert not states(run, 0)


@pytest.mark.slow
def test_e7_two_nodes_lost_at_once_fall_back_to_the_newest_checkpoint(tmp_path, undisturbed) -> None:
    run = kept(tmp_path)
    killed_at(run, 12)
    lose(run, 1, 2)
    goes_on(run, 2)
    assert not run.events("local_state") and run.events("resumed")[-1]["step"] == 6
    assert "incomplete" in run.events("local_damaged")[0]["problem"]
    assert_same_course(run, undisturbed_course(undisturbed))


@pytest.mark.slow
def test_e5_a_flipped_bit_on_a_node_is_covered_by_the_copy_of_its_peer(tmp_path, undisturbed) -> None:
    run = kept(tmp_path)
    killed_at(run, 12, 4)
    file = next(states(run, 0)[-1].glob("__0_*.distcp"))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    goes_on(run, 4)
    assert "wrong checksum" in run.events("local_damaged")[0]["problem"]
    assert run.events("resumed")[-1]["step"] == 10
    assert_same_course(run, undisturbed_course(undisturbed))


def test_e6_a_failed_save_loses_nothing_with_local_states(tmp_path, undisturbed) -> None:
    run = kept(tmp_path)
    codes = run.start(world=2, fault="save.between_shards:6:*:raise", patch=OWN_MEMORY).join()
    assert codes == [0, 0] and len(run.events("save_failed")) == 1
    assert_same_course(run, undisturbed_course(undisturbed))


@pytest.mark.slow
@pytest.mark.planted("killed")
def test_e6_missing_shared_storage_at_a_restart_is_an_error_and_loses_nothing(tmp_path, undisturbed) -> None:
    run = kept(tmp_path)
    killed_at(run, 12, 2)
    run.path.rename(tmp_path / "away")
    run.path.touch()
    assert set(run.start(world=2, patch=OWN_MEMORY).join()) == {2}
    assert "cannot be written to" in run.output()
    run.path.unlink()
    (tmp_path / "away").rename(run.path)
    goes_on(run, 2)
    assert run.events("resumed")[-1]["step"] == 10
    assert_same_course(run, undisturbed_course(undisturbed))


@pytest.mark.slow
def test_a_new_history_does_not_resume_from_states_of_the_old_one(tmp_path, undisturbed) -> None:
    run = kept(tmp_path)
    killed_at(run, 12, 2)
    shutil.rmtree(run.path)
    goes_on(run, 2)
    assert not run.events("resumed") and len(run.events("fresh")) == 1
    assert_same_course(run, undisturbed_course(undisturbed))


def test_an_unwritable_folder_is_refused_before_the_first_step(tmp_path) -> None:
    (tmp_path / "file").touch()
    run = Run(tmp_path, *LOCAL, f"--checkpoint.local_dir={tmp_path / 'file'}")
    assert run() == 2
    assert "checkpoint.local_dir" in run.output() and "Traceback" not in run.output()


def wait_for_start(nodes: Nodes, number: int) -> None:
    wait_for(lambda: len(nodes.run.events("recovered")) >= number, 240)


def open_gate_at_start(nodes: Nodes, number: int) -> None:
    wait_for(lambda: len(nodes.run.events("started")) >= number, 240)
    (nodes.run.path / "gate").touch()


@pytest.mark.slow
def test_e1_e2_a_lost_node_and_a_new_one_change_no_metric(tmp_path) -> None:
    options = [*FLOAT64_EXPERTS, "--train.steps=150", "--checkpoint.interval=100"]
    local = ["--checkpoint.local_interval=5", f"--checkpoint.local_dir={tmp_path}/memory-NODE"]
    with elastic(tmp_path / "elastic", "2:3", 2, *options, *local, GATE) as nodes:
        nodes.start("a", "b", "c")
        nodes.wait_for_step(27)
        nodes.kill("a")
        wait_for_start(nodes, 1)
        [started, again] = nodes.run.events("started")
        assert (started["world_size"], again["world_size"]) == (6, 4)
        assert nodes.run.events("resumed")[0]["step"] % 100 != 0
        nodes.start("d")
        open_gate_at_start(nodes, 3)
        wait_for_start(nodes, 2)
        assert set(nodes.finish().values()) == {0}
    run, whole = nodes.run, Run(tmp_path / "whole", *BATCH, *options)
    assert [event["world_size"] for event in run.events("started")] == [6, 4, 6]
    lost, joined = run.events("nodes_changed")
    assert (len(lost["lost"]), len(lost["joined"])) == (1, 0) and (
        len(joined["lost"]),
        len(joined["joined"]),
    ) == (0, 1)
    assert run.events("recovered")[1]["steps_lost"] == 0
    assert whole(world=1) == 0
    assert_same_course(run, whole)


@pytest.mark.slow
def test_e2_a_joining_node_costs_no_step(tmp_path) -> None:
    options = ["--train.steps=130", "--checkpoint.interval=0", GATE]
    with elastic(tmp_path, "1:2", 1, *options) as nodes:
        nodes.start("a")
        nodes.wait_for_step(20)
        nodes.start("b")
        open_gate_at_start(nodes, 2)
        wait_for_start(nodes, 1)
        assert set(nodes.finish().values()) == {0}
    assert [event["world_size"] for event in nodes.run.events("started")] == [1, 2]
    # PyTorch's agents count no restart here.
    assert [event["restarted"] for event in nodes.run.events("started")] == [False, True]
    assert nodes.run.events("recovered")[0]["steps_lost"] == 0


@pytest.mark.slow
def test_e3_a_spare_takes_the_place_of_a_lost_node(tmp_path) -> None:
    with elastic(tmp_path, "2:2", 1, "--train.steps=130", "--checkpoint.interval=10", GATE) as nodes:
        nodes.start("a", "b")
        nodes.wait_for_step(12)
        nodes.start("spare")
        nodes.wait_for_spare()
        assert len(nodes.run.events("started")) == 1
        nodes.kill("a")
        # A rank at the gate would not notice.
        open_gate_at_start(nodes, 1)
        assert set(nodes.finish().values()) == {0}
    [changed] = nodes.run.events("nodes_changed")
    assert len(changed["lost"]) == len(changed["joined"]) == 1
    assert [event["world_size"] for event in nodes.run.events("started")] == [2, 2]


@pytest.mark.slow
@pytest.mark.planted()
def test_e3_an_unneeded_spare_ends_with_the_run(tmp_path) -> None:
    with elastic(tmp_path, "1:1", 1, "--train.steps=110", "--checkpoint.interval=0", GATE) as nodes:
        nodes.start("a")
        nodes.wait_for_step(10)
        nodes.start("spare")
        nodes.wait_for_spare()
        open_gate_at_start(nodes, 1)
        assert nodes.finish() == {"a": 0, "spare": 0}
    assert len(nodes.run.events("started")) == 1


@pytest.mark.slow
def test_e8_fewer_nodes_than_the_minimum_do_not_continue(tmp_path) -> None:
    with elastic(tmp_path, "2:3", 1, "--train.steps=200", "--checkpoint.interval=10") as nodes:
        nodes.start("a", "b", "c")
        nodes.wait_for_step(15)
        nodes.kill("a", "b")
        wait_for(lambda: "failed (exitcode" in nodes.output("c"), 120)
        # By the time another agent has joined, a lone agent would have begun.
        nodes.start("d")
        wait_for_start(nodes, 1)
        assert [event["world_size"] for event in nodes.run.events("started")] == [3, 2]
        assert set(nodes.finish().values()) == {0}


@pytest.mark.slow
def test_a_refused_start_ends_the_agents_without_a_restart(tmp_path) -> None:
    missing = f'--data.sources=[{{path="{tmp_path}/missing"}}]'
    with elastic(tmp_path, "2:2", 1, "--train.steps=9", missing) as nodes:
        nodes.start("a", "b")
        assert nodes.finish() == {"a": 2, "b": 2}
    assert len(nodes.run.events("started")) == 1


def wait_for_world(nodes: Nodes, *sizes: int) -> None:
    """Wait for one start of the run after another, on `sizes` ranks."""
    wait_for(lambda: [event["world_size"] for event in nodes.run.events("started")] == list(sizes), 240)


@pytest.mark.slow
def test_e11_a_frozen_node_is_lost_and_ends_its_ranks_when_it_wakes(tmp_path) -> None:
    options = [*FLOAT64_EXPERTS, "--train.steps=130", "--checkpoint.interval=10"]
    with elastic(tmp_path / "elastic", "2:3", 1, *options, GATE) as nodes:
        nodes.start("a", "b", "c")
        nodes.wait_for_step(25)
        frozen = next(name for name in nodes.agents if name != nodes.first())
        [rank] = nodes.ranks(frozen)
        nodes.freeze(frozen)
        wait_for_world(nodes, 3, 2)
        wait_for_start(nodes, 1)
        nodes.thaw(frozen)
        wait_for(lambda: rank not in nodes.ranks(frozen), 120)
        wait_for_world(nodes, 3, 2, 3)
        (nodes.run.path / "gate").touch()
        assert set(nodes.finish().values()) == {0}
    whole = Run(tmp_path / "whole", *BATCH, *options)
    assert whole(world=1) == 0
    assert_same_course(nodes.run, whole)
    assert not nodes.run.events("failed")


@pytest.mark.slow
def test_e11_a_run_waits_for_the_lock_of_a_frozen_rank_and_uses_up_no_restart(tmp_path) -> None:
    options = [*FLOAT64_EXPERTS, "--train.steps=130", "--checkpoint.interval=10"]
    with elastic(tmp_path / "elastic", "2:3", 1, *options, GATE, agent=["--restarts=1"]) as nodes:
        nodes.start("a", "b", "c")
        nodes.wait_for_step(25)
        frozen = nodes.first()
        others = [name for name in nodes.agents if name != frozen]
        nodes.freeze(frozen)
        wait_for(lambda: all("a rank of a lost node" in nodes.output(name) for name in others), 240)
        # No rank writes while the frozen rank could.
        assert all(not nodes.ranks(name) for name in others) and len(nodes.run.events("started")) == 1
        nodes.thaw(frozen)
        wait_for_start(nodes, 1)
        (nodes.run.path / "gate").touch()
        assert set(nodes.finish().values()) == {0}
    whole = Run(tmp_path / "whole", *BATCH, *options)
    assert whole(world=1) == 0
    assert_same_course(nodes.run, whole)


CLOCK = "import time\nreal = time.time\ntime.time = lambda: real() + 3 * 3600\n"


@pytest.mark.slow
def test_e9_clocks_hours_apart_change_nothing(tmp_path) -> None:
    (tmp_path / "ahead").mkdir()
    (tmp_path / "ahead" / "sitecustomize.py").write_text(CLOCK)
    with elastic(tmp_path / "run", "2:2", 1, "--train.steps=60") as nodes:
        nodes.start("a")
        nodes.start("b", PYTHONPATH=str(tmp_path / "ahead"))
        assert set(nodes.finish().values()) == {0}
    assert "10800 s ahead" in nodes.output("b")
    assert len(nodes.run.events("started")) == 1


@pytest.mark.slow
def test_e10_a_persistent_straggler_leaves_after_a_save(tmp_path) -> None:
    slow = ["--resilience.straggler_interval=5", "--resilience.drain_stragglers=2", "--train.steps=120"]
    hook = ["--checkpoint.interval=0", '--train.hooks=["tests.support.node_hooks:SlowNode"]']
    with elastic(tmp_path, "1:3", 1, *slow, *hook) as nodes:
        nodes.start("a", "b")
        nodes.start("c", SLOW_NODE="1")
        codes = nodes.finish()
    assert codes == {"a": 0, "b": 0, "c": 75}
    assert [event["world_size"] for event in nodes.run.events("started")] == [3, 2]
    assert nodes.run.events("recovered")[0]["steps_lost"] == 0


@pytest.mark.slow
def test_random_faults_change_no_metric(tmp_path) -> None:
    """One minute of `make chaos`, whose default is half an hour."""
    chaos(tmp_path, minutes=1.0, seed=2, least=2)
