"""Defects for `Run.start(patch="tests.support.spoil:NAME")`.

Most depend on the data, so they occur again when a rank reads the same samples again."""

from __future__ import annotations

import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch


def samples_32_to_55() -> None:
    """Make the gradient non-finite on the rank with one of these samples. With 8 samples per batch: steps 5 to 7."""
    _spoil_gradients(lambda samples: any(32 <= sample < 56 for sample in samples), torch.nan)


def samples_36_to_39() -> None:
    """Make the gradient non-finite in the second half of step 5: with two ranks, on rank 1 only."""
    _spoil_gradients(lambda samples: any(36 <= sample < 40 for sample in samples), torch.nan)


def infinity_in_one_gradient() -> None:
    """Set one element of one gradient to infinity, on rank 1, in step 5."""

    def spoil(model, sums) -> None:
        if os.environ["RANK"] == "1":
            next(shard for shard in model.shards if shard.boxes).grad.view(-1)[0] = torch.inf

    _spoil(lambda samples: 36 in samples, spoil)


def loss_that_is_no_number() -> None:
    """Make the loss of step 5 NaN on all ranks; gradients stay finite."""
    _spoil(lambda samples: 32 <= samples.start < 40, lambda model, sums: sums.values[:2].fill_(torch.nan))


def everything_from_32() -> None:
    """Make the gradient non-finite for all data from step 5 on."""
    _spoil_gradients(lambda samples: max(samples) >= 32, torch.nan)


def spike_at_56() -> None:
    """Multiply the gradient by a thousand in step 8."""
    _spoil_gradients(lambda samples: 56 in samples, 1000.0)


def _spoil_gradients(when: Callable[[range], bool], factor: float) -> None:
    def spoil(model, sums) -> None:
        for shard in model.shards:
            if shard.grad is not None and shard.boxes:
                shard.grad.mul_(factor)

    _spoil(when, spoil)


def _spoil(when: Callable[[range], bool], spoil: Callable[[Any, Any], object]) -> None:
    """Call `spoil(model, sums)` after backward of a step whose local samples satisfy `when`."""
    from forge.parallel.pipeline.execute import PipelinedModel
    from forge.parallel.step.model import SequentialModel

    for kind in (SequentialModel, PipelinedModel):
        _spoil_kind(kind, when, spoil)


def _spoil_kind(kind: Any, when: Callable[[range], bool], spoil: Callable[[Any, Any], object]) -> None:
    compute, finalize = kind.forward_backward, kind.finalize_gradients

    def remembering(self, batch, tokens):
        self.latest = (
            range(batch.first_sample, batch.first_sample + len(batch.tokens)),
            compute(self, batch, tokens),
        )
        return self.latest[1]

    def spoiled(self):
        finalize(self)
        samples, sums = self.latest
        if when(samples):
            spoil(self, sums)

    kind.forward_backward, kind.finalize_gradients = remembering, spoiled


def one_bit_after_step_5() -> None:
    """Flip a bit of a parameter on the last rank, once. A repetition of the step flips no bit."""
    _flip_a_bit(_last_ranks("w1.weight"), lambda step, seen: step == 5 and not seen)


def one_bit_of_an_expert_after_step_5() -> None:
    """Flip a bit of a routed expert's weight, once."""
    _flip_a_bit(_last_ranks("experts.w13"), lambda step, seen: step == 5 and not seen)


def one_bit_of_a_tied_copy_after_step_5() -> None:
    """Flip a bit of the last stage's copy of a tied weight, once. The first stage owns the weight."""
    _flip_a_bit(lambda model: model.tied._last, lambda step, seen: step == 5 and not seen)


def one_bit_after_every_step_from_5() -> None:
    """Flip a bit after every step, like a broken node."""
    _flip_a_bit(_last_ranks("w1.weight"), lambda step, seen: step >= 5)


def _last_ranks(ending: str) -> Callable[[Any], Any]:
    import torch.distributed as dist

    def find(model: Any) -> Any:
        if dist.get_rank() < dist.get_world_size() - 1:
            return None
        return next(one for one in model.shards if one.name.endswith(ending) and one.boxes)

    return find


def _flip_a_bit(find: Callable[[Any], Any], when: Callable[[int, bool], bool]) -> None:
    """Flip a bit of the tensor returned by `find(model)`. If it returns None, flip no bit on this rank."""
    from forge.train.trainer import Trainer

    make_step, seen = Trainer.step, set()

    def flipping(self) -> None:
        make_step(self)
        step, shard = self.progress.step, find(self.model)
        if shard is not None and when(step, step in seen):
            shard.data.view(torch.int32).view(-1)[0] ^= 1 << 20
        seen.add(step)

    Trainer.step = flipping


def half_a_second_for_each_step() -> None:
    """Replace the time limit's clock: half a second per step, so a busy machine has no effect."""
    import forge.resilience.stopping as stopping
    from forge.train.trainer import Trainer

    clock = SimpleNamespace(now=0.0)
    stopping.time = SimpleNamespace(monotonic=lambda: clock.now)
    begin, step = stopping.TimeLimit.__init__, Trainer.step

    def timed(self) -> None:
        step(self)
        clock.now += 0.5

    stopping.TimeLimit.__init__ = lambda self, limit_s, _, *more: begin(self, limit_s, clock.now, *more)
    Trainer.step = timed


def slow_data_on_rank_1() -> None:
    """Slow down rank 1's data."""
    _slow_down("data")


def slow_forward_on_rank_1() -> None:
    """Slow down rank 1's forward."""
    _slow_down("forward")


def slow_optimizer_on_rank_1() -> None:
    """Slow down rank 1's optimizer."""
    _slow_down("optimizer")


def _slow_down(phase: str) -> None:
    """Replace the clock: every wait for data, feed-forward and update takes 10 ms, but 50 ms on rank 1 in `phase`.

    So a busy machine makes no rank slow."""
    import queue

    import forge.resilience.stragglers as stragglers
    from forge.model.feed_forward import FeedForward
    from forge.optim.adamw import AdamW

    clock = SimpleNamespace(now=0.0)
    stragglers.time = SimpleNamespace(perf_counter=lambda: clock.now)

    def takes(seconds: float, owner: type, method: str) -> None:
        work = getattr(owner, method)

        def timed(*args, **kwargs):
            clock.now += seconds
            return work(*args, **kwargs)

        setattr(owner, method, timed)

    for name, owner, method in (
        ("data", queue.Queue, "get"),
        ("forward", FeedForward, "forward"),
        ("optimizer", AdamW, "step"),
    ):
        takes(0.05 if name == phase and os.environ["RANK"] == "1" else 0.01, owner, method)
