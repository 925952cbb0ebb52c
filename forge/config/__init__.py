"""The configuration of a run: a typed schema, loaded from TOML and the command line, with explained errors.

The package does not import torch, so help and errors appear at once. Schema: section.py, model.py, data.py, layout.py,
optimizer.py, phase.py, schema.py. Loading: load.py, extensions.py. Explanations: problem.py, explain.py, keys.py,
help.py, unused.py. Settings of each step: phases.py. Checks across keys: checks.py, float8.py, phase_checks.py, pipeline.py,
world.py.
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
