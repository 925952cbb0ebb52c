"""Prints the reference of all keys: `python -m forge.config > docs/reference/configuration.md`."""

from forge.config.help import docs_text

if __name__ == "__main__":
    print(docs_text(), end="")
