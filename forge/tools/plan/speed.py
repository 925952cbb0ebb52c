"""`speed_of`: the step time of a run, from the times of its stages and the timeline of its pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from forge.config import Config, Degrees
from forge.model import flops_per_token
from forge.parallel.build import build_meta_model
from forge.parallel.pipeline import plan_pipeline
from forge.parallel.pipeline.plan import layer_costs
from forge.parallel.pipeline.schedule import Action, TimedAction, idle_share
from forge.parallel.precision import DTYPES
from forge.tools.plan.estimate import PACES, Pace, Spent, StepTime
from forge.tools.plan.float8 import products_in_float8
from forge.tools.plan.hardware import Hardware
from forge.tools.plan.links import message_seconds


@dataclass(frozen=True)
class Speed:
    """The estimated speed of a run. step_s: seconds of a step. step_s_low, step_s_high: bounds of step_s.

    compute_s, communication_s, idle_s: seconds that the slowest rank spends in computation, exposed collectives and
    pipeline idle time. bubble: idle fraction of a step. days: duration of the run. mfu: None if the peak is unknown.
    timeline: actions of each pipeline rank, in seconds; None without a pipeline.
    """

    step_s: float
    step_s_low: float
    step_s_high: float
    compute_s: float
    communication_s: float
    idle_s: float
    bubble: float
    tokens_per_second: float
    days: float
    mfu: float | None
    timeline: list[list[TimedAction]] | None = None


def speed_of(
    config: Config, degrees: Degrees, times: Sequence[Sequence[StepTime]], hardware: Hardware
) -> Speed:
    """Return the speed of a run. times: for each pp rank, one StepTime per element of PACES."""
    steps = [
        _step(config, degrees, [of_rank[number] for of_rank in times], hardware, pace)
        for number, pace in enumerate(PACES)
    ]
    seconds, compute, timeline = steps[1]
    bubble = 0.0 if timeline is None else idle_share(timeline)
    idle = bubble * seconds
    train = config.train
    tokens = train.global_batch_size * train.seq_len / seconds
    float8 = bool(products_in_float8(config, hardware))
    peak = hardware.peak_flops("float8" if float8 else config.precision.compute)
    flops = flops_per_token(build_meta_model(config), train.seq_len)
    return Speed(
        step_s=seconds,
        step_s_low=steps[0][0],
        step_s_high=steps[2][0],
        compute_s=compute,
        communication_s=max(0.0, seconds - compute - idle),
        idle_s=idle,
        bubble=bubble,
        tokens_per_second=tokens,
        days=train.steps * seconds / 86400,
        mfu=flops * tokens / (peak * degrees.world) if peak else None,
        timeline=timeline,
    )


def _step(
    config: Config, degrees: Degrees, times: list[StepTime], hardware: Hardware, pace: Pace
) -> tuple[float, float, list[list[TimedAction]] | None]:
    """Return seconds of a step, seconds of computation on the busiest rank, and the timeline (None without a pipeline)."""
    if degrees.pp > 1:
        return _pipelined(config, degrees, times, hardware, pace)
    (time,) = times
    return *_sequential(time, degrees.accumulation), None


def _sequential(time: StepTime, microbatches: int) -> tuple[float, float]:
    """Return the seconds of a step without a pipeline, and the seconds of its computation.

    An untraced microbatch counts like the middle microbatch of the trace.
    """
    # The computation of backward does not hide the copies of forward.
    spent = [
        time.forward[number].with_exposed_copies() + time.backward.get(number, Spent()).with_exposed_copies()
        for number in sorted(time.forward)
    ]
    all_of_them = [*spent, *[spent[len(spent) // 2]] * (microbatches - len(spent)), time.update]
    return sum(one.total for one in all_of_them), sum(one.compute for one in all_of_them)


def _pipelined(
    config: Config, degrees: Degrees, times: list[StepTime], hardware: Hardware, pace: Pace
) -> tuple[float, float, list[list[TimedAction]]]:
    """Return seconds of a step, seconds of computation on the busiest rank, and the timed actions of each rank."""
    plan, costs = plan_pipeline(config, degrees), layer_costs(config)
    rank_of = plan.schedule.rank_of
    work = [costs.of(stage) for stage in plan.stages]
    share = [
        one / sum(other for other, rank in zip(work, rank_of, strict=True) if rank == rank_of[stage])
        for stage, one in enumerate(work)
    ]
    forward = [_typical(time.forward) for time in times]
    backward = [_typical(time.backward) for time in times]
    # Parameters are gathered in the first microbatch, and gradients are reduced in the last.
    ends = {
        (action.stage, action.microbatch)
        for rank in range(degrees.pp)
        for action in plan.schedule.last_backward(rank)
    }

    def duration(action: Action) -> float:
        rank = rank_of[action.stage]
        time, number = times[rank], action.microbatch
        if action.kind == "F":
            spent = time.forward[min(time.forward)] if number == 0 else forward[rank]
        elif time.backward and (action.stage, number) in ends:
            spent = time.backward[
                number if len(time.backward) == degrees.accumulation else max(time.backward)
            ]
        else:
            spent = backward[rank]
        return spent.total * share[action.stage] * (0.5 if action.kind in "IW" else 1.0)

    train = config.train
    pieces = degrees.cp * (degrees.tp if config.parallel.sequence_parallel else 1)
    size = (
        train.micro_batch_size
        * train.seq_len
        // pieces
        * config.model.dim
        * DTYPES[config.precision.compute].itemsize
    )
    message = pace.links * message_seconds(size, degrees.world - degrees.world // degrees.pp, hardware)
    timeline = plan.schedule.timed(duration, message)
    seconds = max(timed.stop for of_rank in timeline for timed in of_rank)
    compute = [
        degrees.accumulation * (forward[rank].compute + backward[rank].compute) + times[rank].update.compute
        for rank in range(degrees.pp)
    ]
    return seconds + max(time.update.total for time in times), max(compute), timeline


def _typical(spent: dict[int, Spent]) -> Spent:
    """Return the time of the middle traced microbatch; of two, the first."""
    return spent[sorted(spent)[(len(spent) - 1) // 2]] if spent else Spent()
