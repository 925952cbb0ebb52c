"""Weights in and out, in the format of Hugging Face. What is covered: `architectures.ARCHITECTURES`."""

from forge.checkpoint.hf.exporting import Ends, export_weights
from forge.checkpoint.hf.importing import import_weights

__all__ = ["Ends", "export_weights", "import_weights"]
