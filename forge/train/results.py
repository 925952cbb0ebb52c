"""The results of steps: numbers on their way from the device to the host, one step late and without a wait."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from forge.hook import StepInfo, StepResult
from forge.parallel.gradients import GradientReport
from forge.parallel.model import Sums
from forge.parallel.routers import RouterReport
from forge.resilience.delayed import DelayedRead


class StepResults:
    """A queue of at most one step. All ranks push and pop the same numbers, so all take the same decisions by them.

    Routers' values are part of a result in steps for which `with_routers(step)` holds.
    """

    def __init__(self, device: torch.device, with_routers: Callable[[int], bool]):
        self.stop_requested = False
        """Whether any rank has asked for the end of the run, in a step whose result is known."""
        self._device, self._with_routers = device, with_routers
        self._delayed = DelayedRead(device)

    def push(self, info: StepInfo, sums: Sums, report: GradientReport, routers: RouterReport | None) -> None:
        """Start to copy the numbers of the step just launched; returns at once."""
        parts = [sums.values, torch.stack([report.norm, report.skip.double(), report.stop])]
        layers: tuple[int, ...] = ()
        if routers is not None and self._with_routers(info.step):
            parts.append(routers.values.flatten())
            layers = routers.layers
        self._delayed.push((info, layers), torch.cat(parts))

    def pop(self) -> StepResult | None:
        """The result of the step pushed last, once the device has finished it; None if it has been popped.

        The next step may have been launched by then but for its update, so that the model is still in the state that the
        step has left.
        """
        began = time.perf_counter()
        ready = self._delayed.pop(flush=True)
        if ready is None:
            return None
        (info, layers), values = ready
        _, cross_entropy, z_loss, tokens, norm, skipped, stop = values[:7]
        self.stop_requested |= stop > 0
        return StepResult(
            **vars(info),
            loss=cross_entropy / max(tokens, 1.0),
            z_loss=z_loss / max(tokens, 1.0),
            grad_norm=norm,
            valid_tokens=tokens,
            skipped=skipped > 0,
            waited_s=time.perf_counter() - began,
            router_layers=layers,
            routers=values[7:],
        )

    def clear(self) -> None:
        """Forget what has not been popped."""
        self._delayed = DelayedRead(self._device)
