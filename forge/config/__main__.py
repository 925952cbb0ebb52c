"""Prints the reference of all keys: `python -m forge.config > docs/configuration.md`."""

from forge.config.help import docs_text

print(docs_text(), end="")
