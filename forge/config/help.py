"""What --help prints, made from the schema."""

from __future__ import annotations

import textwrap

from forge.config.keys import Key, keys, sections, title

WIDTH = 100

USAGE = """\
usage: train.py --config PATH_OR_NAME [--section.key=value ...]

Pretrains a language model. The same command starts a run, resumes it after any stop, and with more
train.steps extends it. Alone or under torchrun or srun:

  python train.py --config debug.toml
  torchrun --nproc-per-node 8 train.py --config 7b.toml --data.sources='[{path="data/web"}]'
  srun python train.py --config 70b.toml --run.name=large --train.steps 200000

options:
  --config PATH_OR_NAME    a TOML file: a path, or a name in configs/, with or without .toml
  --section.key=value      overrides the file; also --section.key value. Values are TOML literals:
                           5  3e-4  true  [0.9, 0.95]  '[{path="synthetic", weight=1.0}]'
                           and bare words are text: --run.name=second
  --print-config           print the complete configuration as TOML and exit
  --plan [--world-size N] [--json]
                           what the run needs on N processes (not built yet)
  -h, --help               this text

exit codes: 0 finished; 2 configuration or command line wrong; 75 stopped after saving, run it
again; 76 ended by the watchdog; 77 no usable checkpoint; any other: failed."""


def help_text() -> str:
    """What --help prints: usage, examples, exit codes, and every key with its type, default and meaning."""
    blocks = [USAGE]
    for name, section in sections().items():
        heading = textwrap.fill(f"[{name}]  {title(section)}", WIDTH, subsequent_indent="  ")
        blocks.append(
            "\n".join([heading, *(_help_entry(key) for key in keys().values() if key.section == name)])
        )
    return "\n\n".join(blocks)


def _help_entry(key: Key) -> str:
    default = "required" if key.field.is_required() else f"default {key.default}"
    head = textwrap.fill(
        f"--{key.name}  {key.allowed}; {default}", WIDTH, initial_indent="  ", subsequent_indent="      "
    )
    body = textwrap.fill(key.meaning, WIDTH, initial_indent="      ", subsequent_indent="      ")
    return f"{head}\n{body}"
