"""Writing and scoring text with a model."""

from forge.inference.cache import CachedScores
from forge.inference.sampling import NextScores, Sampling, choose, generate, recomputed
from forge.inference.score import token_scores
from forge.inference.text import TextStream

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
