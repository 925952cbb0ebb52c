"""Every schedule does each computation once, and no rank waits forever."""

from collections import Counter, deque
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forge.config import check_world
from forge.config.pipeline import IN_ROUNDS, ONE_PER_RANK, SPLIT_BACKWARD, V_SHAPED
from forge.parallel.pipeline import plan_pipeline
from forge.parallel.pipeline.schedule import (
    Action,
    Schedule,
    find_fault,
    make_schedule,
    place,
    read_schedule,
)
from forge.runtime import compat
from forge.runtime.errors import UserError
from tests.support.configs import pipeline_config as config

NAMES = [
    "GPipe",
    "1F1B",
    "Interleaved1F1B",
    "LoopedBFS",
    "InterleavedZeroBubble",
    "ZBVZeroBubble",
    "DualPipeV",
]


def accepted(name: str, pp: int, microbatches: int) -> bool:
    """Return whether the configuration check accepts this number of microbatches."""
    made = config(16, pp, f'schedule = "{name}"')
    train = made.train.model_copy(update={"global_batch_size": microbatches})
    try:
        return check_world(made.model_copy(update={"train": train}), pp).accumulation == microbatches
    except UserError:
        return False


def made(name: str, pp: int, microbatches: int, per_rank: int = 2) -> Schedule:
    return make_schedule(name, pp, pp * (1 if name in ONE_PER_RANK else per_rank), microbatches)


@pytest.mark.long
@settings(max_examples=60, deadline=None)
@given(st.sampled_from(NAMES), st.sampled_from([2, 3, 4, 8]), st.integers(1, 33), st.integers(2, 4))
def test_every_accepted_schedule_is_whole_and_ends(
    name: str, pp: int, microbatches: int, per_rank: int
) -> None:
    if not accepted(name, pp, microbatches):
        return
    schedule = made(name, pp, microbatches, 2 if name in V_SHAPED else per_rank)
    for one in (schedule, schedule.unsplit()):
        assert find_fault(one) is None
        assert 0 <= one.bubble < 1
        run_with_blocking_messages(one)


def run_with_blocking_messages(schedule: Schedule) -> None:
    """Run all programs. A message between two ranks completes only after both have reached it."""
    programs = [deque(program) for program in schedule.programs]
    stages = len(schedule.rank_of)
    done: set[Action] = set()

    def counterpart(action: Action) -> Action:
        step = 1 if action.kind == "SEND_F" else -1
        return Action(action.stage + step, action.kind.replace("SEND", "RECV"), action.microbatch)

    while any(programs):
        moved = False
        for program in programs:
            while program and program[0].kind in "FBIW":
                stage, kind, microbatch = action = program.popleft()
                moved = True
                needs = set()
                if kind == "F" and stage and schedule.rank_of[stage - 1] != schedule.rank_of[stage]:
                    needs = {Action(stage, "RECV_F", microbatch)}
                if (
                    kind in "BI"
                    and stage + 1 < stages
                    and schedule.rank_of[stage + 1] != schedule.rank_of[stage]
                ):
                    needs = {Action(stage, "RECV_B", microbatch)}
                assert needs <= done, f"{action} runs before its input has come"
                done.add(action)
        for program in programs:
            if program and program[0].kind.startswith("SEND"):
                other = programs[schedule.rank_of[counterpart(program[0]).stage]]
                if other and other[0] == counterpart(program[0]):
                    done |= {program.popleft(), other.popleft()}
                    moved = True
        assert moved, f"ranks wait for each other: {[str(p[0]) for p in programs if p]}"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("pp", [2, 4])
def test_any_two_ranks_exchange_messages_in_the_same_order(name: str, pp: int) -> None:
    schedule = made(name, pp, 2 * pp)
    rank_of = schedule.rank_of

    def between(a: int, b: int) -> list[tuple]:
        """Return a's messages with b: (direction, kind, receiving stage, microbatch)."""
        found = []
        for stage, kind, microbatch in schedule.programs[a]:
            if kind not in "FBIW":
                forward, sends = kind.endswith("F"), kind.startswith("SEND")
                peer = stage + (1 if forward == sends else -1)
                receiver = peer if sends else stage
                if rank_of[peer] == b:
                    found.append((a if sends else b, kind[-1], receiver, microbatch))
        return found

    for a, b in combinations(range(pp), 2):
        assert between(a, b) == between(b, a)


