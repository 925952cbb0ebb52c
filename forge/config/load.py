"""Load a `Config` from a TOML file and overrides on the command line; every error is reported at once."""

from __future__ import annotations

import copy
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_origin

from pydantic import ValidationError

from forge.config.checks import check
from forge.config.explain import Values, explain, key_path
from forge.config.extensions import schema_for
from forge.config.keys import (
    from_literal,
    item_class,
    keys,
    lists,
    literals,
    members,
    read_toml,
    section_class,
    value_at,
)
from forge.config.ladder import apply_ladder
from forge.config.phases import with_steps
from forge.config.problem import KeyPath, Problem, problem, raise_all
from forge.config.schema import Config
from forge.config.section import Section
from forge.runtime.errors import UserError, nearest

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
CommandAction = Literal["run", "help", "print_config", "plan"]
# If the command line has several of these flags, the first in this order applies.
ACTIONS: dict[str, CommandAction] = {"--help": "help", "--plan": "plan", "--print-config": "print_config"}
SWITCHES = (*ACTIONS, "--json", "--search")
FLAGS = (*SWITCHES, "--config", "--world-size", "--hardware")


@dataclass(frozen=True)
class CommandLine:
    """A parsed command line.

    raw: the overrides in order, each as (dotted key, text as typed). problems: the invalid arguments, reported by
    `load_config` together with the errors in the file.
    """

    action: CommandAction = "run"
    config: str | None = None
    raw: tuple[tuple[str, str], ...] = ()
    world_size: int | None = None
    hardware: str | None = None
    json: bool = False
    search: bool = False
    problems: tuple[Problem, ...] = ()


def parse_command_line(argv: list[str]) -> CommandLine:
    """Parse `argv` (without the program's name). Errors are collected in `CommandLine.problems`, not raised."""
    rest, switches, raw = list(argv), set(), []
    problems: list[Problem] = []
    config: str | None = None
    world_size: int | None = None
    hardware: str | None = None
    while rest:
        argument = rest.pop(0)
        name, equals, value = ("--help" if argument == "-h" else argument).partition("=")
        if not name.startswith("--") or name == "--":
            hint = f", and give a config file as --config {argument}" if argument.endswith(".toml") else ""
            remedy = f"write options as --section.key=value{hint}"
            problems.append(Problem((argument,), "not an option", remedy))
            continue
        if name in SWITCHES:
            switches.add(name)
            if equals:
                problems.append(Problem((argument,), f"{name} takes no value"))
            continue
        known = name in FLAGS or "." in name or name.removeprefix("--") in lists()
        if not equals and rest and not rest[0].startswith("--" if known else "-"):
            equals, value = "=", rest.pop(0)
        if not known:
            problems.append(Problem((name,), "no such option", _suggestion(name)))
        elif not equals:
            problems.append(Problem((name,), f"needs a value, as in {name}=VALUE"))
        elif name == "--config" and config is not None:
            twice = f"given twice, first as {config}"
            problems.append(Problem((f"--config {value}",), twice, "give one file"))
        elif name == "--config":
            config = value
        elif name == "--hardware":
            hardware = value
        elif name != "--world-size":
            raw.append((name.removeprefix("--"), value))
        elif value.isdecimal() and int(value) > 0:
            world_size = int(value)
        else:
            problems.append(Problem((f"--world-size {value}",), "must be an integer >= 1"))
    given = {
        "--json": "--json" in switches,
        "--search": "--search" in switches,
        "--world-size": world_size is not None,
        "--hardware": hardware is not None,
    }
    if "--plan" not in switches:
        alone = [name for name, there in given.items() if there]
        problems += [Problem((name,), "can only be used with --plan") for name in alone]
    elif "--print-config" in switches:
        problems.append(Problem(("--plan",), "cannot be combined with --print-config"))
    action: CommandAction = next((ACTIONS[name] for name in ACTIONS if name in switches), "run")
    return CommandLine(
        action,
        config,
        tuple(raw),
        world_size,
        hardware,
        json=given["--json"],
        search=given["--search"],
        problems=tuple(problems),
    )


