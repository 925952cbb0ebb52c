"""The configuration of a run: a typed schema, its loading from TOML and the command line, and explained errors.

Needs no torch, so that help and errors appear at once. Schema: section, model, data, layout, optimizer, phase, schema.
Load: load, extensions. Explain: problem, explain, keys, help, unused, and the checks across keys (checks, phases, pipeline,
world).
"""

from forge.config.help import help_text
from forge.config.keys import difference, to_toml
from forge.config.load import CommandLine, load_command, load_config, parse_command_line, parse_toml_text
from forge.config.phases import Phases, StepPlan
from forge.config.schema import Config
from forge.config.section import Section
from forge.config.unused import unused_keys
from forge.config.world import Degrees, check_world, choose_layout

__all__ = [
    "CommandLine",
    "Config",
    "Degrees",
    "Phases",
    "Section",
    "StepPlan",
    "check_world",
    "choose_layout",
    "difference",
    "help_text",
    "load_command",
    "load_config",
    "parse_command_line",
    "parse_toml_text",
    "to_toml",
    "unused_keys",
]
