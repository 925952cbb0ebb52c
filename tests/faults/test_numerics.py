"""Bad losses and gradients: forge skips, diagnoses or rolls back the step, and never trains on it."""

import json
import signal

import pytest

from forge.checkpoint import read_state
from forge.checkpoint.folders import step_name
from tests.support.fault_layouts import COPIES, EXPERTS, PIPELINE, TWO_RANKS
from tests.support.runs import Run, flip_a_bit, tensor_files

THREE = "--resilience.max_skipped_steps=3"
SPIKES = ["--resilience.spike_window=8", "--resilience.spike_threshold=100"]


def test_n1_a_skipped_step_is_computed_again_and_tensors_and_ranks_are_named(tmp_path) -> None:
    run = Run(tmp_path, "--train.steps=7")
    assert run.start(world=2, patch="tests.support.spoil:samples_36_to_39").join() == [0, 0]
    [skipped] = run.events("skipped")
    assert skipped["step"] == 5 and skipped["cause"] == "deterministic"
    assert skipped["where"] and all(place.startswith("rank 1: ") for place in skipped["where"])
    assert "step 5 was skipped" in run.log(0)


@pytest.mark.planted("deterministic")
def test_n1_a_skipped_step_is_computed_again_with_the_sizes_of_its_own_phase(tmp_path) -> None:
    """With the next phase's microbatches, step 5 would have too few microbatches for the schedule."""
    run = Run(
        tmp_path,
        *("--model.n_layers=4", "--parallel.pp=2", "--pipeline.schedule=DualPipeV", "--train.steps=7"),
        *("--train.global_batch_size=16", "--train.micro_batch_size=4"),
        "--phase=[{until_tokens=1280,global_batch_size=8,micro_batch_size=2}]",
    )
    assert run.start(world=2, patch="tests.support.spoil:samples_36_to_39").join() == [0, 0]
    [skipped] = run.events("skipped")
    assert skipped["step"] == 5 and skipped["cause"] == "deterministic"


# Each with the first tensor of rank 1: the last stage of a pipeline, or under ddp a replica outside the gradient norm.
@pytest.mark.parametrize(
    ("layout", "tensor"),
    [((), "embedding."), (PIPELINE, "layers.1."), (("--parallel.data_parallel=ddp",), "embedding.")],
    ids=["fsdp 2", "pp 2", "ddp 2"],
)
@pytest.mark.parametrize("defect", ["infinity_in_one_gradient", "loss_that_is_no_number"])
def test_n1_all_ranks_skip_and_the_state_stays_bit_for_bit(
    tmp_path, defect: str, layout: tuple[str, ...], tensor: str
) -> None:
    run = Run(tmp_path, *layout, "--train.steps=6", "--checkpoint.interval=1", "--checkpoint.keep_last=0")
    assert run.start(world=2, patch=f"tests.support.spoil:{defect}").join() == [0, 0]
    assert [line["step"] for line in run.metrics() if line.get("skipped")] == [5]
    assert tensor_files(run, 5) == tensor_files(run, 4)
    before, after, last = (read_state(run.path / "checkpoints" / step_name(step)) for step in (4, 5, 6))
    assert after["optimizer"] == before["optimizer"] == {"updates": 4} and last["optimizer"] == {"updates": 5}
    assert after["progress"]["skipped_in_a_row"] == 1 and last["progress"]["skipped_in_a_row"] == 0
    [skipped] = run.events("skipped")
    if defect == "infinity_in_one_gradient":
        [where] = skipped["where"]
        assert where.startswith(f"rank 1: {tensor}")
    else:
        assert skipped["where"] == []


@pytest.mark.planted("transient")
def test_n1_a_fault_that_does_not_recur_is_called_transient(tmp_path) -> None:
    run = Run(tmp_path, "--train.steps=5")
    assert run.start(world=2, patch="tests.train.test_skips:spoil_step_3_on_rank_1").join() == [0, 0]
    [skipped] = run.events("skipped")
    assert (skipped["step"], skipped["cause"], skipped["where"]) == (3, "transient", [])


