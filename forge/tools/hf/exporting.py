"""Export a checkpoint as a folder for transformers, one tensor at a time."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from forge.checkpoint import saved_config, trained_config
from forge.checkpoint.loading import TensorReader
from forge.data.tokenizer import load_tokenizer
from forge.runtime.errors import FAILED, UserError
from forge.runtime.files import replace_atomically, sync_folder
from forge.tools.hf.folder import Conversion, ReportProgress, new_folder, no_progress, refuse_existing
from forge.tools.hf.kimi import nested
from forge.tools.hf.model_config import choose_architecture, write_model
from forge.tools.hf.safetensors import DTYPES, Planned, write_tensors
from forge.tools.hf.tensors import Weight, their_tensors, weights_of
from forge.tools.hf.tokenizer import export_files

SHARD_BYTES = 5_000_000_000


def export_weights(
    checkpoint: Path,
    output: Path,
    *,
    dtype: torch.dtype | None = None,
    shard_bytes: int = SHARD_BYTES,
    tokenizer: bool = True,
    progress: ReportProgress = no_progress,
) -> Conversion:
    """Write the model of `checkpoint` to the new folder `output`, for AutoModelForCausalLM and AutoTokenizer.

    dtype: of the exported parameters; None: as stored. shard_bytes: size limit of a file; a larger tensor gets a separate
    file. tokenizer: include the checkpoint's tokenizer, if any.

    Memory: up to three times the largest tensor of forge (a layer's fused experts, or the embedding), for the tensor, the
    stored piece being read, and a copy in another dtype.

    Raises UserError if the checkpoint is damaged (exit 77), or if transformers has no class for the model or no format for
    the tokenizer (exit 2). Raises OSError if `output` cannot be written. After any error `output` does not exist.
    """
    refuse_existing(output)  # before the checkpoint is read in full
    reader = TensorReader.verified(checkpoint, lambda done, total: progress("verifying", done, total))
    config = trained_config(checkpoint)
    architecture = choose_architecture(config.model)
    weights = [weight for weight in weights_of(config.model, architecture) if weight.theirs]
    saved = reader.tensors()
    planned: list[Planned] = []
    for weight in weights:
        own = weight.dtype
        if weight.ours is not None:
            name = f"model.{weight.ours}"
            if name not in saved:
                raise UserError(f"{checkpoint}: lacks {name}, which its config.toml requires")
            shape, own = saved[name]
            if tuple(shape) != weight.shape or own not in DTYPES.values():
                needed = f"its config.toml requires {weight.shape}"
                raise UserError(f"{checkpoint}: {name} has shape {tuple(shape)} and dtype {own}; {needed}")
        target = own if weight.is_state or dtype is None else dtype
        if weight.rows is None or weight.rows.start == 0:
            planned += [Planned(theirs, target, weight.their_shape) for theirs in weight.theirs]
    folder = checkpoint / "tokenizer"
    files: dict[str, bytes] = {}
    ends: dict[str, int | None] = {"bos_token_id": None, "eos_token_id": None}
    with_tokenizer = tokenizer and folder.is_dir()
    if with_tokenizer:
        known = load_tokenizer(folder)
        files, ends = export_files(folder), {"bos_token_id": known.bos_id, "eos_token_id": known.eos_id}
    described = write_model(config.model, architecture, saved_config(checkpoint).train.seq_len) | {
        "torch_dtype": str(planned[0].dtype).removeprefix("torch."),
        "pad_token_id": None,
        "use_cache": True,
    }
    whole = nested(described | ends) if architecture.prefix else described | ends
    for name, values in {"config.json": whole, "generation_config.json": ends}.items():
        files[name] = (json.dumps(values, indent=2) + "\n").encode()
    done, total = 0, sum(tensor.nbytes for tensor in planned)
    with new_folder(output, total) as partial:
        for name, content in files.items():
            replace_atomically(partial / name, content)
        for size in write_tensors(partial, planned, _tensors(weights, reader, planned), shard_bytes):
            done += size
            progress("writing", done, total)
        sync_folder(partial)
        try:
            partial.rename(output.absolute())
        except OSError as error:  # e.g. another process has just written `output`
            raise UserError(f"{output}: cannot be written: {error.strerror}", FAILED) from None
        sync_folder(output.absolute().parent)
    return Conversion(architecture.name, with_tokenizer)


def _tensors(weights: list[Weight], reader: TensorReader, planned: list[Planned]) -> Iterator[Tensor]:
    def read(weight: Weight) -> Tensor:
        if weight.ours is None:
            return torch.full((len(weight.theirs), *weight.their_shape), weight.fill)
        return reader.read(f"model.{weight.ours}")

    targets = iter(planned)
    for tensor in their_tensors(weights, read):
        yield tensor.to(next(targets).dtype)
        del tensor  # free the tensor before the next read
