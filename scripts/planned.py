"""Plan existing runs, each with the configuration and the number of processes of its latest start that trained."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from forge.runtime.errors import UserError
from forge.tools.report.read import RunRecord


class Planner:
    """Plan runs, and cache the plans by configuration, number of processes and device.

    hardware: name or file of the hardware; None: the run's own GPU, if known. trust: allow imports named in a run's
    config.toml. Without `trust`, a run with such imports has no plan.
    """

    def __init__(self, hardware: str | None, trust: bool = False):
        from forge.tools.plan.hardware import find_hardware

        self._hardware = None if hardware is None else find_hardware(hardware)
        self._trust = trust
        self._lock = (
            threading.Lock()
        )  # one plan at a time: each replaces the default process group of this process
        self._known: dict[tuple[str, int, str], dict[str, Any]] = {}

    def add(self, run: RunRecord) -> None:
        """Set `run.plan` to the output of train.py --plan --json, or to {"problem": reason}. Skip runs that never trained."""
        started = run.latest_training().last_event("started")
        path = run.path / "config.toml"
        if not started or not path.is_file():
            return
        device = str(started.get("environment", {}).get("device", ""))
        try:
            text = path.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            run.plan = {"problem": f"{path}: cannot be read: {error}"}
            return
        key = text, int(started.get("world_size", 1)), device
        with self._lock:
            if key not in self._known:
                self._known[key] = self._plan(path, *key)
        run.plan = self._known[key]

    def _plan(self, path: Path, text: str, world: int, device: str) -> dict[str, Any]:
        from forge.config import check_world, choose_layout, parse_command_line, parse_toml_text
        from forge.config.extensions import require_trust
        from forge.tools.plan.command import largest
        from forge.tools.plan.hardware import card_of
        from forge.tools.plan.plan import make_plan
        from forge.tools.plan.show import as_json

        try:
            if not self._trust:
                require_trust(
                    parse_toml_text(text, "config.toml", stored=True, import_classes=False), "config.toml"
                )
            config = parse_toml_text(text, stored=True)
            try:
                check_world(config, world)
            except UserError:  # the start chose a fallback, which config.toml does not have
                config, *_ = choose_layout(parse_command_line(["--config", str(path)]), config, world)
                if not self._trust:
                    require_trust(config, "config.toml")
            config = largest(config)
            return as_json(make_plan(config, check_world(config, world), self._hardware or card_of(device)))
        except UserError as error:
            return {"problem": str(error)}
        # Fake tensors may not support a custom model. The page then has no plan of this run.
        except Exception as error:
            return {"problem": f"{type(error).__name__}: {error}".partition("\n")[0]}
