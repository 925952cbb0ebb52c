"""A run stopped, killed or moved to other ranks has the history of an undisturbed run."""

import pytest

from forge.checkpoint import read_state
from forge.checkpoint.folders import step_name
from forge.checkpoint.loading import TensorReader
from tests.support.runs import BASE, EXPERTS, FLOAT64, Run, assert_same_history

# Learning rates that depend on the step, and a balancing bias with an update in every step.
DECAYING = ["--schedule.name=cosine", "--schedule.warmup_steps=3"]


@pytest.mark.parametrize(
    ("world", "options"),
    [
        (1, []),
        (2, DECAYING),
        pytest.param(1, EXPERTS, marks=pytest.mark.slow),
        pytest.param(2, [*EXPERTS, "--parallel.ep=2"], marks=pytest.mark.slow),
    ],
    ids=["one process", "fsdp 2", "experts", "ep 2"],
)
def test_r1_n_steps_and_n_more_equal_2n_steps_bit_for_bit(tmp_path, world: int, options: list[str]) -> None:
    whole, halves = Run(tmp_path / "whole", *options), Run(tmp_path / "halves", *options)
    assert whole(world=world) == 0
    # The schedule always covers ten steps: the run is stopped, not shortened.
    assert halves(world=world, fault="step:5:*:signal") == 75
    assert halves(world=world) == 0
    assert_same_history(halves, whole)


def test_r1_a_resume_restores_the_count_of_skipped_steps(tmp_path) -> None:
    whole, halves = Run(tmp_path / "whole"), Run(tmp_path / "halves")
    spoil = "tests.train.test_skips:spoil_step_3_on_rank_1"
    assert whole.start(world=2, patch=spoil).join() == [0, 0]
    assert halves.start("--train.steps=3", world=2, patch=spoil).join() == [0, 0]
    state = read_state(halves.path / "checkpoints" / step_name(3))
    assert state["progress"]["skipped_in_a_row"] == 1 and state["optimizer"]["updates"] == 2
    assert halves(world=2) == 0
    assert_same_history(halves, whole)


@pytest.mark.slow  # random runs, and layouts in tests/equivalence/test_resharding.py, also cover this
def test_r2_another_number_of_ranks_reads_the_same_data_on_the_same_curve(tmp_path) -> None:
    whole, moved = Run(tmp_path / "whole", *FLOAT64), Run(tmp_path / "moved", *FLOAT64)
    assert whole() == 0
    assert moved("--train.steps=3", world=2) == 0
    assert moved("--train.steps=6", world=4) == 0
    assert moved() == 0
    for a, b in zip(whole.metrics(), moved.metrics(), strict=True):
        assert a["tokens"] == b["tokens"]
        assert a["loss"] == pytest.approx(b["loss"], rel=0, abs=1e-9)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=0, abs=1e-9)


def test_r3_a_finished_run_started_again_does_nothing(tmp_path) -> None:
    run = Run(tmp_path)
    assert run() == 0
    before = run.metrics(times=True), run.checkpoints()
    assert run() == 0
    assert (run.metrics(times=True), run.checkpoints()) == before
    assert run.status()["state"] == "finished"
    assert "finished" in run.log()


def test_r3_a_finished_run_continues_with_more_steps(tmp_path) -> None:
    whole, extended = Run(tmp_path / "whole", "--train.steps=14"), Run(tmp_path / "extended")
    assert whole() == 0
    assert extended() == 0
    assert extended("--train.steps=14") == 0
    assert_same_history(extended, whole)


