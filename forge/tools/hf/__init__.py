"""Import and export of weights and tokenizers in Hugging Face's formats.

`architectures.ARCHITECTURES` lists the models.
"""

from forge.tools.hf.exporting import export_weights
from forge.tools.hf.importing import import_weights

__all__ = ["export_weights", "import_weights"]
