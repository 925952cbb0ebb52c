"""`train.py --config X --plan`: prints a plan and returns an exit code."""

from __future__ import annotations

import json

from forge.config import CommandLine, Config, check_world
from forge.errors import DOES_NOT_FIT, FINISHED, UserError
from forge.plan.hardware import find_hardware
from forge.plan.plan import make_plan, smallest_world
from forge.plan.show import as_json, as_text


def plan(config: Config, command: CommandLine) -> int:
    """Print the plan of `config`; return FINISHED, or DOES_NOT_FIT if the hardware is known and has too little memory.

    Raises UserError (exit 2) for an invalid layout or unknown hardware.
    """
    if command.search:
        raise UserError("--search: the search for layouts is not built yet; leave it out to plan this one")
    hardware = None if command.hardware is None else find_hardware(command.hardware)
    world = command.world_size
    degrees = smallest_world(config) if world is None else check_world(config, world)
    made = make_plan(config, degrees, hardware)
    print(json.dumps(as_json(made), indent=1) if command.json else as_text(made), flush=True)
    return DOES_NOT_FIT if made.fits is False else FINISHED
