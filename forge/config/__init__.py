"""What the user said: a typed schema, its loading from TOML and command line, and the checks across keys.

Needs no torch, so that help and errors come at once.
"""

from forge.config.command_line import CommandLine, parse_command_line
from forge.config.help import help_text
from forge.config.keys import difference
from forge.config.load import load_config, parse_toml_text
from forge.config.schema import Config
from forge.config.section import Section
from forge.config.toml import to_toml
from forge.config.world import Degrees, check_world

__all__ = [
    "CommandLine",
    "Config",
    "Degrees",
    "Section",
    "check_world",
    "difference",
    "help_text",
    "load_config",
    "parse_command_line",
    "parse_toml_text",
    "to_toml",
]
