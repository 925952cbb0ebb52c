"""Writing and scoring text with a model."""

from forge.generate.cache import CachedScores
from forge.generate.sampling import NextScores, Sampling, choose, generate, recomputed
from forge.generate.score import token_scores
from forge.generate.text import TextStream

__all__ = [
    "CachedScores",
    "NextScores",
    "Sampling",
    "TextStream",
    "choose",
    "generate",
    "recomputed",
    "token_scores",
]
