"""Weights in and out, in the format of Hugging Face. What is covered: `architectures.ARCHITECTURES`."""

from forge.hf.exporting import export_weights
from forge.hf.importing import import_weights

__all__ = ["export_weights", "import_weights"]