@pytest.mark.parametrize("model", [pytest.param((), marks=pytest.mark.slow), EXPERTS], ids=["dense", "moe"])
@pytest.mark.planted("deterministic", "skipped")
def test_n1_diagnosing_a_step_changes_nothing(tmp_path, model: tuple[str, ...]) -> None:
    """Even if the bad step's numbers arrive after the next step's gradient, as in step 5."""
    looks = Run(tmp_path / "a", *model)
    does_not = Run(tmp_path / "b", *model, "--resilience.rerun_skipped_steps=false")
    for run in (looks, does_not):
        assert run.start(world=2, patch="tests.support.spoil:samples_36_to_39").join() == [0, 0]
    assert looks.metrics() == does_not.metrics()
    assert tensor_files(looks, 10) == tensor_files(does_not, 10)
    assert does_not.events("skipped")[0]["cause"] == "skipped"


@pytest.mark.planted("bad_steps", "stopped")
@pytest.mark.parametrize(
    "layout", [pytest.param(one, marks=pytest.mark.slow) if one != "fsdp 2" else one for one in TWO_RANKS]
)
def test_n2_bad_data_is_rolled_back_and_never_seen_again(tmp_path, layout: str) -> None:
    options = (*TWO_RANKS[layout], THREE)
    run = Run(tmp_path / "run", *options)
    assert run.start(world=2, patch="tests.support.spoil:samples_32_to_55").join() == [0, 0]
    assert [line["step"] for line in run.metrics()] == list(range(1, 11))
    assert not any(line.get("skipped") for line in run.metrics())
    [event] = run.events("rolled_back")
    assert (event["from_step"], event["to_step"]) == (7, 4)
    assert (event["first_sample"], event["end_sample"]) == (32, 56)

    never = Run(tmp_path / "never", *options)
    assert never(world=2, fault="step:4:*:signal") == 75 and never.metrics()[-1]["step"] == 4
    rollbacks = run.path / "rollbacks.json"
    (never.path / "rollbacks.json").write_text(rollbacks.read_text())
    assert never(world=2) == 0
    assert never.metrics() == run.metrics()
    assert tensor_files(never, 10) == tensor_files(run, 10)


@pytest.mark.planted("bad_steps", "killed")
@pytest.mark.parametrize("model", [pytest.param((), marks=pytest.mark.slow), EXPERTS], ids=["dense", "moe"])
def test_n2_a_kill_right_after_a_rollback_does_not_forget_it(tmp_path, model: tuple[str, ...]) -> None:
    patch = "tests.support.spoil:samples_32_to_55"
    whole, killed = Run(tmp_path / "whole", THREE, *model), Run(tmp_path / "killed", THREE, *model)
    assert whole.start(patch=patch).join() == [0]
    assert killed.start(patch="tests.faults.test_numerics:die_when_step_5_comes_again").join() == [
        -signal.SIGKILL
    ]
    assert killed.events("rolled_back") and killed.metrics()[-1]["step"] == 4
    assert killed.start(patch=patch).join() == [0]
    assert len(killed.events("rolled_back")) == 1
    assert killed.metrics() == whole.metrics()
    assert tensor_files(killed, 10) == tensor_files(whole, 10)


@pytest.mark.planted("bad_steps", "killed")
def test_n2_a_kill_in_the_middle_of_a_rollback_loses_nothing(tmp_path) -> None:
    whole, killed = Run(tmp_path / "whole", THREE), Run(tmp_path / "killed", THREE)
    patch = "tests.support.spoil:samples_32_to_55"
    assert whole.start(patch=patch).join() == [0]
    assert killed.start(patch="tests.faults.test_numerics:die_in_a_rollback").join() == [-signal.SIGKILL]
    assert killed.start(patch=patch).join() == [0]
    assert killed.metrics() == whole.metrics()
    assert tensor_files(killed, 10) == tensor_files(whole, 10)


