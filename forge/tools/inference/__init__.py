"""Use a trained model: generate text, score given text, evaluate."""

from forge.tools.inference.cache import CachedScores
from forge.tools.inference.drafting import DraftedScores
from forge.tools.inference.sampling import (
    NextScores,
    Sampling,
    TextStream,
    choose_token,
    generate,
    recomputed,
)
from forge.tools.inference.scoring import token_scores

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
