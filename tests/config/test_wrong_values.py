"""Mistakes on the command line get a hint."""

from __future__ import annotations

import pytest

from forge.config import load_config
from forge.runtime.errors import UserError


def test_a_folder_as_config_is_called_a_folder(tmp_path) -> None:
    with pytest.raises(UserError, match=f"--config {tmp_path}: is a folder; give a TOML file, or a name"):
        load_config([f"--config={tmp_path}"])
    (tmp_path / "config.toml").touch()
    with pytest.raises(UserError, match=rf"give a TOML file \(such as {tmp_path}/config.toml\), or a name"):
        load_config([f"--config={tmp_path}"])


def test_pythons_spelling_of_a_boolean_gets_tomls() -> None:
    with pytest.raises(UserError, match="allowed: true or false; write false"):
        load_config(["--config=debug", "--metrics.tensorboard=False"])