def _suggestion(option: str) -> str:
    """Return a suggestion for an unknown option without a dot: a key of a section, or a flag."""
    name = option.removeprefix("--").replace("-", "_")
    single = [key for key in keys().values() if key.section not in lists()]
    for key in single:
        if name in (key.section, key.section.rpartition(".")[2]):
            return f"[{key.section}] is a section; set its keys one by one, as in --{key.name}=VALUE"
    flags = {flag.removeprefix("--").replace("-", "_"): flag for flag in FLAGS}
    close = nearest(name, [*flags, *(key.last for key in single)])
    meant = [f"--{key.name}" for key in single if key.last == close]
    meant += [flags[close]] if close in flags else []
    return f"did you mean {' or '.join(meant)}?" if meant else "--help lists all options"


def load_config(argv: list[str]) -> Config:
    """Return the configuration of `argv` (without the program's name). Raises UserError like `load_command`."""
    return load_command(parse_command_line(argv))


def load_command(command: CommandLine) -> Config:
    """Return the configuration of a command line.

    Raises UserError (exit 2) with every error in the command line, the file and the overrides.
    """
    problems = list(command.problems)
    path = _find_config(command, problems)
    values = Values({}) if path is None else _read_file(path)
    problems += [wrong for key, text in command.raw if (wrong := _override(values, key, text))]
    _let_length_replace(values)
    run = values.tree.setdefault("run", {})
    if path is not None and isinstance(run, dict):
        run.setdefault("name", path.stem)
    return _validated(values, problems)


def parse_toml_text(
    text: str, source: str = "the config text", *, stored: bool = False, import_classes: bool = True
) -> Config:
    """Return the configuration in the TOML document `text`.

    source: name of the document in messages. stored: the configuration of an existing run; see `check`. import_classes:
    import classes named by import path and check their keys; False: accept their keys unchecked. Raises UserError (exit 2)
    with every error in the text.
    """
    return _validated(_read_text(text, source), [], stored, import_classes)


def _validated(
    values: Values, problems: list[Problem], stored: bool = False, import_classes: bool = True
) -> Config:
    apply_ladder(values)
    train = values.tree.get("train")
    by_tokens = isinstance(train, dict) and bool(train.get("tokens")) and "steps" not in train
    if isinstance(train, dict) and by_tokens:
        train["steps"] = 1  # until the steps are known
    config, found = examine(values, stored, import_classes)
    raise_all(problems + found)
    assert config is not None
    resolved = with_steps(config)
    if not by_tokens and resolved.train.steps != config.train.steps:
        made = f"train.tokens = {config.train.tokens} gives {resolved.train.steps} steps"
        remedy = "leave train.steps out, or set train.tokens = 0"
        raise_all([replace(problem("train.steps", made, remedy), value=config.train.steps)])
    return resolved


def examine(
    values: Values, stored: bool = False, import_classes: bool = True
) -> tuple[Config | None, list[Problem]]:
    """Return (config, problems found by the schema and by `check`). The config is None if the schema refuses it."""
    config, name = None, ("optimizer", "name")
    refused: dict[KeyPath, Problem | None] = {}
    values.schema, wrong_class = schema_for(values.tree, import_classes)
    if wrong_class:
        refused[name] = values.problem(name, wrong_class)
    try:
        checked = config = values.schema.model_validate(values.tree)
    except ValidationError as error:
        refused |= explain(error, values)
        # Also check combinations of the other keys, with a valid value in place of each refused one.
        checked = values.schema.model_validate(_repaired(values, {key_path(path) for path in refused}))
    problems = [one for one in refused.values() if one is not None]
    for one in check(checked, stored):
        compared = [key_path(path) for path in (one.key, *one.others)]
        if not any(path[: len(key)] == key for path in compared for key in map(key_path, refused)):
            problems.append(replace(one, source=values.origin(one.key)))
    return config, problems