@pytest.mark.parametrize("name", V_SHAPED)
def test_v_shaped_schedules_bring_the_last_stage_to_the_first_rank(name: str) -> None:
    assert made(name, 4, 8).rank_of == (0, 1, 2, 3, 3, 2, 1, 0)
    assert [place(stage, 4, v_shaped=False) for stage in range(8)] == [0, 1, 2, 3, 0, 1, 2, 3]


@pytest.mark.parametrize(("pp", "microbatches"), [(2, 2), (2, 8), (4, 4), (4, 16), (8, 32)])
def test_idle_time_agrees_with_the_papers(pp: int, microbatches: int) -> None:
    """GPipe and 1F1B: (p - 1) / (m + p - 1); with v stages per rank: (p - 1) / (v m + p - 1) (Narayanan et al., 2.2)."""
    plain = (pp - 1) / (microbatches + pp - 1)
    assert made("GPipe", pp, microbatches).bubble == pytest.approx(plain)
    assert made("1F1B", pp, microbatches).bubble == pytest.approx(plain)
    for stages in (2, 4):
        looped = (pp - 1) / (stages * microbatches + pp - 1)
        assert made("Interleaved1F1B", pp, microbatches, stages).bubble == pytest.approx(looped)
    # Only the forwards' share remains (Qi et al., 2.3): a third, if each half of a backward is as long as a forward.
    third = (pp - 1) / (3 * 2 * microbatches + pp - 1)
    assert made("InterleavedZeroBubble", pp, microbatches).bubble == pytest.approx(third)
    if microbatches >= 2 * pp:
        assert made("ZBVZeroBubble", pp, microbatches).bubble == pytest.approx(third)
        assert made("DualPipeV", pp, microbatches).bubble == pytest.approx(third)


def test_an_unsplit_backward_leaves_more_idle_time() -> None:
    for name in SPLIT_BACKWARD:
        schedule = made(name, 4, 8)
        assert schedule.unsplit().bubble > schedule.bubble
        assert not {a.kind for order in schedule.unsplit().order for a in order} & set("IW")


@pytest.mark.parametrize(
    ("more", "starts", "why"),
    [
        ("", True, None),
        ("", False, "this version of PyTorch"),
        ("[compile]\nenabled = true", True, "compile.enabled"),
        ("[activation_checkpoint]\nmode = 'full'", True, "activation_checkpoint"),
        ("[activation_checkpoint]\nmode = 'offload'", True, None),
    ],
)
def test_a_backward_is_split_only_where_possible_and_the_log_gives_the_reason(
    more: str, starts: bool, why: str | None, monkeypatch, caplog
) -> None:
    monkeypatch.setattr(compat, "backward_starts_at_functions", lambda: starts)
    made = config(8, 2, f'schedule = "ZBVZeroBubble"\n{more}')
    train = made.train.model_copy(update={"global_batch_size": 8})
    made = made.model_copy(update={"train": train})
    with caplog.at_level("WARNING"):
        schedule = plan_pipeline(made, check_world(made, 2)).schedule
    kinds = {action.kind for order in schedule.order for action in order}
    assert ("I" in kinds) == (why is None)
    assert [record.getMessage().count(why or "") for record in caplog.records] == ([] if why is None else [1])


def test_1f1b_holds_fewer_microbatches_than_gpipe() -> None:
    def held(schedule: Schedule) -> int:
        most = now = 0
        for action in schedule.order[0]:
            now += {"F": 1, "B": -1}[action.kind]
            most = max(most, now)
        return most

    assert held(made("GPipe", 4, 16)) == 16 and held(made("1F1B", 4, 16)) == 4


def test_the_last_backward_of_a_stage_is_known() -> None:
    schedule = made("Interleaved1F1B", 2, 4)
    assert schedule.last_backward(0) == {Action(0, "B", 3), Action(2, "B", 3)}
    kinds = Counter(
        action.kind for rank in range(2) for action in made("ZBVZeroBubble", 2, 4).last_backward(rank)
    )
    assert sum(kinds.values()) == 4 and kinds["W"] > 0


