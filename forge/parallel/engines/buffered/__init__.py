"""Data parallelism on contiguous buffers: ddp, zero1 and zero2."""

from forge.parallel.engines.buffered.engine import Buffered

__all__ = ["Buffered"]
