"""The layout of a run on the processes there are: that of the config, or the first of `parallel.fallbacks` that fits."""

from __future__ import annotations

from forge.config.load import load_config
from forge.config.schema import Config
from forge.config.world import Degrees, check_world
from forge.runtime.errors import UserError


def choose_layout(argv: list[str], config: Config, world_size: int) -> tuple[Config, Degrees, str]:
    """Return the config to train with on `world_size` processes, its layout, and the fallback that was taken ("": none).

    argv: the command line that `config` was loaded from. Raises UserError for an invalid fallback, and where nothing fits.
    """
    fallbacks = [(text, _with(argv, text)) for text in config.parallel.fallbacks]
    try:
        return config, check_world(config, world_size), ""
    except UserError as error:
        first = error
    for text, other in fallbacks:
        try:
            return other, check_world(other, world_size), text
        except UserError:
            continue
    if fallbacks:
        raise UserError(f"{first}; none of the {len(fallbacks)} parallel.fallbacks fits either")
    raise first


def _with(argv: list[str], text: str) -> Config:
    try:
        return load_config([*argv, *(f"--{override}" for override in text.split())])
    except UserError as error:
        raise UserError(f'parallel.fallbacks, "{text}": {error}') from None
