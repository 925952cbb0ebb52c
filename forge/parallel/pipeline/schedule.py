"""Each pipeline rank's actions over time: the order of computations, the messages between them, the idle time.

PyTorch's schedule classes produce most orders, as tables of actions; execute.py runs them. Actions are written in
PyTorch's form, e.g. `2F0`: stage, kind, microbatch.

    F  forward                                   B  backward
    I  gradient of the stage's input alone       W  gradients of the stage's weights, computed later

References: GPipe (Huang et al. 2019), 1F1B and its interleaved form (Narayanan et al. 2021), breadth-first (Lamy-Poirier
2023), zero bubble and its V shape (Qi et al. 2023), DualPipeV (DeepSeek-AI 2024).
"""

from __future__ import annotations

import csv
import re
from collections import deque
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

from forge.config.pipeline import V_SHAPED
from forge.runtime.errors import UserError

# In units of a forward. Each half of a backward costs about as much as a forward.
DURATION = {"F": 1, "B": 2, "I": 1, "W": 1}
_CELL = re.compile(r"(\d+)([FBIW])(\d+)$")


class Action(NamedTuple):
    """One action of a pipeline rank: a computation or a message, for one stage and one microbatch.

    kind: F, B, I, W, or a message: SEND_F, RECV_F (activations), SEND_B, RECV_B (gradients of activations). stage: the
    computing, sending or receiving stage.
    """

    stage: int
    kind: str
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


class TimedAction(NamedTuple):
    """An action with its start and stop times, in the unit of the durations given to `Schedule.timed`."""

    action: Action
    start: float
    stop: float


def idle_share(timeline: Sequence[Sequence[TimedAction]]) -> float:
    """Return the bubble: the idle share of the total time of all ranks, 0 to 1."""
    actions = [timed for of_rank in timeline for timed in of_rank]
    busy = sum(timed.stop - timed.start for timed in actions)
    return 1 - busy / (max(timed.stop for timed in actions) * len(timeline))