def _repaired(values: Values, refused: set[KeyPath]) -> dict[str, Any]:
    """Return the tree of `values` without `refused`, and with an example value for every missing required key."""
    repaired = copy.deepcopy(values.tree)
    for *parents, name in refused:
        (value_at(repaired, parents) or {}).pop(name, None)
    return _add_examples(repaired, values.schema)


def _add_examples(table: dict[str, Any], schema: type[Section]) -> dict[str, Any]:
    """Add a valid value for every required key missing from `table` or its sections, in place. Return `table`."""
    for name, field in schema.model_fields.items():
        section, item = section_class(field), item_class(field)
        if field.is_required() and name not in table:
            value = [*literals(field.annotation), "x" if field.annotation is str else 1][0]
            table[name] = {} if section else [_add_examples({}, item)] if item else value
        if section and name in table:
            _add_examples(table[name], section)
    return table


def _find_config(command: CommandLine, problems: list[Problem]) -> Path | None:
    """Return the file named by --config: a path or a name in configs/, each with or without .toml.

    A path takes precedence over a name. If there is no such file, add a problem to `problems` and return None.
    """
    names = sorted(path.stem for path in CONFIGS.glob("*.toml"))
    shipped = f"configs/ has {', '.join(names)}"
    if command.config is None:
        needed = f"needed: the path of a TOML file, or a name ({shipped})"
        problems.append(Problem(("--config",), "missing", needed))
        return None
    given, argument = Path(command.config), (f"--config {command.config}",)
    try:
        for folder in (Path(), CONFIGS):
            for path in (folder / given, folder / f"{given}.toml"):
                if path.is_file():
                    return path
    except OSError as error:  # a folder without search permission, or a name of more than 255 bytes
        problems.append(Problem(argument, f"cannot be read: {error.strerror}", shipped))
        return None
    if given.is_dir():
        own = f" (such as {given / 'config.toml'})" if (given / "config.toml").is_file() else ""
        problems.append(Problem(argument, "is a folder", f"give a TOML file{own}, or a name ({shipped})"))
        return None
    close = nearest(given.name.removesuffix(".toml"), names)
    hint = f"did you mean {close}? " if close else ""
    problems.append(Problem(argument, "no such file", f"{hint}{shipped}"))
    return None


def _read_file(path: Path) -> Values:
    try:
        return _read_text(path.read_text("utf-8-sig"), str(path))
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: is not UTF-8 text: {error.reason} at byte {error.start}") from error


def _read_text(text: str, source: str) -> Values:
    try:
        return Values(read_toml(text), source)
    except ValueError as error:
        lines = ["", *text.splitlines()]
        match = re.search(r"at line (\d+)", str(error))
        line = lines[min(int(match[1]), len(lines) - 1) if match else -1].strip()
        raise UserError(f"{source}: not valid TOML: {error}{f': {line}' if line else ''}") from error


def _let_length_replace(values: Values) -> None:
    """Drop train.steps of the file if an override sets train.tokens, and vice versa."""
    train = values.tree.get("train")
    for given, other in (("tokens", "steps"), ("steps", "tokens")):
        replaces = ("train", given) in values.overridden and ("train", other) not in values.overridden
        if isinstance(train, dict) and replaces and train.get(given):
            train.pop(other, None)


def _override(values: Values, key: str, text: str) -> Problem | None:
    """Set `key` to the value of `text`, creating its section if needed. Return the problem, or None."""
    path, argument = tuple(key.split(".")), (f"--{key}={text}",)
    table = values.tree
    for depth, part in enumerate(path[:-1], start=1):
        if part not in table:
            values.overridden.add(path[:depth])
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            return Problem(argument, f"{'.'.join(path[:depth])} is not a section, so no key in it can be set")
    try:
        kinds = members(known.annotation) if (known := keys().get(key)) else []
        is_table = text.startswith("{") and any(get_origin(kind) is dict for kind in kinds)
        table[path[-1]] = from_literal(text, str in kinds and not is_table)
    except ValueError as error:
        return Problem(argument, str(error))
    values.overridden.add(path)
    return None