def test_n2_a_persistent_fault_is_rolled_back_twice_and_then_ends_with_a_diagnosis(tmp_path) -> None:
    run = Run(tmp_path, THREE)
    assert run.start(world=2, patch="tests.support.spoil:everything_from_32").join() == [1, 1]
    assert [(event["from_step"], event["to_step"]) for event in run.events("rolled_back")] == [(7, 4), (7, 2)]
    status = run.status()
    assert status["state"] == "failed" and "2 roll-backs have not helped" in status["reason"]
    assert "resilience.max_rollbacks = 2" in status["reason"] and "Traceback" not in run.output()
    assert {event["cause"] for event in run.events("skipped")} == {"deterministic"}


def test_n2_a_damaged_checkpoint_in_a_roll_back_does_not_hide_an_older_one(tmp_path) -> None:
    """A roll-back to step 4 has failed and step 2 is damaged: the run rolls back to 4 again, then ends with the diagnosis."""
    run = Run(tmp_path, THREE)
    assert run("--train.steps=4") == 0
    flip_a_bit(run, 2)
    assert run.start(patch="tests.support.spoil:everything_from_32").join() == [1]
    assert [(event["from_step"], event["to_step"]) for event in run.events("rolled_back")] == [(7, 4), (7, 4)]
    [fallback] = run.events("fallback")
    assert "step-00000002 is damaged" in fallback["problem"]
    assert "2 roll-backs have not helped" in run.status()["reason"] and "step-00000004" in run.checkpoints()


@pytest.mark.slow
def test_n2_without_a_checkpoint_before_the_fault_there_is_no_roll_back(tmp_path) -> None:
    run = Run(tmp_path, THREE, "--checkpoint.interval=0")
    assert run.start(patch="tests.support.spoil:everything_from_32").join() == [1]
    assert "no checkpoint before step 5" in run.status()["reason"]


@pytest.mark.parametrize(
    "dies",
    [
        pytest.param(False, marks=pytest.mark.planted("bad_steps")),
        pytest.param(True, marks=[pytest.mark.planted("killed", "bad_steps"), pytest.mark.slow]),
    ],
)
def test_n2_a_checkpoint_between_skipped_steps_serves_if_older_ones_are_pruned(tmp_path, dies: bool) -> None:
    """Its weights are those before the first skipped step."""
    patch = "tests.support.spoil:samples_32_to_55"
    options = (THREE, "--checkpoint.keep_last=1", "--checkpoint.mode=sync")
    run = Run(tmp_path, *options)
    if dies:  # with the checkpoint of step 6, after two skipped steps
        assert run.start(patch=patch, fault="step:7:0").join() == [-signal.SIGKILL]
    assert run.start(patch=patch).join() == [0]
    [event] = run.events("rolled_back")
    assert (event["from_step"], event["to_step"]) == (7, 6)
    assert (event["first_sample"], event["end_sample"]) == (48, 56)
    assert [line["step"] for line in run.metrics() if line.get("skipped")] == [5, 6]
    assert run.metrics()[-1]["step"] == 10


@pytest.mark.slow
def test_n2_a_lasting_fault_ends_the_run_also_from_checkpoints_between_skipped_steps(tmp_path) -> None:
    run = Run(tmp_path, THREE, "--checkpoint.keep_last=1", "--checkpoint.mode=sync")
    assert run.start(patch="tests.support.spoil:everything_from_32").join() == [1]
    assert [(event["from_step"], event["to_step"]) for event in run.events("rolled_back")] == [(7, 6)] * 2
    assert "2 roll-backs have not helped" in run.status()["reason"]


def test_n2_skipped_samples_stay_skipped_under_another_world_size_and_batch(tmp_path) -> None:
    run = Run(tmp_path, THREE)
    assert run.start("--train.steps=8", world=2, patch="tests.support.spoil:samples_32_to_55").join() == [
        0,
        0,
    ]
    assert run.start("--train.global_batch_size=4", patch="tests.support.spoil:samples_32_to_55").join() == [
        0
    ]
    assert len(run.events("rolled_back")) == 1 and not any(line.get("skipped") for line in run.metrics())
    state = json.loads((run.path / "checkpoints" / "step-00000010" / "trainer.json").read_text())
    assert state["progress"]["next_sample"] == 8 * 8 + 24 + 2 * 4


