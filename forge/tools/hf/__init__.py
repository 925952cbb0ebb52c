"""Weights and tokenizers in and out, in the formats of Hugging Face. `architectures.ARCHITECTURES` lists what is covered."""

from forge.tools.hf.exporting import export_weights
from forge.tools.hf.importing import import_weights

__all__ = ["export_weights", "import_weights"]
