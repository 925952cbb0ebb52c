"""Find valid keys not used by the chosen options. These keys are not errors: a run logs them in one line at its start."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from typing import Any

from pydantic.fields import FieldInfo

from forge.config.keys import sections
from forge.config.schema import Config, OptimizerConfig
from forge.config.section import Unused


def unused_keys(config: Config, parameters: Iterable[str]) -> list[str]:
    """Return one text `KEY, KEY (REASON)` for each reason why keys have no effect.

    Keys with their default value are not listed. parameters: names of the model's parameters.
    """
    by_reason: dict[str, list[str]] = defaultdict(list)
    for key, field in _changed(config):
        reasons = (one for one in field.metadata if isinstance(one, Unused))
        if reason := next((one.reason for one in reasons if one.holds(config)), ""):
            by_reason[reason].append(key)
    found = [f"{', '.join(keys)} ({reason})" for reason, keys in by_reason.items()]
    if config.optimizer.weight_decay:
        names, usual = list(parameters), OptimizerConfig.model_fields["no_decay"].default
        for glob in config.optimizer.no_decay:
            if glob not in usual and not any(fnmatchcase(name, glob) for name in names):
                found.append(f'"{glob}" of optimizer.no_decay (matches no parameter)')
    return found


def _changed(config: Config) -> Iterator[tuple[str, FieldInfo]]:
    """Yield (dotted name, field) of the keys with a value other than the default, in present sections."""
    for section, table in sections(type(config)).items():
        value: Any = config
        for part in section.split("."):
            value = getattr(value, part, None)
        for name, field in table.model_fields.items() if isinstance(value, table) else ():
            if getattr(value, name) != field.default:
                yield f"{section}.{name}", field
