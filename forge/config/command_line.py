"""The command line of train.py: the action, the config file and the overrides, whose values are checked later."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from forge.config.keys import keys
from forge.errors import nearest

Action = Literal["run", "help", "print_config", "plan"]
# If several are given, the first in this order counts.
ACTIONS: dict[str, Action] = {"--help": "help", "--plan": "plan", "--print-config": "print_config"}
FLAGS = (*ACTIONS, "--json", "--config", "--world-size")


@dataclass(frozen=True)
class CommandLine:
    """The contents of argv.

    `raw`: the overrides in order, each a dotted key and its text as typed. `problems`: one line for each invalid
    argument, which `load_config` reports together with the errors in the file.
    """

    action: Action = "run"
    config: str | None = None
    raw: tuple[tuple[str, str], ...] = ()
    world_size: int | None = None
    json: bool = False
    problems: tuple[str, ...] = ()


def parse_command_line(argv: list[str]) -> CommandLine:
    """Parse `argv` (without the program's name). Raises nothing: see `CommandLine.problems`."""
    rest, switches, raw, problems = list(argv), set(), [], []
    config: str | None = None
    world_size: int | None = None
    while rest:
        argument = rest.pop(0)
        name, equals, text = ("--help" if argument == "-h" else argument).partition("=")
        if not name.startswith("--") or name == "--":
            hint = f", and give a config file as --config {argument}" if argument.endswith(".toml") else ""
            problems.append(f"{argument}: not an option; write options as --section.key=value{hint}")
        elif name in ACTIONS or name == "--json":
            switches.add(name)
            if equals:
                problems.append(f"{argument}: {name} takes no value")
        elif name not in FLAGS and "." not in name:
            problems.append(f"{name}: no such option; {_suggestion(name)}")
            if not equals and rest and not rest[0].startswith("-"):
                rest.pop(0)  # the value of the option that does not exist
        elif not equals and (not rest or rest[0].startswith("--")):
            problems.append(f"{name}: needs a value, as in {name}=VALUE")
        else:
            value = text if equals else rest.pop(0)
            if name == "--config" and config is not None:
                problems.append(f"--config {value}: given twice, first as {config}; give one file")
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
        problems.append(f"{'--json' if json else '--world-size'}: can only be used with --plan")
    action: Action = next((ACTIONS[name] for name in ACTIONS if name in switches), "run")
    return CommandLine(action, config, tuple(raw), world_size, json, tuple(problems))


def _suggestion(option: str) -> str:
    """The likely meaning of an option without a dot: a section, a key without its section, or a flag."""
    name = option.removeprefix("--").replace("-", "_")
    for key in keys().values():
        if name in (key.section, key.section.rpartition(".")[2]):
            return f"[{key.section}] is a section; set its keys one by one, as in --{key.name}=VALUE"
    flags = {flag.removeprefix("--").replace("-", "_"): flag for flag in FLAGS}
    close = nearest(name, [*flags, *(key.last for key in keys().values())])
    meant = [f"--{key.name}" for key in keys().values() if key.last == close]
    meant += [flags[close]] if close in flags else []
    return f"did you mean {' or '.join(meant)}?" if meant else "--help lists all options"
