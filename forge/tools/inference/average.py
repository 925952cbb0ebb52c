"""Average the weights of checkpoints. The result is a checkpoint without optimizer state."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch

from forge.checkpoint import trained_config
from forge.checkpoint.commit import Contents, fill_folder
from forge.checkpoint.loading import TRAINER, TensorReader
from forge.checkpoint.manifest import MANIFEST
from forge.checkpoint.tensors import ShardTensor
from forge.config import Config, difference, to_toml
from forge.optim.ema import SLOT
from forge.run.changes import FREE
from forge.runtime.distributed import RanksFailed, single_process_group
from forge.runtime.errors import FAILED, UserError
from forge.runtime.files import folder_beside
from forge.shard import Shard


def average(paths: Sequence[Path], output: Path, *, ema: bool = False) -> int:
    """Write the mean of the weights of `paths`, checkpoints of one model, to the new folder `output`.

    Return the number of averaged and copied tensors.

    ema: average the exponential moving averages (`optimizer.ema`) instead of the weights. For a tensor without a moving
    average, e.g. a router's bias, average its values.

    Sums are float64. Results have the dtypes of the last checkpoint. Tokenizer and integer state, e.g. router counters,
    are copied from the last checkpoint. The config is its `trained_config`. Each checkpoint is verified first.

    Raises UserError if a folder is not a checkpoint, is damaged (exit 77) or lacks moving averages, if the models
    differ, or if `output` exists.
    """
    if output.exists():
        raise UserError(f"{output}: exists already; choose another folder, or remove this one")
    for path in paths:
        if not (path / MANIFEST).is_file():
            raise UserError(
                f"{path}: has no {MANIFEST}; needed: the folder of a complete checkpoint, step-..."
            )
    readers = [TensorReader.verified(path) for path in paths]
    configs = [trained_config(path) for path in paths]
    known = readers[-1].tensors()
    _require_one_model(paths, configs)
    for path, reader in zip(paths, readers, strict=True) if ema else ():
        have = reader.tensors()
        if not any(_mean_of(name) in have for name in known):
            raise UserError(
                f"{path}: has no moving average of the weights; only a run with optimizer.ema > 0 has one"
            )
    tensors: dict[str, ShardTensor] = {}
    for name, (shape, dtype) in known.items():
        if not name.startswith("model."):
            continue
        values = readers[-1].read(name)
        source = _mean_of(name) if ema and _mean_of(name) in known else name
        if dtype.is_floating_point:
            mean = torch.zeros(shape, dtype=torch.float64)
            for reader in readers:
                mean += reader.read(source).double() / len(paths)
            values = mean.to(dtype)
        tensors[name] = ShardTensor(Shard.whole(name, values), values)
    _write(output, paths, configs[-1], tensors)
    return len(tensors)


def _mean_of(name: str) -> str:
    return f"optimizer.{name.removeprefix('model.')}.{SLOT}"


def _require_one_model(paths: Sequence[Path], configs: Sequence[Config]) -> None:
    """Raise UserError if a key of [model] differs, unless a resume accepts the change or phases made it."""
    free = {*FREE, "model.sliding_window"}
    for path, config in zip(paths[1:], configs[1:], strict=True):
        for key, first, here in difference(configs[0], config):
            if key.startswith("model.") and key not in free:
                raise UserError(
                    f"{path}: has another model than {paths[0]}: {key} = {here}, but {first} there; average checkpoints of "
                    "one model"
                )


def _write(output: Path, paths: Sequence[Path], config: Config, tensors: dict[str, ShardTensor]) -> None:
    tokenizer = sorted((paths[-1] / "tokenizer").glob("*"))
    files = {file.relative_to(paths[-1]).as_posix(): file.read_bytes() for file in tokenizer}
    # At step 0, the first phase would set the window.
    files["config.toml"] = to_toml(config).encode()
    files[TRAINER] = json.dumps({"averaged": [str(path) for path in paths]}).encode()
    contents = Contents(step=0, layout={}, files=files, tensors=tensors)
    try:
        with single_process_group(), folder_beside(output) as partial:
            fill_folder(partial, output.absolute(), contents)
    except (RanksFailed, OSError) as error:
        raise UserError(f"{output}: could not be written: {error}", FAILED) from None
