"""Use a trained model: generate text, score given text, evaluate."""

from forge.inference.cache import CachedScores
from forge.inference.drafting import DraftedScores
from forge.inference.sampling import NextScores, Sampling, TextStream, choose_token, generate, recomputed
from forge.inference.scoring import token_scores

__all__ = [
    "CachedScores",
    "DraftedScores",
    "NextScores",
    "Sampling",
    "TextStream",
    "choose_token",
    "generate",
    "recomputed",
    "token_scores",
]
