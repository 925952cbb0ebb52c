"""Averages of the weights of checkpoints, as a checkpoint of weights: evaluated, exported and trained from like any other."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch

from forge.checkpoint import read_config
from forge.checkpoint.commit import Contents, fill_folder
from forge.checkpoint.loading import TRAINER, TensorReader
from forge.checkpoint.tensors import ShardTensor
from forge.config import Config, parse_toml_text
from forge.distributed import RanksFailed, single_process_group
from forge.errors import FAILED, UserError
from forge.shard import Shard


def average(paths: Sequence[Path], output: Path) -> int:
    """Write the mean of the weights of `paths`, checkpoints of one model, to the folder `output`; return how many tensors.

    Sums are float64, results have the dtypes of the last checkpoint, whose config and tokenizer come along.

    Raises UserError if a folder is no checkpoint, if the models differ, or if `output` exists.
    """
    if output.exists():
        raise UserError(f"{output}: exists already; choose another folder or remove it")
    readers = [TensorReader(path) for path in paths]
    try:
        configs = [parse_toml_text(read_config(path), str(path), import_classes=False) for path in paths]
        known = readers[-1].tensors()
    except OSError as error:
        raise UserError(
            f"{error.filename}: {error.strerror}; needed: the folder of a checkpoint, step-..."
        ) from None
    _require_one_model(paths, configs)
    tensors: dict[str, ShardTensor] = {}
    for name, (shape, dtype) in known.items():
        if not name.startswith("model."):
            continue
        mean = torch.zeros(shape, dtype=torch.float64)
        for reader in readers:
            mean += reader.read(name).double() / len(paths)
        values = mean.to(dtype)
        tensors[name] = ShardTensor(Shard.whole(name, values), values)
    _write(output, paths, tensors)
    return len(tensors)


def _require_one_model(paths: Sequence[Path], configs: Sequence[Config]) -> None:
    for path, config in zip(paths[1:], configs[1:], strict=True):
        if config.model != configs[0].model:
            raise UserError(f"{path}: is of another model than {paths[0]}; average checkpoints of one model")


def _write(output: Path, paths: Sequence[Path], tensors: dict[str, ShardTensor]) -> None:
    partial = output.absolute().with_name(f".partial-{output.name}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    files = {file.relative_to(paths[-1]).as_posix(): file.read_bytes() for file in _kept(paths[-1])}
    files[TRAINER] = json.dumps({"averaged": [str(path) for path in paths]}).encode()
    contents = Contents(step=0, layout={}, files=files, tensors=tensors)
    try:
        with single_process_group():
            fill_folder(partial, output.absolute(), contents)
    except RanksFailed as error:
        raise UserError(f"{output}: could not be written: {error}", FAILED) from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _kept(path: Path) -> list[Path]:
    return [path / "config.toml", *sorted((path / "tokenizer").glob("*"))]