@pytest.mark.parametrize("unit", ["steps", "tokens"])
def test_r3_a_run_of_tokens_continues_with_another_batch_size_to_the_same_number_of_tokens(
    tmp_path, unit: str
) -> None:
    base = [option for option in BASE if not option.startswith(("--train.steps", "--schedule.name"))]
    options = [
        "--schedule.name=linear",
        "--optimizer.lr=1e-3",
        f"--schedule.unit={unit}",
        "--train.tokens=2560",
    ]
    run = Run(tmp_path, *options, base=base)
    assert run(fault="step:5:*:signal") == 75
    step, tokens = (run.metrics()[-1][key] for key in ("step", "tokens"))
    assert run("--train.global_batch_size=16") == 0
    left = -(-(2560 - tokens) // 512)
    last = run.metrics()[-1]
    assert (last["step"], last["tokens"]) == (step + left, tokens + 512 * left)
    assert last["lr"] == pytest.approx(1e-4, rel=1e-12)  # the decay ends with the run
    assert run("--train.global_batch_size=16") == 0 and "is finished" in run.output()


@pytest.mark.planted()
def test_r4_learning_rate_logging_and_layout_may_change_on_resume_and_take_effect(tmp_path) -> None:
    run = Run(tmp_path)
    assert run("--train.steps=5") == 0
    assert run("--optimizer.lr=0.0001", "--metrics.log_interval=5", "--parallel.tp=2", world=2) == 0
    lines = run.metrics()
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 10]
    assert lines[-1]["lr"] == 0.0001 and lines[0]["lr"] != 0.0001
    for change in ("optimizer.lr = 0.0001 (was 0.003)", "metrics.log_interval = 5", "parallel.tp = 2"):
        assert f"changed since step-00000005: {change}" in run.log()


@pytest.mark.parametrize(
    ("option", "key"),
    [
        ("--model.ffn_dim=96", "model.ffn_dim"),
        ("--run.seed=5", "run.seed"),
        ("--train.seq_len=16", "train.seq_len"),
        ("--model.rope_theta=1000.0", "model.rope_theta"),
    ],
)
def test_r4_another_model_or_data_order_is_refused_and_nothing_is_lost(
    tmp_path, option: str, key: str
) -> None:
    run = Run(tmp_path)
    assert run("--train.steps=4") == 0
    before = run.metrics(times=True), run.checkpoints()
    assert run(option) == 2
    assert (run.metrics(times=True), run.checkpoints()) == before
    assert key in run.output() and "Traceback" not in run.output()


ODD = ["--model.vocab_size=61", "--model.ffn_dim=50", "--model.tie_embeddings=true"]


def test_r5_tensors_indivisible_by_three_make_the_round_trip_exactly(tmp_path) -> None:
    """Tied embeddings too. From three ranks to one and back, with steps too small to change any parameter."""
    options = [*ODD, "--train.global_batch_size=6", "--train.micro_batch_size=1"]
    first, one, again = (Run(tmp_path / name, *options) for name in ("first", "one", "again"))
    assert first("--train.steps=2", world=3) == 0
    for run, world, source in ((one, 1, first), (again, 3, one)):
        newest = source.path / "checkpoints" / source.checkpoints()[-1]
        assert run("--train.steps=1", "--optimizer.lr=1e-30", f"--checkpoint.init={newest}", world=world) == 0
    parameters = [_parameters(run) for run in (first, one, again)]
    assert parameters[0] == parameters[1] == parameters[2]


def _parameters(run: Run) -> dict[str, bytes]:
    """Return name -> bytes of every parameter in the newest checkpoint."""
    reader = TensorReader(run.path / "checkpoints" / run.checkpoints()[-1])
    names = [name for name in reader.tensors() if name.startswith("model.")]
    return {name: reader.read(name).numpy().tobytes() for name in names}


def test_resume_none_begins_again_and_keeps_the_old_checkpoints_aside(tmp_path) -> None:
    run = Run(tmp_path)
    assert run("--train.steps=4") == 0
    first = run.metrics()
    assert run("--train.steps=4", "--checkpoint.resume=none") == 0
    assert run.metrics() == first
    assert ".aside-step-00000004" in run.checkpoints()


def test_resume_from_a_named_checkpoint_continues_there(tmp_path) -> None:
    whole, run = Run(tmp_path / "whole"), Run(tmp_path / "run")
    assert whole() == 0
    assert run("--train.steps=6") == 0
    assert run(f"--checkpoint.resume={run.path / 'checkpoints' / step_name(2)}") == 0
    assert run.metrics() == whole.metrics()


def test_init_takes_the_weights_and_starts_a_new_history(tmp_path) -> None:
    first, second = Run(tmp_path / "first"), Run(tmp_path / "second")
    assert first("--train.steps=10", "--optimizer.lr=0.003") == 0
    source = first.path / "checkpoints" / step_name(10)
    assert second("--train.steps=2", f"--checkpoint.init={source}", "--run.seed=3") == 0
    lines = second.metrics()
    assert [line["step"] for line in lines] == [1, 2]
    assert lines[0]["loss"] < first.losses()[0] - 0.1
