"""The source of each launch of one step: the kernel, the node of autograd, and the line of forge."""

from __future__ import annotations

import ctypes
import traceback
from collections import Counter

import torch

from forge.train.trainer import Trainer
from tests.simulated_gpu.counting import COUNTED, Counting, short

_CALL = ctypes.CFUNCTYPE(None, ctypes.c_char_p)


class Sources(Counting):
    """Count the launches of step COUNTED by source. Write `sources.RANK` to the run directory, most launches first.

    A line has the number, the kernel, the node that runs in backward ("-" in forward), and the innermost line of forge,
    separated by tabs. Compiled functions have the line that calls them. Autograd's own additions have neither node nor line.
    """

    def __init__(self, trainer: Trainer):
        super().__init__(trainer)
        self._sources: Counter[tuple[str, str, str]] = Counter()
        self._called = _CALL(self._seen)  # keeps the function alive while the runtime calls it

    def before_step(self, step: int) -> None:
        super().before_step(step)
        if step == COUNTED:
            self._device.simgpu_on_launch(self._called)

    def after_step(self, step: int) -> None:
        if step == COUNTED:
            self._device.simgpu_on_launch(_CALL())
            kernels = short([kernel for kernel, *_ in self._sources])
            lines = [
                "\t".join([str(number), kernel, node, line])
                for kernel, ((_, node, line), number) in zip(kernels, self._sources.items(), strict=True)
            ]
            path = self._path.with_name(self._path.name.replace("counts", "sources"))
            path.write_text("\n".join(sorted(lines, key=lambda one: -int(one.partition("\t")[0]))) + "\n")
        super().after_step(step)

    def _seen(self, kernel: bytes) -> None:
        node = torch._C._current_autograd_node()
        frames = [frame for frame in traceback.extract_stack() if "/forge/" in frame.filename]
        line = f"{frames[-1].filename.rpartition('/forge/')[2]}:{frames[-1].lineno}" if frames else "-"
        self._sources[kernel.decode(), node.name() if node else "-", line] += 1