def test_a_spike_is_reported_skipped_or_rolled_back_as_configured(tmp_path) -> None:
    patch = "tests.support.spoil:spike_at_56"
    for policy in ("report", "skip", "rollback"):
        run = Run(tmp_path / policy, f"--resilience.spikes={policy}", *SPIKES)
        assert run.start(patch=patch).join() == [0]
        events = [
            (event["event"], event.get("step", event.get("from_step")))
            for event in run.events()
            if event["event"] in ("spike", "skipped", "rolled_back")
        ]
        skipped = [line["step"] for line in run.metrics() if line.get("skipped")]
        expected = {
            "report": ([("spike", 8)], []),
            "skip": ([("skipped", 8)], [8]),
            "rollback": ([("spike", 8), ("rolled_back", 8)], []),
        }
        assert (events, skipped) == expected[policy]
    assert Run(tmp_path / "skip").events("skipped")[0]["cause"] == "deterministic"


def test_the_spike_window_survives_a_resume_bit_for_bit(tmp_path) -> None:
    """Stopped between two saves and resumed, a run skips the same spike as the undisturbed run."""
    options = ["--resilience.spikes=skip", *SPIKES]
    whole, halves = Run(tmp_path / "whole", *options), Run(tmp_path / "halves", *options)
    patch = "tests.support.spoil:spike_at_56"
    assert whole.start(patch=patch).join() == [0]
    for steps in (5, 7, 10):
        assert halves.start(f"--train.steps={steps}", patch=patch).join() == [0]
    assert halves.metrics() == whole.metrics()
    state = [
        json.loads((run.path / "checkpoints" / "step-00000010" / "trainer.json").read_text())
        for run in (whole, halves)
    ]
    assert state[0]["progress"]["spikes"] == state[1]["progress"]["spikes"]


REPLICAS = ["--parallel.dp_replicate=2", "--parallel.dp_shard=1"]


def test_n3_a_flipped_bit_on_one_replica_is_named_at_the_next_save_and_never_saved(tmp_path) -> None:
    """The run returns to the previous checkpoint and ends like an undisturbed run."""
    whole, flipped = Run(tmp_path / "whole", *REPLICAS), Run(tmp_path / "flipped", *REPLICAS)
    assert whole(world=2) == 0
    assert flipped.start(world=2, patch="tests.support.spoil:one_bit_after_step_5").join() == [0, 0]
    [event] = flipped.events("copies_differ")
    assert event["step"] == 6
    assert "model.layers.0.feed_forward.w1.weight differs between the ranks 0, 1" in event["differences"]
    [rolled_back] = flipped.events("rolled_back")
    assert (rolled_back["from_step"], rolled_back["to_step"]) == (6, 4)
    assert flipped.metrics() == whole.metrics()
    assert tensor_files(flipped, 10) == tensor_files(whole, 10)


# A tensor with a replica on the last rank, and all ranks of its replicas: in a pipeline, those of the last stage.
FLIPPED = {
    "pp 2, hsdp": ("layers.1.feed_forward.w1.weight", "2, 3"),
    "pp 2, ddp": ("layers.1.feed_forward.w1.weight", "2, 3"),
    "ep 2, hsdp": ("layers.0.feed_forward.experts.w13", "1, 3"),
    "zero1, hybrid": ("layers.0.feed_forward.w1.weight", "1, 3"),
}


@pytest.mark.parametrize(
    "layout",
    [one if one == "zero1, hybrid" else pytest.param(one, marks=pytest.mark.slow) for one in COPIES],
)
def test_n3_a_flipped_bit_is_named_by_all_ranks_under_every_layout(
    tmp_path, undisturbed, layout: str
) -> None:
    """Ranks without a replica name it too. All ranks roll back together and end like an undisturbed run."""
    name, ranks = FLIPPED[layout]
    run, what = Run(tmp_path, *COPIES[layout]), "one_bit_of_an_expert" if "ep" in layout else "one_bit"
    assert run.start(world=4, patch=f"tests.support.spoil:{what}_after_step_5").join() == [0] * 4
    [event] = run.events("copies_differ")
    kinds = ("model", "weights") if "ddp" in layout else ("model",)
    assert event["step"] == 6
    assert {f"{kind}.{name} differs between the ranks {ranks}" for kind in kinds} <= set(event["differences"])
    assert all("copies differ after step 6" in run.log(rank) for rank in range(4))
    whole = undisturbed(*COPIES[layout], world=4)
    assert run.metrics() == whole.metrics()
    assert tensor_files(run, 10) == tensor_files(whole, 10)