@dataclass(frozen=True)
class Schedule:
    """The order of computations on each rank of a pipeline.

    order: for each rank of the pp axis, its computations in one optimizer step. rank_of: stage -> rank.
    """

    order: tuple[tuple[Action, ...], ...]
    rank_of: tuple[int, ...]
    microbatches: int

    @cached_property
    def timeline(self) -> list[list[TimedAction]]:
        """Return each rank's actions over time, assuming instant messages and stages of equal cost."""
        return self.timed(lambda action: DURATION[action.kind])

    def timed(self, duration: Callable[[Action], float], message: float = 0) -> list[list[TimedAction]]:
        """Return each rank's actions over time. duration: time of an action. message: time of a message to another rank."""
        done: dict[Action, tuple[int, float]] = {}
        free: list[float] = [0] * len(self.order)
        timed: list[list[TimedAction]] = [[] for _ in self.order]
        for rank, action in self._sequence:
            ready = [done[needed] for needed in self._needs(action)]
            start = max([free[rank], *(at + message * (other != rank) for other, at in ready)])
            free[rank] = start + duration(action)
            done[action] = rank, free[rank]
            timed[rank].append(TimedAction(action, start, free[rank]))
        return timed

    @property
    def bubble(self) -> float:
        """Return the idle share of the total time of all ranks, according to `timeline`."""
        return idle_share(self.timeline)

    @cached_property
    def programs(self) -> list[list[Action]]:
        """Return each rank's order of computations and messages.

        Two ranks list the messages between them in the same order. A receive is listed when its sender has just sent,
        so each message is as early as possible. Ranks cannot deadlock, even if a backend matches messages only by
        order.
        """
        programs: list[list[Action]] = [[] for _ in self.order]
        for rank, action in self._sequence:
            programs[rank].append(action)
            stage, kind, microbatch = action
            # F feeds the next stage, B and I feed the previous stage, W feeds none.
            to, which = (stage + 1, "F") if kind == "F" else (stage - 1, "B")
            if kind != "W" and 0 <= to < len(self.rank_of) and self.rank_of[to] != rank:
                programs[rank].append(Action(stage, f"SEND_{which}", microbatch))
                programs[self.rank_of[to]].append(Action(to, f"RECV_{which}", microbatch))
        return programs

    def last_backward(self, rank: int) -> set[Action]:
        """Return, for each stage of `rank`, the action that completes the stage's gradients."""
        last = {action.stage: action for action in self.order[rank] if action.kind in "BW"}
        return set(last.values())

    @cached_property
    def _sequence(self) -> list[tuple[int, Action]]:
        """Return (rank, action) for all actions. Each action comes after the actions whose results it needs.

        Ranks take turns, with one action each if possible. Raises UserError for a deadlock.
        """
        sequence: list[tuple[int, Action]] = []
        done: set[Action] = set()
        left = [deque(actions) for actions in self.order]
        while any(left):
            before = len(done)
            for rank, actions in enumerate(left):
                if actions and self._needs(actions[0]) <= done:
                    done.add(actions[0])
                    sequence.append((rank, actions.popleft()))
            if len(done) == before:
                waiting = ", ".join(str(actions[0]) for actions in left if actions)
                raise UserError(
                    f"pipeline.schedule: deadlock: none of the next actions ({waiting}) can run; reorder the schedule"
                )
        return sequence

    def _needs(self, action: Action) -> set[Action]:
        """Return the actions, on any rank, whose results `action` needs."""
        stage, kind, microbatch = action
        if kind == "F":
            return {Action(stage - 1, "F", microbatch)} if stage else set()
        if kind == "W":
            return {Action(stage, "I", microbatch)}
        needed = {Action(stage, "F", microbatch)}
        if stage + 1 < len(self.rank_of):
            after = Action(stage + 1, "B", microbatch)
            needed.add(after if after in self._known else after._replace(kind="I"))
        return needed

    @cached_property
    def _known(self) -> frozenset[Action]:
        return frozenset(action for order in self.order for action in order)

    def forward_only(self) -> Schedule:
        """Return a schedule of one microbatch through all stages, without a backward."""
        order = tuple(
            tuple(Action(stage, "F", 0) for stage, place in enumerate(self.rank_of) if place == rank)
            for rank in range(len(self.order))
        )
        return Schedule(order, self.rank_of, 1)

    def unsplit(self, stages: Container[int] | None = None) -> Schedule:
        """Return the schedule with unsplit backwards: B replaces I, and W is removed.

        stages: the stages to change; None: all.
        """

        def whole(action: Action) -> bool:
            return stages is None or action.stage in stages

        order = tuple(
            tuple(
                action._replace(kind="B") if action.kind == "I" and whole(action) else action
                for action in rank
                if not (action.kind == "W" and whole(action))
            )
            for rank in self.order
        )
        return Schedule(order, self.rank_of, self.microbatches)


