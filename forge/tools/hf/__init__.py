"""Import and export weights and tokenizers in the formats of Hugging Face. `table.ARCHITECTURES` lists the model classes."""

from forge.tools.hf.exporting import export_weights
from forge.tools.hf.importing import import_weights

__all__ = ["export_weights", "import_weights"]
