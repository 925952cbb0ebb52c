"""The command line of train.py: which action, which config file, which overrides. Values are judged later."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from forge.config.keys import keys, similar
from forge.errors import nearest

FLAGS = ("--config", "--help", "--print-config", "--plan", "--world-size", "--json")
Action = Literal["run", "help", "print_config", "plan"]
# Of several the first counts.
ACTIONS: dict[str, Action] = {"--help": "help", "--plan": "plan", "--print-config": "print_config"}


@dataclass(frozen=True)
class CommandLine:
    """What argv asks for.

    `raw` holds the overrides in order, each a dotted key and its text as typed; `problems` one line for each
    argument that makes no sense, so that `load_config` can tell them together with what is wrong in the file.
    """

    action: Action = "run"
    config: str | None = None
    raw: tuple[tuple[str, str], ...] = ()
    world_size: int | None = None
    json: bool = False
    problems: tuple[str, ...] = ()


def parse_command_line(argv: list[str]) -> CommandLine:
    """Sort `argv` (without the program's name) into a `CommandLine`. Raises nothing: see `problems`."""
    rest = list(argv)
    switches: set[str] = set()
    config: str | None = None
    world_size: int | None = None
    raw, problems = [], []
    while rest:
        argument = rest.pop(0)
        name, equals, text = ("--help" if argument == "-h" else argument).partition("=")
        if not name.startswith("--") or name == "--":
            hint = (
                f", and a config file is given as --config {argument}" if argument.endswith(".toml") else ""
            )
            problems.append(f"{argument}: not an option; options look like --section.key=value{hint}")
        elif name in ACTIONS or name == "--json":
            switches.add(name)
            if equals:
                problems.append(f"{argument}: {name} takes no value")
        elif name not in FLAGS and "." not in name:
            problems.append(f"{name}: no such option{_suggestion(name)}")
            if not equals and rest and not rest[0].startswith("-"):
                rest.pop(0)  # the value of an option that does not exist
        elif not equals and (not rest or rest[0].startswith("--")):
            problems.append(f"{name}: needs a value, as in {name}=VALUE")
        else:
            value = text if equals else rest.pop(0)
            if name == "--config" and config is not None:
                problems.append(f"--config {value}: given twice, first as {config}; one file describes a run")
            elif name == "--config":
                config = value
            elif name != "--world-size":
                raw.append((name.removeprefix("--"), value))
            elif value.isdecimal() and int(value) > 0:
                world_size = int(value)
            else:
                problems.append(f"--world-size {value}: must be an integer >= 1")
    json = "--json" in switches
    if "--plan" not in switches and (json or world_size is not None):
        problems.append(f"{'--json' if json else '--world-size'}: only has a meaning with --plan")
    action: Action = next((ACTIONS[name] for name in ACTIONS if name in switches), "run")
    return CommandLine(action, config, tuple(raw), world_size, json, tuple(problems))


def _suggestion(option: str) -> str:
    """What an option without a section was meant to be: a key without its section, a section, or a flag."""
    name = option.removeprefix("--").replace("-", "_")
    homes = similar(name)
    if not any(key.endswith(f".{name}") for key in homes):
        for key in keys().values():
            if name in (key.section, key.section.rpartition(".")[2]):
                return (
                    f"; [{key.section}] is a section, its keys are set one by one, as in --{key.name}=VALUE"
                )
        if flag := nearest(option, FLAGS):
            return f"; did you mean {flag}?"
    meant = " or ".join(f"--{key}" for key in homes)
    return f"; did you mean {meant}?" if homes else "; --help lists all options"
