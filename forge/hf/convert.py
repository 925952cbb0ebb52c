"""A checkpoint as a folder of Hugging Face and back: the weights together with their tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from forge.checkpoint import find_checkpoint
from forge.data.tokenizer import load_tokenizer
from forge.hf import export_weights, import_weights
from forge.hf.exporting import SHARD_BYTES
from forge.hf.folder import Tell, silent
from forge.hf.tokenizer import export_files, import_files


def to_hugging_face(
    source: Path,
    output: Path,
    *,
    dtype: torch.dtype | None = None,
    shard_bytes: int = SHARD_BYTES,
    tokenizer: bool = True,
    tell: Tell = silent,
) -> str:
    """What AutoModelForCausalLM and AutoTokenizer load, from a checkpoint or the newest one of a run; returns what it is.

    tokenizer: take the checkpoint's along, if it has one. The rest, and errors: see `export_weights`.
    """
    checkpoint = find_checkpoint(source)
    folder = checkpoint / "tokenizer"
    text: dict[str, Any] = {}
    if tokenizer and folder.is_dir():
        known = load_tokenizer(folder)
        text = {"files": export_files(folder), "bos_id": known.bos_id, "eos_id": known.eos_id}
    architecture = export_weights(checkpoint, output, dtype=dtype, shard_bytes=shard_bytes, tell=tell, **text)
    return f"{checkpoint} as {architecture}, {'with its' if text else 'without a'} tokenizer"


def from_hugging_face(source: Path, output: Path, *, tell: Tell = silent) -> str:
    """A checkpoint for checkpoint.init, generating and evaluating, from a folder of transformers; returns what it is.

    The tokenizer goes along, if there is one. The rest, and errors: see `import_weights`.
    """
    files = import_files(source)
    architecture = import_weights(source, output, files=files, tell=tell)
    return f"{architecture} from {source}, {'with its' if files else 'without a'} tokenizer"
