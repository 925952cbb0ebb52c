"""The command line of train.py: which action, which config file, which overrides. Values are judged later."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from forge.config.keys import keys, nearest, sections

FLAGS = ("--config", "--help", "--print-config", "--plan", "--world-size", "--json")
Action = Literal["run", "help", "print_config", "plan"]


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
    reader = _Reader(list(argv))
    while reader.rest:
        reader.read_option()
    return reader.finish()


@dataclass
class _Reader:
    rest: list[str]
    actions: set[Action] = field(default_factory=set)
    config: str | None = None
    raw: list[tuple[str, str]] = field(default_factory=list)
    world_size: int | None = None
    json: bool = False
    problems: list[str] = field(default_factory=list)

    def read_option(self) -> None:
        argument = self.rest.pop(0)
        if argument == "-h":
            argument = "--help"
        if not argument.startswith("--") or argument == "--":
            self.problems.append(
                f"{argument}: not an option; options look like --section.key=value{_as_config(argument)}"
            )
            return
        name, equals, text = argument.partition("=")
        given = text if equals else None
        if name == "--config":
            self._read_config(given)
        elif name == "--world-size":
            self._read_world_size(given)
        elif name in FLAGS:
            self._read_switch(name, given)
        else:
            self._read_override(name, given)

    def _value(self, name: str, given: str | None) -> str | None:
        """The value after `=` or in the next argument. What starts with two dashes is the next option."""
        if given is not None:
            return given
        if self.rest and not self.rest[0].startswith("--"):
            return self.rest.pop(0)
        self.problems.append(f"{name}: needs a value, as in {name}=VALUE")
        return None

    def _read_config(self, given: str | None) -> None:
        value = self._value("--config", given)
        if value is not None and self.config is not None:
            self.problems.append(
                f"--config {value}: given twice, first as {self.config}; one file describes a run"
            )
        self.config = self.config or value

    def _read_world_size(self, given: str | None) -> None:
        value = self._value("--world-size", given)
        if value is None:
            return
        if value.isdecimal() and int(value) > 0:
            self.world_size = int(value)
        else:
            self.problems.append(f"--world-size {value}: must be an integer >= 1")

    def _read_switch(self, name: str, given: str | None) -> None:
        if given is not None:
            self.problems.append(f"{name}={given}: {name} takes no value")
        if name == "--json":
            self.json = True
        else:
            actions: dict[str, Action] = {
                "--help": "help",
                "--print-config": "print_config",
                "--plan": "plan",
            }
            self.actions.add(actions[name])

    def _read_override(self, name: str, given: str | None) -> None:
        key = name[2:]
        if "." in key:
            value = self._value(name, given)
            if value is not None:
                self.raw.append((key, value))
            return
        if given is None and self.rest and not self.rest[0].startswith("-"):
            self.rest.pop(0)  # the value of an option that does not exist
        self.problems.append(f"{name}: no such option{_suggestion(name)}")

    def finish(self) -> CommandLine:
        if "plan" not in self.actions and (self.world_size is not None or self.json):
            self.problems.append(
                f"{'--json' if self.json else '--world-size'}: only has a meaning with --plan"
            )
        order: tuple[Action, ...] = ("help", "plan", "print_config")
        return CommandLine(
            action=next((action for action in order if action in self.actions), "run"),
            config=self.config,
            raw=tuple(self.raw),
            world_size=self.world_size,
            json=self.json,
            problems=tuple(self.problems),
        )


def _suggestion(option: str) -> str:
    """What an option without a section was meant to be: a flag, a key without its section, or a section."""
    name = option[2:].replace("-", "_")
    homes = [key for key in keys() if key.rsplit(".", 1)[1] == name]
    if homes:
        return "; did you mean " + " or ".join(f"--{key}" for key in homes) + "?"
    section = next((section for section in sections() if name in (section, section.rpartition(".")[2])), None)
    if section is not None:
        return f"; [{section}] is a section, its keys are set one by one, as in --{_first_key(section)}=VALUE"
    flag = nearest(option, FLAGS)
    if flag is not None:
        return f"; did you mean {flag}?"
    last = nearest(name, {key.rsplit(".", 1)[1] for key in keys()})
    homes = [key for key in keys() if key.rsplit(".", 1)[1] == last]
    return (
        "; did you mean " + " or ".join(f"--{key}" for key in homes) + "?"
        if homes
        else "; --help lists all options"
    )


def _first_key(section: str) -> str:
    return next(key.name for key in keys().values() if key.section == section)


def _as_config(argument: str) -> str:
    return f", and a config file is given as --config {argument}" if argument.endswith(".toml") else ""
