"""A small valid configuration, and helpers that return the errors of invalid ones."""

from pathlib import Path

import pytest

from forge.config import Config, load_config, parse_toml_text
from forge.runtime.errors import BAD_CONFIG, UserError

TINY = """
[model]
dim = 64
n_layers = 2
n_heads = 8
ffn_dim = 96
vocab_size = 128
[data]
sources = [{ path = "synthetic" }]
[train]
steps = 10
seq_len = 32
global_batch_size = 8
"""
REQUIRED = [
    "model.dim",
    "model.n_layers",
    "model.n_heads",
    "model.ffn_dim",
    "model.vocab_size",
    "data.sources",
]
REQUIRED += ["train.steps", "train.seq_len", "train.global_batch_size"]


def write(folder: Path, text: str = TINY, name: str = "tiny.toml") -> str:
    path = folder / name
    path.write_text(text)
    return str(path)


def load(folder: Path, *overrides: str) -> Config:
    return load_config(["--config", write(folder), *overrides])


def complaints(folder: Path, *overrides: str, text: str = TINY) -> list[str]:
    """Return the error's lines for `text` with `overrides`."""
    with pytest.raises(UserError) as caught:
        load_config(["--config", write(folder, text), *overrides])
    assert caught.value.exit_code == BAD_CONFIG
    return [line.strip() for line in str(caught.value).splitlines()]


def complaint(folder: Path, *overrides: str, text: str = TINY) -> str:
    """Return the error's only line."""
    lines = complaints(folder, *overrides, text=text)
    assert len(lines) == 1, lines
    return lines[0]


def tiny(extra: str = "") -> Config:
    return parse_toml_text(TINY + extra)


def pipeline_config(n_layers: int, pp: int, pipeline: str = "", model: str = "") -> Config:
    text = TINY.replace("n_layers = 2", f"n_layers = {n_layers}\n{model}")
    return parse_toml_text(f"{text}[parallel]\npp = {pp}\n[pipeline]\n{pipeline}\n")
