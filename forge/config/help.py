"""Help from the schema: `--help`, and the reference (`python -m forge.config > docs/reference/configuration.md`)."""

from __future__ import annotations

import textwrap

from forge.config.keys import Key, keys, lists, sections, title

WIDTH = 100

USAGE = """\
usage: train.py --config PATH_OR_NAME [--section.key=value ...]

Pretrains a language model. The same command starts a run, resumes it after any stop, and extends it
if train.steps is larger. Run it with plain python, torchrun or srun:

  python train.py --config debug.toml
  torchrun --nproc-per-node 8 train.py --config 7b.toml --data.sources='[{path="data/web"}]'
  srun python train.py --config 70b.toml --run.name=large --train.steps 200000

options:
  --config PATH_OR_NAME    a TOML file: a path, or a name in configs/, with or without .toml
  --section.key=value      override a key of the file; also --section.key value. Values are TOML:
                           5  3e-4  true  [0.9, 0.95]  '[{path="synthetic", weight=1.0}]'
                           A bare word is a string: --run.name=second
  --print-config           print the complete configuration as TOML and exit
  --plan [--world-size N] [--hardware NAME] [--json]
                           print the memory and communication of the run on N processes (default:
                           the fewest possible); with a GPU (h100, ...) also the step time, and
                           whether the run fits: docs/guides/planning.md
  --plan --search --world-size N --hardware NAME
                           print layouts that fit, the fastest first, with their overrides
  -h, --help               print this text

exit codes: 0 finished; 2 configuration or command line wrong; 3 --plan: does not fit;
75 stopped after saving, run it again; 76 ended by the watchdog; 77 no usable checkpoint;
any other: failed."""

DOCS_HEAD = """\
# Configuration

<!-- Made by `python -m forge.config > docs/reference/configuration.md` from the schema in forge/config. -->

After this page you can look up any key. A run is described by one TOML file and by overrides on the command line:

```
python train.py --config debug.toml --train.steps=800 --optimizer.lr 1e-3
```

`--config` takes a path or a name in `configs/`, with or without `.toml`. Override values are TOML literals;
a bare word is a string. `--print-config` prints the complete configuration, which can be loaded again;
`--help` prints the tables below as text. All errors are reported at once, with exit code 2. A valid value of a
key that the chosen options do not use is ignored, and a run names such keys in one line at its start. A value
in the table of an optimizer that is not chosen is refused."""


def help_text() -> str:
    """Return the output of --help: usage, examples, exit codes, and the type, default and meaning of every key."""
    blocks = [USAGE]
    for name, section in sections().items():
        heading = textwrap.fill(f"{_brackets(name)}  {title(section)}", WIDTH, subsequent_indent="  ")
        blocks.append("\n".join([heading, *map(_entry, _keys_of(name))]))
    return "\n\n".join(blocks)


def docs_text() -> str:
    """Return the text of docs/reference/configuration.md: one table for each section."""
    blocks = [DOCS_HEAD]
    for name, section in sections().items():
        head = ["| key | type | default | meaning |", "|---|---|---|---|"]
        blocks.append(
            "\n".join([f"## `{_brackets(name)}`", "", title(section), "", *head, *map(_row, _keys_of(name))])
        )
    return "\n\n".join(blocks) + "\n"


def _brackets(section: str) -> str:
    return f"[[{section}]]" if section in lists() else f"[{section}]"


def _keys_of(section: str) -> list[Key]:
    return [key for key in keys().values() if key.section == section]


def _entry(key: Key) -> str:
    default = key.default if key.required else f"default {key.default}"
    name = key.last if key.section in lists() else f"--{key.name}"
    head = textwrap.indent(textwrap.fill(f"{name}  {key.allowed}; {default}", WIDTH - 6), " " * 6)
    body = textwrap.indent(textwrap.fill(key.meaning, WIDTH - 6), " " * 6)
    return f"{head.removeprefix(' ' * 4)}\n{body}"


def _row(key: Key) -> str:
    default = key.default if key.in_words else f"`{key.default}`"
    allowed, meaning = (text.replace("|", "\\|").replace("*", "\\*") for text in (key.allowed, key.meaning))
    return f"| `{key.last}` | {allowed} | {default} | {meaning} |"
