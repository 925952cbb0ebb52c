"""The model of a configuration's text on this rank, with what stands around it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from forge.config import Config, check_world, parse_toml_text
from forge.parallel.build import build_parallel_model
from forge.parallel.layout import Layout, make_layout
from forge.parallel.mesh import Meshes, make_meshes
from tests.support.equivalence import _batches


class Built(NamedTuple):
    """`model` is whichever implementation of ParallelModel the layout has. Call `built` on every rank."""

    model: Any
    config: Config
    meshes: Meshes

    def batches(self) -> Iterator[Any]:
        """What this rank reads, step after step."""
        return _batches(self.config, self.meshes.data_rank, self.meshes.data_ranks)


def layout_without_ranks(config: Config) -> Layout:
    """The Layout of `config` for code that needs no meshes."""
    return make_layout(config, None)  # type: ignore[arg-type]


def built(text: str, world: int) -> Built:
    config = parse_toml_text(text)
    meshes = make_meshes(check_world(config, world), "cpu")
    return Built(build_parallel_model(config, meshes, torch.device("cpu")), config, meshes)
