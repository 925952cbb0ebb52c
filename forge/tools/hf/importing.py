"""Import a folder of transformers as a checkpoint of forge, one tensor at a time."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex

from forge.checkpoint.commit import Contents, fill_folder
from forge.checkpoint.loading import TRAINER
from forge.checkpoint.tensors import ShardTensor
from forge.config import Config, parse_toml_text, to_toml
from forge.config.keys import to_literal
from forge.runtime.distributed import RanksFailed, single_process_group
from forge.runtime.errors import FAILED, UserError
from forge.runtime.files import read_json
from forge.shard import Shard
from forge.tools.hf.architectures import ENDS
from forge.tools.hf.folder import Conversion, ReportProgress, new_folder, no_progress
from forge.tools.hf.kimi import unnested
from forge.tools.hf.model_config import read_model
from forge.tools.hf.quantized import Blocks, Scaled, with_blocks, with_scales
from forge.tools.hf.safetensors import DTYPES, Stored, find_tensors
from forge.tools.hf.table import architecture_of
from forge.tools.hf.tensors import Weight, modules_ahead, weights_of
from forge.tools.hf.tokenizer import import_files, refuse_foreign

_SHOWN = 5


def import_weights(source: Path, output: Path, *, progress: ReportProgress = no_progress) -> Conversion:
    """Write a checkpoint of step 0 to `output`, with the weights and the tokenizer of the folder `source`.

    Weights keep their dtypes. The checkpoint has no optimizer state. Use it for checkpoint.init, generation and evaluation.
    Memory: twice the largest tensor of forge (a layer's fused experts, or the embedding).

    Raises UserError (exit 2), naming key, tensor or file, if forge cannot compute the model or if a part is missing or
    damaged. After any error `output` does not exist.
    """
    described = source / "config.json"
    values = _read_object(described)
    files = import_files(source)
    try:
        architecture = architecture_of(values, described)
        if architecture.prefix:
            values = unnested(values)
        stored, values = _dequantized(find_tensors(source), values, described)
        model = read_model(values, architecture, described)
        layers = int(model["n_layers"])
    except (TypeError, ValueError, AttributeError, KeyError) as error:
        raise UserError(f"{described}: has a value of the wrong type: {error}") from error
    if layers > len(stored):
        raise UserError(
            f"{described}: asks for {layers} layers, but the folder has only {len(stored)} tensors"
        )
    # Count the MTP modules by their tensors, because the tensors may be missing although config.json names the modules.
    if architecture.predicts_ahead and (depth := modules_ahead(stored, model["n_layers"])):
        model["mtp"] = {"depth": depth}
    embedding = stored.get(f"{architecture.prefix}{ENDS['embedding']}.weight")
    dtype = DTYPES.get(embedding.dtype, torch.float32) if embedding else torch.float32
    config = _config(model, values, described, output, dtype, tokenizer=bool(files))
    refuse_foreign(files, source, config.model.vocab_size)
    weights = weights_of(config.model, architecture)
    dtypes = _match(source, config, weights, stored, architecture.ignored)
    weights = [weight for weight in weights if not weight.is_copy]
    total = sum(prod(weight.shape) * dtypes[weight.ours].itemsize for weight in weights if weight.ours)
    tensors = _lazy_tensors(weights, dtypes, stored, lambda done: progress("writing", done, total))
    with new_folder(output, total) as folder, single_process_group():
        contents = Contents(
            step=0,
            layout={},
            files={
                TRAINER: json.dumps({"imported": {"architecture": architecture.name}}).encode(),
                "config.toml": to_toml(config).encode(),
                **{f"tokenizer/{name}": content for name, content in files.items()},
            },
            tensors=tensors,
            file_per_tensor=True,
        )
        try:
            fill_folder(folder, output.absolute(), contents)
        except RanksFailed as error:
            raise UserError(f"{output}: could not be written: {error}", FAILED) from None
    return Conversion(architecture.name, with_tokenizer=bool(files))


def _read_object(file: Path) -> dict[str, Any]:
    """Return the JSON object in `file`. Raises UserError if the file cannot be read or has no object."""
    try:
        values = read_json(file.read_text("utf-8"))
        if not isinstance(values, dict):
            raise ValueError("not an object")
    except OSError as error:
        raise UserError(f"{file}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise UserError(f"{file}: is not a JSON object: {error}") from None
    return values


def _lazy_tensors(
    weights: list[Weight],
    dtypes: Mapping[str, torch.dtype],
    stored: Mapping[str, Stored | Blocks | Scaled],
    progress: Callable[[int], None],
) -> dict[str, ShardTensor]:
    """Return the model's tensors by their name in a checkpoint. Each is read from `stored` when it is written.

    progress: called with the bytes read so far.
    """
    done = 0

    def read(weight: Weight, dtype: torch.dtype) -> Tensor:
        nonlocal done
        if weight.theirs:
            values = weight.joined(_read([stored[name] for name in weight.theirs], weight.read_shape))
            if weight.gain:
                values = values.to(dtype) * _read([stored[weight.gain]], weight.shape).to(dtype)
        else:
            values = torch.zeros(weight.shape, dtype=dtype)
        done += values.nbytes
        progress(done)
        return values

    tensors: dict[str, ShardTensor] = {}
    for weight in weights:
        if weight.ours is not None:
            dtype = dtypes[weight.ours]
            shape_only = torch.empty(weight.shape, dtype=dtype, device="meta")
            tensors[f"model.{weight.ours}"] = _LazyTensor(
                Shard.whole("", shape_only), partial(read, weight, dtype)
            )
    return tensors


def _dequantized(
    stored: dict[str, Stored], values: dict[str, Any], source: Path
) -> tuple[Mapping[str, Stored | Blocks | Scaled], dict[str, Any]]:
    """Return `stored` with one entry per quantized weight, and `values` with quantization_config set to None.

    Reading such an entry dequantizes the weight. values: content of the config.json `source`. Raises UserError if
    compressed-tensors has packed the weights.
    """
    quantization = values.get("quantization_config")
    if not isinstance(quantization, dict):
        return stored, values
    plain = values | {"quantization_config": None}
    match quantization.get("quant_method"):
        case "mxfp4":
            return with_blocks(stored), plain
        case "fp8":
            return with_scales(stored, quantization, source), plain
        case "compressed-tensors":
            raise UserError(
                f"{source}: weights packed by compressed-tensors (format {quantization.get('format')!r}) cannot be read; "
                "save the model in bfloat16 with the library that packed it, and convert that folder"
            )
    return stored, values  # `read_model` refuses any other quantization_config


def _config(
    model: dict[str, Any],
    values: dict[str, Any],
    source: Path,
    output: Path,
    dtype: torch.dtype,
    tokenizer: bool,
) -> Config:
    """Return the config of the imported checkpoint: model, tokenizer, and placeholders for the other required keys.

    The data section is synthetic. precision.compute is `dtype`, the dtype of the embedding. float16 becomes float32,
    because forge does not support float16.
    """
    longest = values.get("max_position_embeddings")
    if type(longest) is not int or longest < 1:
        raise UserError(f"{source}: max_position_embeddings = {longest!r} is not a number of tokens")
    compute = str(torch.float32 if dtype == torch.float16 else dtype).removeprefix("torch.")
    storage = "float64" if dtype == torch.float64 else "float32"
    tables: dict[str, dict[str, Any]] = {
        "run": {"name": output.absolute().name},
        "model": model,
        "data": {
            "sources": [{"path": "synthetic"}],
            "tokenizer": str(output.absolute() / "tokenizer") if tokenizer else "none",
        },
        "train": {"steps": 1, "seq_len": longest, "global_batch_size": 1},
        "precision": {"storage": storage, "compute": compute, "reduce": storage},
    }
    text = "\n".join(f"{table} = {to_literal(keys)}" for table, keys in tables.items())
    return parse_toml_text(text, str(source))


def _match(
    source: Path,
    config: Config,
    weights: list[Weight],
    stored: Mapping[str, Stored | Blocks | Scaled],
    ignored: tuple[str, ...],
) -> dict[str, torch.dtype]:
    """Check the names, shapes and dtypes of the tensors of transformers. Return the dtype of each tensor of forge, by name.

    Raises UserError that lists the first problems, e.g. missing or unknown tensors.
    """
    problems: list[str] = []
    dtypes: dict[str, torch.dtype] = {}
    for weight in weights:
        for name in weight.theirs:
            if weight.is_copy:
                continue
            tensor, shape = stored.get(name), list(weight.their_shape)
            if tensor is None:
                problems.append(f"{name} is missing")
            elif list(tensor.shape) != shape:
                problems.append(f"{name} has shape {list(tensor.shape)}; config.json requires {shape}")
            elif tensor.dtype not in DTYPES:
                problems.append(f"{name} is of {tensor.dtype}; forge reads {', '.join(DTYPES)}")
        found = {stored[name].dtype for name in weight.theirs if name in stored}
        if len(found) > 1:
            problems.append(
                f"{weight.theirs[0]} and the other tensors of the same weight differ in dtype: {', '.join(sorted(found))}"
            )
        if weight.ours is not None and not weight.is_copy:
            dtype = DTYPES.get(next(iter(found), ""), weight.dtype)
            dtypes[weight.ours] = torch.promote_types(dtype, torch.float32) if weight.gain else dtype
    known = {name for weight in weights for name in weight.theirs}
    if config.model.tie_embeddings:
        known.add(
            "lm_head.weight"
        )  # ignored, as by transformers; the same holds for rotary_emb.inv_freq of old versions
    problems += [
        f"{name} is not a tensor of the model in config.json"
        for name in stored
        if name not in known and not name.endswith("rotary_emb.inv_freq") and not name.startswith(ignored)
    ]
    if problems:
        more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise UserError(f"{source}: {'; '.join(problems[:_SHOWN])}{more}")
    return dtypes


def _read(stored: list[Stored | Blocks | Scaled], shape: tuple[int, ...]) -> Tensor:
    """Read the tensors `stored`, all of one dtype and shape, one after another into a new tensor of shape `shape`."""
    out = torch.empty(shape, dtype=DTYPES[stored[0].dtype])
    for part, one in zip(out.view(len(stored), -1), stored, strict=True):
        one.read_into(part)
    return out


class _LazyTensor(ShardTensor):
    """A tensor whose values exist only while DCP (torch.distributed.checkpoint) writes them. make: returns the values."""

    _make: Callable[[], Tensor]

    @staticmethod
    def __new__(cls, shard: Shard, make: Callable[[], Tensor]) -> Any:
        return ShardTensor.__new__(cls, shard, shard.parameter)

    def __init__(self, shard: Shard, make: Callable[[], Tensor]):
        super().__init__(shard, shard.parameter)
        self._make = make

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        return self._make()
