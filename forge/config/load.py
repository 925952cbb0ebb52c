"""From files and command lines to a `Config`: TOML, overrides, where values came from, all errors at once."""

from __future__ import annotations

import copy
import functools
import re
from pathlib import Path
from typing import Any

import tomli
from pydantic import ValidationError

from forge.config.checks import check
from forge.config.command_line import CommandLine, parse_command_line
from forge.config.extensions import schema_for
from forge.config.keys import example, keys, section_fields
from forge.config.messages import Finding, Values, about, findings, raise_all
from forge.config.schema import Config
from forge.errors import UserError, nearest

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
COMMAND_LINE = "command line"


def load_config(argv: list[str]) -> Config:
    """The configuration that a command line describes.

    argv: as `["--config", "debug.toml", "--train.steps=5"]`, without the program's name.
    Raises UserError (exit 2) that lists everything wrong with the command line, the file and the overrides.
    """
    command = parse_command_line(argv)
    if command.action == "plan":
        raise UserError("--plan: the planner is not built yet; leave --plan out to run the config")
    problems = list(command.problems)
    path = _find_config(command, problems)
    values = Values({}) if path is None else _read_file(path)
    problems += [problem for key, text in command.raw if (problem := _override(values, key, text))]
    run = values.tree.setdefault("run", {})
    if path is not None and isinstance(run, dict):
        run.setdefault("name", path.stem)
    config, found = _examine(values)
    # Without the file every required key would be missing: judge only what is on the command line.
    raise_all(problems + [finding.line for finding in found if path is not None or not finding.missing])
    assert config is not None
    return config


def parse_toml_text(text: str, source: str = "the config text", *, import_classes: bool = True) -> Config:
    """The configuration in `text`, complete by itself; `source` names it in messages.

    Without `import_classes` no class that it names by import path is imported, and the keys of such a class are taken as
    they are: to read the configuration of a checkpoint where its optimizer is not needed.
    Raises UserError (exit 2) that lists everything wrong with it.
    """
    config, found = _examine(_read_text(text, source), import_classes)
    raise_all([finding.line for finding in found])
    assert config is not None
    return config


def _examine(values: Values, import_classes: bool = True) -> tuple[Config | None, list[Finding]]:
    """The config, if the schema admits it, and everything that the schema and the checks find wrong."""
    values.schema, refused = schema_for(values.tree, import_classes)
    name = ("optimizer", "name")
    found = [Finding(about(name, values.at(name), values.origin(name), refused), name)] if refused else []
    try:
        config = values.schema.model_validate(values.tree)
        return config, found + _cross_check(config, values, [])
    except ValidationError as error:
        found += findings(error, values)
    # The other keys may be wrong together, too: look at them with something valid for the refused ones.
    bad = [finding.key for finding in found]
    return None, found + _cross_check(values.schema.model_validate(_mended(values, bad)), values, bad)


def _cross_check(config: Config, values: Values, bad: list[tuple[str, ...]]) -> list[Finding]:
    """Problems between keys, except those in which a key takes part that was refused by itself."""
    found = []
    for problem in check(config):
        paths = [tuple(key.split(".")) for key in problem.keys]
        if any(path[: len(refused)] == refused for path in paths for refused in bad):
            continue
        value = values.at(paths[0])
        if value is None:
            value = functools.reduce(getattr, paths[0], config)
        found.append(Finding(about(paths[0], value, values.origin(paths[0]), problem.text), paths[0]))
    return found


def _mended(values: Values, bad: list[tuple[str, ...]]) -> dict[str, Any]:
    """The tree of `values` without the keys at `bad`, and with an example for every required key that is not there."""
    mended = copy.deepcopy(values.tree)
    for *parents, name in bad:
        table: Any = mended
        for parent in parents:
            table = table.get(parent, {})
        table.pop(name, None)
    for key in keys(values.schema).values():
        if key.field.is_required():
            home: Any = mended
            for name, field in section_fields(key.section, values.schema):
                home = home.setdefault(name, {}) if field.is_required() else home.get(name)
                if home is None:
                    break
            else:
                home.setdefault(key.last, example(key.field))
    return mended


def _find_config(command: CommandLine, problems: list[str]) -> Path | None:
    """The file that --config names: a path, else a name in configs/, each with or without .toml."""
    names = sorted(path.stem for path in CONFIGS.glob("*.toml"))
    shipped = f"configs/ has {', '.join(names)}"
    if command.config is None:
        problems.append(f"--config: missing; needed: the path of a TOML file, or a name ({shipped})")
        return None
    given = Path(command.config)
    for folder in (Path(), CONFIGS):
        for path in (folder / given, folder / f"{given}.toml"):
            if path.is_file():
                return path
    close = nearest(given.name.removesuffix(".toml"), names)
    hint = f"did you mean {close}? " if close else ""
    problems.append(f"--config {command.config}: no such file; {hint}{shipped}")
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
        tree = tomli.loads(text)
    except tomli.TOMLDecodeError as error:
        raise UserError(f"{source}: not valid TOML: {_syntax(error, text)}") from error
    values = Values(tree, source=source)
    for section, content in tree.items():
        _note_origins(values, (section,), content)
    return values


def _syntax(error: tomli.TOMLDecodeError, text: str) -> str:
    """What is wrong, where, and the line itself."""
    match = re.search(r"at line (\d+)", str(error))
    lines = text.splitlines()
    number = int(match[1]) if match else len(lines)
    return f"{error}: {lines[number - 1].strip()}" if 1 <= number <= len(lines) else str(error)


def _note_origins(values: Values, path: tuple[str, ...], content: Any) -> None:
    values.origins[path] = values.source
    if isinstance(content, dict):
        values.origins[path] += f" [{'.'.join(path)}]"
        for key, inner in content.items():
            if isinstance(inner, dict):
                _note_origins(values, (*path, key), inner)


def _override(values: Values, key: str, text: str) -> str | None:
    """Set `key` to what `text` stands for, making its section if need be; returns what is wrong, if any."""
    path = tuple(key.split("."))
    table = values.tree
    for depth, part in enumerate(path[:-1], start=1):
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            return f"--{key}={text}: {'.'.join(path[:depth])} is not a section, so nothing in it can be set"
    try:
        table[path[-1]] = _literal(key, text)
    except ValueError as error:
        return f"--{key}={text}: {error}"
    values.origins = {known: place for known, place in values.origins.items() if known[: len(path)] != path}
    values.origins[path] = COMMAND_LINE
    return None


def _literal(key: str, text: str) -> Any:
    """`text` as a TOML literal; a bare word is a string, and so is anything for a key that takes text.

    Raises ValueError for what starts like a quoted string, list or table and does not go on like one, and for
    bytes that are no text.
    """
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise ValueError("not UTF-8 text")
    known = keys().get(key)
    try:
        table = tomli.loads(f"value = {text}")
        value = table["value"] if len(table) == 1 else text
    except tomli.TOMLDecodeError as error:
        if text[:1] in ("[", "{", '"', "'") and not (known and known.takes_text):
            raise ValueError(
                f"not a TOML literal: {re.sub(r' *[(]at .*', '', str(error))}; quote strings inside it"
            ) from None
        return text
    return text if known and known.takes_text and not isinstance(value, str) else value
