"""The key reference, made from the schema: `python -m forge.config.describe > docs/configuration.md`."""

from __future__ import annotations

from forge.config.keys import Key, keys, sections, title

DOCS_HEAD = """\
# Configuration

<!-- Made by `python -m forge.config.describe > docs/configuration.md` from the schema in forge/config. -->

A run is described by one TOML file and by overrides on the command line:

```
python train.py --config debug.toml --train.steps=800 --optimizer.lr 1e-3
```

`--config` takes a path or a name in `configs/`, with or without `.toml`. Override values are TOML literals;
bare words are text. `--print-config` prints the complete configuration, which loads again to the same one;
`--help` prints what stands below. Everything wrong is reported at once, with exit code 2. A valid value of a
key that the chosen options do not use is ignored.
"""


def docs_text() -> str:
    """docs/configuration.md: the same as a table for each section."""
    blocks = [DOCS_HEAD.rstrip()]
    for name, section in sections().items():
        rows = [_row(key) for key in keys().values() if key.section == name]
        head = ["| key | type | default | meaning |", "|---|---|---|---|"]
        blocks.append("\n".join([f"## `[{name}]`", "", title(section), "", *head, *rows]))
    return "\n\n".join(blocks) + "\n"


def _row(key: Key) -> str:
    in_words = key.field.is_required() or key.field.json_schema_extra
    default = key.default if in_words else f"`{key.default}`"
    return f"| `{key.last}` | {_cell(key.allowed)} | {default} | {_cell(key.meaning)} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("*", "\\*")


if __name__ == "__main__":
    print(docs_text(), end="")
