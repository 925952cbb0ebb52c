"""Defects put into runs by `Run.start(patch="tests.faults.spoil:NAME")`, keyed by data, so that who reads it again meets
them again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def samples_32_to_55() -> None:
    """A gradient that is not finite on the rank that reads one of these samples, in steps 5 to 7 of a batch of 8."""
    _spoil_gradients(lambda samples: any(32 <= sample < 56 for sample in samples), torch.nan)


def samples_36_to_39() -> None:
    """The same in the second half of step 5: with two ranks, on rank 1 only."""
    _spoil_gradients(lambda samples: any(36 <= sample < 40 for sample in samples), torch.nan)


def infinity_in_one_gradient() -> None:
    """One element of one gradient, on rank 1, in step 5."""

    def spoil(model, sums) -> None:
        next(shard for shard in model.shards if shard.boxes).grad.view(-1)[0] = torch.inf

    _spoil(lambda samples: 36 in samples, spoil)


def loss_that_is_no_number() -> None:
    """The loss of step 5 on all ranks; gradients stay finite."""
    _spoil(lambda samples: 32 <= samples.start < 40, lambda model, sums: sums.values[:2].fill_(torch.nan))


def everything_from_32() -> None:
    """The same for all data from step 5 on."""
    _spoil_gradients(lambda samples: max(samples) >= 32, torch.nan)


def spike_at_56() -> None:
    """A finite gradient, a thousand times too large, in step 8."""
    _spoil_gradients(lambda samples: 56 in samples, 1000.0)


def _spoil_gradients(when: Callable[[range], bool], factor: float) -> None:
    def spoil(model, sums) -> None:
        for shard in model.shards:
            if shard.grad is not None and shard.boxes:
                shard.grad.mul_(factor)

    _spoil(when, spoil)


def _spoil(when: Callable[[range], bool], spoil: Callable[[Any, Any], object]) -> None:
    """Call `spoil(model, sums)` after a backward over samples (of this rank) for which `when` holds."""
    from forge.parallel.execute import SequentialModel

    compute = SequentialModel.forward_backward

    def spoiled(self, batch, tokens):
        sums = compute(self, batch, tokens)
        if when(range(batch.first_sample, batch.first_sample + len(batch.tokens))):
            spoil(self, sums)
        return sums

    SequentialModel.forward_backward = spoiled


def one_bit_on_rank_1_after_step_5() -> None:
    """A bit of a parameter flips on one of its ranks; when the step is made again it does not."""
    _flip_a_bit(lambda step, seen: step == 5 and not seen)


def one_bit_on_rank_1_after_every_step_from_5() -> None:
    """The same again and again, as of a broken machine."""
    _flip_a_bit(lambda step, seen: step >= 5)


def _flip_a_bit(when: Callable[[int, bool], bool]) -> None:
    import torch.distributed as dist

    import forge.train.loop as loop

    after_step, seen = loop.Training.after_step, set()

    def flipping(self) -> None:
        step = self.progress.step
        if dist.get_rank() == 1 and when(step, step in seen):
            shard = next(one for one in self.model.shards if one.name.endswith("w1.weight"))
            shard.data.view(torch.int32).view(-1)[7] ^= 1 << 20
        seen.add(step)
        after_step(self)

    loop.Training.after_step = flipping


def slow_data_on_rank_1() -> None:
    """Rank 1 reads slowly."""
    from forge.data.dataset import PackedDataset

    _slow_down(PackedDataset, "__getitem__", 0.05)


def slow_forward_on_rank_1() -> None:
    """Rank 1 computes slowly."""
    from forge.model.feed_forward import FeedForward

    _slow_down(FeedForward, "forward", 0.05)


def slow_optimizer_on_rank_1() -> None:
    """Rank 1 updates slowly."""
    from forge.optim import AdamW

    _slow_down(AdamW, "step", 0.2)


def _slow_down(owner: type, method: str, seconds: float) -> None:
    import os
    import time

    quick = getattr(owner, method)

    def slow(*args, **kwargs):
        if os.environ["RANK"] == "1":
            time.sleep(seconds)
        return quick(*args, **kwargs)

    setattr(owner, method, slow)