def make_schedule(name: str, ranks: int, stages: int, microbatches: int) -> Schedule:
    """Return the schedule `name`. The configuration's checks have validated the numbers of stages and microbatches."""
    makers = {"GPipe": _gpipe, "1F1B": _one_forward_one_backward}
    if name in makers:
        order = tuple(tuple(makers[name](rank, ranks, microbatches)) for rank in range(ranks))
        return Schedule(order, tuple(range(ranks)), microbatches)
    # Imported lazily: this loads PyTorch's compiler, which takes most of a second.
    from torch.distributed.pipelining.schedules import get_schedule_class

    rank_of = tuple(place(stage, ranks, v_shaped=name in V_SHAPED) for stage in range(stages))
    # PyTorch's classes compute the tables of all ranks from one rank's stages, and read only these attributes of a
    # stage.
    stub = SimpleNamespace(num_stages=stages, group_size=ranks, group_rank=0, group=None, submod=None)
    made = get_schedule_class(name)([stub] * (stages // ranks), microbatches)
    order = tuple(_actions(made.pipeline_order[rank]) for rank in range(ranks))
    return Schedule(order, rank_of, microbatches)


def place(stage: int, ranks: int, *, v_shaped: bool) -> int:
    """Return the rank of a stage.

    Stages are assigned to ranks 0, 1, ... in turn, round after round. With a V shape, every second round is in
    descending order.
    """
    turn, rank = divmod(stage, ranks)
    return ranks - 1 - rank if v_shaped and turn % 2 else rank


def read_schedule(path: Path, ranks: int, microbatches: int) -> Schedule:
    """Read a schedule from a CSV file in PyTorch's format.

    The file has one line per rank and one computation per cell, e.g. 2F0; empty cells are idle time. Messages and
    actions on shards are ignored, because forge adds its own. Raises UserError if the file does not exist or is not a
    valid schedule for `ranks` and `microbatches`.
    """
    key = f"pipeline.schedule = {path}"
    try:
        with open(path, newline="") as file:
            rows = [[cell.strip() for cell in row] for row in csv.reader(file)]
    except OSError as error:
        raise UserError(f"{key}: {error.strerror}") from None
    if len(rows) != ranks:
        raise UserError(
            f"{key}: has {len(rows)} lines, but needs one for each of parallel.pp = {ranks} ranks"
        )
    order = tuple(tuple(action for cell in row for action in _parse(cell, key)) for row in rows)
    rank_of = {action.stage: rank for rank, actions in enumerate(order) for action in actions}
    if sorted(rank_of) != list(range(len(rank_of))):
        raise UserError(f"{key}: stages must be 0, 1, ..., but the schedule has stages {sorted(rank_of)}")
    schedule = Schedule(order, tuple(rank_of[stage] for stage in sorted(rank_of)), microbatches)
    problem = find_fault(schedule)
    if problem:
        raise UserError(f"{key}: {problem}")
    return schedule


def find_fault(schedule: Schedule) -> str | None:
    """Return a sentence about a fault of the schedule. Return None if every stage processes every microbatch exactly once.

    Raises UserError for a deadlock.
    """
    seen: dict[Action, int] = {}
    for rank, actions in enumerate(schedule.order):
        for action in actions:
            if action in seen:
                return f"{action} occurs twice"
            if schedule.rank_of[action.stage] != rank:
                return f"stage {action.stage} is on two ranks"
            seen[action] = rank
    for stage in range(len(schedule.rank_of)):
        for microbatch in range(schedule.microbatches):
            forward, whole, inputs, weights = (Action(stage, kind, microbatch) in seen for kind in "FBIW")
            if not (forward and whole != inputs and inputs == weights):
                return (
                    f"stage {stage} must have {stage}F{microbatch}, and either {stage}B{microbatch} or both "
                    f"{stage}I{microbatch} and {stage}W{microbatch}; a step has {schedule.microbatches} microbatches"
                )
    beyond = [str(action) for action in seen if action.microbatch >= schedule.microbatches]
    if beyond:
        return f"has {beyond[0]}, but a step has {schedule.microbatches} microbatches, counted from 0"
    _ = schedule.programs  # raises UserError for a deadlock
    return None


def _parse(cell: str, key: str) -> list[Action]:
    inner = re.fullmatch(r"\((.*)\)OVERLAP_F_B", cell)
    if inner:
        return [action for part in inner[1].split(";") for action in _parse(part, key)]
    found = _CELL.match(cell)
    if found:
        return [Action(int(found[1]), found[2], int(found[3]))]
    if cell and not re.match(r"\d+(SEND|RECV|UNSHARD|RESHARD|REDUCE)", cell):
        raise UserError(
            f'{key}: "{cell}" is not an action; write actions like 2F0: stage, one of F B I W, microbatch'
        )
    return []


def _actions(table: Sequence) -> tuple[Action, ...]:
    """Convert one rank's actions from PyTorch's form. An overlapped forward and backward become two consecutive actions."""
    leaves = [leaf for action in table if action is not None for leaf in action.sub_actions or (action,)]
    return tuple(Action(leaf[0], leaf[1].value, leaf[2]) for leaf in leaves)


def _gpipe(rank: int, ranks: int, microbatches: int) -> list[Action]:
    return [Action(rank, kind, microbatch) for kind in "FB" for microbatch in range(microbatches)]


def _one_forward_one_backward(rank: int, ranks: int, microbatches: int) -> list[Action]:
    ahead = min(ranks - 1 - rank, microbatches)
    order = [Action(rank, "F", microbatch) for microbatch in range(ahead)]
    for microbatch in range(microbatches):
        if microbatch + ahead < microbatches:
            order.append(Action(rank, "F", microbatch + ahead))
        order.append(Action(rank, "B", microbatch))
    return order
