"""Log lines about the model: size, layout and memory per parameter."""

from __future__ import annotations

import logging

from forge.config import Config, Degrees, unused_keys
from forge.model import Transformer, parameter_counts
from forge.observe.memory_report import MemoryReport
from forge.parallel.step.model import ParallelModel

log = logging.getLogger(__name__)


def summarize(
    model: ParallelModel, whole: Transformer, config: Config, degrees: Degrees, memory: MemoryReport
) -> None:
    """Log the model's size, memory and layout, and the unused keys of the config.

    whole: the whole model on the meta device.
    """
    counts = parameter_counts(whole)
    log.info("%s: %s", model.engine_name, memory.per_parameter(counts.total))
    size = f"{counts.total:,} parameters"
    if counts.active < counts.total:
        size += f" ({counts.active:,} active)"
    axes = vars(degrees) | {"accumulation": 1}
    layout = " ".join(f"{name}={degree}" for name, degree in axes.items() if degree > 1) or "one process"
    steps = f"{degrees.accumulation} microbatches per step"
    if degrees.accumulation > 1:
        steps += f"; {model.accumulation_memory_summary()}"
    log.info("%s: %s, %s, %s", config.run.name, size, layout, steps)
    if unused := unused_keys(config, (name for name, _ in whole.named_parameters())):
        log.info("set, but not used: %s", "; ".join(unused))
