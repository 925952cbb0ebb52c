"""Sampling from a model."""

from forge.generate.sampling import choose, generate

__all__ = ["choose", "generate"]