@pytest.mark.parametrize(
    ("name", "pp", "microbatches", "needed"),
    [("1F1B", 4, 3, 4), ("Interleaved1F1B", 4, 2, 4), ("ZBVZeroBubble", 4, 3, 4), ("DualPipeV", 4, 7, 8)],
)
def test_too_few_microbatches_are_refused_with_the_number_needed(
    name: str, pp: int, microbatches: int, needed: int
) -> None:
    made = config(16, pp, f'schedule = "{name}"')
    train = made.train.model_copy(update={"global_batch_size": microbatches})
    with pytest.raises(UserError, match=f"needs at least {needed} microbatches") as caught:
        check_world(made.model_copy(update={"train": train}), pp)
    assert f"but a step has {microbatches}" in str(caught.value) and caught.value.exit_code == 2


@pytest.mark.parametrize("name", IN_ROUNDS)
def test_microbatches_in_incomplete_rounds_are_refused_with_valid_numbers(name: str) -> None:
    made = config(16, 4, f'schedule = "{name}"')
    train = made.train.model_copy(update={"global_batch_size": 9})
    with pytest.raises(UserError, match="for 8 or 10 microbatches"):
        check_world(made.model_copy(update={"train": train}), 4)
    assert accepted(name, 4, 8) and accepted(name, 4, 10)


def write(schedule: Schedule, path) -> None:
    path.write_text("\n".join(",".join(map(str, order)) for order in schedule.order) + "\n")


@pytest.mark.parametrize("name", NAMES)
def test_a_schedule_is_unchanged_by_writing_and_reading(name: str, tmp_path) -> None:
    schedule = made(name, 2, 4)
    write(schedule, tmp_path / "s.csv")
    assert read_schedule(tmp_path / "s.csv", 2, 4) == schedule


def test_pytorchs_own_files_can_be_read(tmp_path) -> None:
    path = tmp_path / "s.csv"
    path.write_text(
        "0UNSHARD,0F0,0SEND_F0,,(0F1;0B0)OVERLAP_F_B,0RECV_B1,0B1,0REDUCE_GRAD\n,1RECV_F0,1F0,1B0,1F1,1B1\n"
    )
    assert [str(a) for a in read_schedule(path, 2, 2).order[0]] == ["0F0", "0F1", "0B0", "0B1"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0B0\n", "has 1 lines, but needs one for each of parallel.pp = 2 ranks"),
        ("0F0,0B0\n2F0,2B0\n", "stages must be 0, 1"),
        ("0F0,0B0,0F0\n1F0,1B0\n", "occurs twice"),
        ("0F0,0B0\n1F0,1B0,0F1\n", "stage 0 is on two ranks"),
        ("0F0\n1F0,1B0\n", "stage 0 must have 0F0, and either 0B0"),
        ("0F0,0B0\n1F0,1I0\n", "stage 1 must have"),
        ("0F0,0B0,0F1,0B1\n1F0,1B0,1F1,1B1\n", "a step has 1 microbatches, counted from 0"),
        ("0B0,0F0\n1F0,1B0\n", r"deadlock: none of the next actions \(0B0, 1F0\) can run"),
        ("0F0,fine\n1F0,1B0\n", '"fine" is not an action'),
    ],
)
def test_an_invalid_schedule_file_is_refused(text: str, message: str, tmp_path) -> None:
    (tmp_path / "s.csv").write_text(text)
    with pytest.raises(UserError, match=f"(?s)pipeline.schedule.*{message}"):
        read_schedule(tmp_path / "s.csv", 2, 1)


def test_a_file_with_separate_weight_gradients_keeps_parameters_gathered(tmp_path) -> None:
    path = tmp_path / "s.csv"
    parallel = {"reshard_after_forward": "always"}

    def plan(name: str, mode: str, **keys: str) -> Schedule:
        write(made(name, 2, 8), path)
        chosen = config(8, 2, f'schedule = "{path}"\n[activation_checkpoint]\nmode = "{mode}"')
        chosen = chosen.model_copy(update={"parallel": chosen.parallel.model_copy(update=parallel | keys)})
        return plan_pipeline(chosen, check_world(chosen, 2)).schedule

    with pytest.raises(UserError, match=r"would free parameters before .*; use auto or never"):
        plan("ZBVZeroBubble", "none")
    plan("ZBVZeroBubble", "full")  # backward is not split
    plan("ZBVZeroBubble", "none", data_parallel="zero1")
    plan("Interleaved1F1B", "none")


def test_a_missing_file_is_refused(tmp_path) -> None:
    with pytest.raises(UserError, match="No such file"):
        read_schedule(tmp_path / "s.csv", 2, 1)