TIED = {
    "pp 2": (*PIPELINE, "--model.tie_embeddings=true"),
    # Both copies are on rank 0.
    "v": (
        *PIPELINE,
        "--model.tie_embeddings=true",
        "--model.n_layers=4",
        "--pipeline.schedule=ZBVZeroBubble",
    ),
}


@pytest.mark.parametrize("layout", ["pp 2", pytest.param("v", marks=pytest.mark.slow)])
def test_n3_a_flipped_bit_in_the_last_stages_copy_of_a_tied_weight_is_found(
    tmp_path, undisturbed, layout: str
) -> None:
    """The next update would overwrite that copy."""
    run, whole = Run(tmp_path, *TIED[layout]), undisturbed(*TIED[layout], world=2)
    assert run.start(world=2, patch="tests.support.spoil:one_bit_of_a_tied_copy_after_step_5").join() == [
        0,
        0,
    ]
    [event] = run.events("copies_differ")
    assert event["step"] == 6
    [difference] = event["differences"]
    assert difference == "weights.embedding.weight of the last stage differs between the ranks 0, 1"
    assert run.metrics() == whole.metrics() and tensor_files(run, 10) == tensor_files(whole, 10)


def test_n3_replicated_masters_and_compute_copies_are_compared(tmp_path) -> None:
    """The comparison comes before the final save, which waits for the repeated steps."""
    run = Run(tmp_path, "--parallel.data_parallel=ddp", "--precision.compute=bfloat16", "--train.steps=6")
    assert run.start(world=2, patch="tests.support.spoil:one_bit_after_step_5").join() == [0, 0]
    [event] = run.events("copies_differ")
    assert event["step"] == 6
    assert {
        f"{kind}.layers.0.feed_forward.w1.weight differs between the ranks 0, 1"
        for kind in ("model", "weights")
    } <= set(event["differences"])
    assert [line["step"] for line in run.metrics()] == list(range(1, 7))


def test_n3_a_node_that_keeps_flipping_bits_ends_the_run_and_is_named(tmp_path) -> None:
    run = Run(tmp_path, *REPLICAS)
    patch = "tests.support.spoil:one_bit_after_every_step_from_5"
    assert run.start(world=2, patch=patch).join() == [1, 1]
    assert "out of use" in run.status()["reason"] and "ranks 0, 1" in run.status()["reason"]
    assert run.checkpoints()[-1] == "step-00000004"


@pytest.mark.slow
@pytest.mark.planted()
def test_n3_only_replicas_are_compared_and_only_if_configured(tmp_path) -> None:
    patch = "tests.support.spoil:one_bit_after_step_5"
    sharded = Run(tmp_path / "sharded")
    unasked = Run(tmp_path / "unasked", *REPLICAS, "--resilience.check_replicas=false")
    for run in (sharded, unasked):
        assert run.start(world=2, patch=patch).join() == [0, 0]
        assert not run.events("copies_differ")


def die_when_step_5_comes_again() -> None:
    import os

    import forge.run.hooks as hooks
    from tests.support import spoil

    spoil.samples_32_to_55()
    seen = []

    def die(name: str, step: int) -> None:
        seen.append(step)
        if seen.count(5) == 2:
            os.kill(os.getpid(), signal.SIGKILL)

    hooks.fault_point = die


def die_in_a_rollback() -> None:
    """Die after later checkpoints are set aside and before the roll-back is recorded."""
    import os

    import forge.run.history as history
    from tests.support import spoil

    spoil.samples_32_to_55()
    write = history.write_rollbacks

    def die(directory, progress) -> None:
        if progress.rollbacks:
            os.kill(os.getpid(), signal.SIGKILL)
        write(directory, progress)

    history.write_rollbacks = die
