"""The learning rate of every step, as a pure function of the step."""

from __future__ import annotations

import math

from forge.config import Config, Phases
from forge.config.schema import ScheduleConfig


def planned_rate(config: Config, phases: Phases, step: int, tokens: int) -> float:
    """Return the learning rate of update `step`, counted from 1. The peak is the phase's lr (see `learning_rate`).

    tokens: number of tokens trained before the update. With `schedule.unit = "tokens"` the schedule counts tokens up to
    the end of the update.
    """
    plan, steps = phases.at(tokens), config.train.steps
    if config.schedule.unit == "steps":
        return learning_rate(config.schedule, lr=plan.lr, step=step, steps=steps)
    usual = config.train.global_batch_size * config.train.seq_len
    total = phases.tokens_after(steps - step + 1, tokens)
    warmup = warmup_steps(config.schedule, -(-total // usual)) * usual
    schedule = config.schedule.model_copy(update={"warmup_steps": warmup})
    return learning_rate(schedule, lr=plan.lr, step=tokens + plan.tokens, steps=total)


def learning_rate(schedule: ScheduleConfig, *, lr: float, step: int, steps: int) -> float:
    """Return the learning rate of update `step`, counted from 1, in a run of `steps` updates with peak `lr`.

    Every schedule is a warm-up, a plateau and a decay, some of them empty:

    - warm-up: lr * step / warmup_steps up to step = warmup_steps, so step 1 has a rate above 0;
    - plateau: lr, up to the step of `decay_start`;
    - decay: lr * (m + (1 - m) * f(p)), with m = min_lr_ratio, f the shape, and p the completed fraction of the decay. p
      = 1 at step = steps, so the last step and every later step have rate m * lr.
    """
    assert step >= 1
    warmup = warmup_steps(schedule, steps)
    if step < warmup:
        return lr * step / warmup
    start = decay_start(schedule, steps)
    if step <= start or start >= steps:
        return lr
    done = min(1.0, (step - start) / (steps - start))
    low = schedule.min_lr_ratio
    return lr * (low + (1.0 - low) * _remaining(_shape(schedule), done))


def warmup_steps(schedule: ScheduleConfig, steps: int) -> int:
    """Return the number of warm-up steps. The default is 1 % of `steps`, at most 2000 (a common choice in long runs)."""
    return min(2000, steps // 100) if schedule.warmup_steps is None else schedule.warmup_steps


def decay_start(schedule: ScheduleConfig, steps: int) -> int:
    """Return the last step before the decay.

    wsd (warm-up, stable, decay; Hu et al. 2024, MiniCPM, arXiv:2404.06395): the last round(decay_fraction * steps)
    steps decay. cosine, linear: the decay starts at the end of the warm-up. constant: no decay. A decay never starts
    during the warm-up.
    """
    if schedule.name == "constant":
        return max(steps, warmup_steps(schedule, steps))
    plateau_end = steps - round(schedule.decay_fraction * steps) if schedule.name == "wsd" else 0
    return max(plateau_end, warmup_steps(schedule, steps))


def _shape(schedule: ScheduleConfig) -> str:
    return schedule.decay_shape if schedule.name == "wsd" else schedule.name


def _remaining(shape: str, done: float) -> float:
    """Return the factor f(p) of `learning_rate`, which falls from 1 to 0.

    shape: the shape of the decay. done: p, the completed fraction of the decay.

    linear: 1 - p. cosine: (1 + cos(pi p)) / 2 (Loshchilov and Hutter 2017, arXiv:1608.03983, without
    restarts). sqrt: 1 - sqrt(p) (the best decay after a plateau in Hägele et al. 2024, arXiv:2405.18392).
    """
    if shape == "linear":
        return 1.0 - done
    if shape == "cosine":
        return 0.5 * (1.0 + math.cos(math.pi * done))
    assert shape == "sqrt", shape
    return 1.0 - math.sqrt(done)
