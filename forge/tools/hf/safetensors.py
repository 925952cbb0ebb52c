"""Read safetensors files with the library safetensors, and write them without it, one tensor at a time.

A file begins with the length of the header in 8 bytes, little endian. The header is JSON with the dtype, shape and data
offsets of each tensor. After it come the tensors without gaps, row-major, little endian.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from forge.runtime.errors import UserError
from forge.runtime.files import read_json

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class Stored(NamedTuple):
    """A tensor in an open file. dtype: in the notation of the format, e.g. "BF16"."""

    file: Any
    name: str
    dtype: str
    shape: tuple[int, ...]

    def read_into(self, out: Tensor) -> None:
        """Read the tensor into `out`, a contiguous CPU tensor of equal dtype and number of elements."""
        assert out.is_contiguous() and out.dtype == DTYPES[self.dtype]
        out.view(self.shape).copy_(self.file.get_tensor(self.name))

    def read_bytes(self) -> Tensor:
        """Return a tensor of one-byte elements as uint8, in the stored shape."""
        return self.file.get_tensor(self.name).view(torch.uint8).clone()


def find_tensors(folder: Path) -> dict[str, Stored]:
    """Return the tensors of a folder by name. The folder has `model.safetensors`, or several files and an index.

    Reads and checks all headers, but no data. Raises UserError (exit 2) for a missing or damaged file.
    """
    if (folder / SINGLE).is_file():
        return read_header(folder / SINGLE)
    index = folder / INDEX
    if not index.is_file():
        pickles = any(folder.glob("pytorch_model*.bin"))
        remedy = (
            "; pickled weights (.bin) are not read: convert them to safetensors with transformers"
            if pickles
            else ""
        )
        raise UserError(f"{folder}: has neither {SINGLE} nor {INDEX}{remedy}")
    try:
        places = read_json(index.read_text("utf-8"))["weight_map"]
        if not all(Path(file).name == file for file in places.values()):
            raise ValueError("the weight_map names a file outside the folder")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{index}: is not an index of safetensors files: {error}") from None
    headers = {file: read_header(folder / file) for file in sorted(set(places.values()))}
    for name, file in places.items():
        if name not in headers[file]:
            raise UserError(f"{folder / file}: lacks {name}, which {INDEX} lists")
    return {name: headers[file][name] for name, file in places.items()}


def read_header(file: Path) -> dict[str, Stored]:
    """Open a file and return its tensors by name.

    Raises UserError if the header is damaged or does not match the file's size.
    """
    try:
        opened = safe_open(file, "pt")
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"{file}: cannot be read; it is cut off, damaged or not in safetensors format: {error}"
        ) from None
    tensors = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 (not a mapping)
    return {
        name: Stored(opened, name, tensor.get_dtype(), tuple(tensor.get_shape()))
        for name, tensor in tensors.items()
    }


class Planned(NamedTuple):
    """Name, dtype and shape of a tensor to write."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def write_tensors(
    folder: Path, planned: Sequence[Planned], tensors: Iterable[Tensor], limit: int
) -> Iterator[int]:
    """Write the tensors to files in `folder`, with an index if there are several files. Yield the size of each tensor.

    Sizes are in bytes. tensors: iterator over the values of `planned`, in order. The next tensor is requested after the
    previous one is written.
    limit: size limit of a file in bytes; a larger tensor gets a separate file.
    """
    parts: list[list[Planned]] = [[]]
    room = limit
    for tensor in planned:
        if tensor.nbytes > room and parts[-1]:
            parts.append([])
            room = limit
        parts[-1].append(tensor)
        room -= tensor.nbytes
    count = len(parts)
    names = (
        [f"model-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)] if count > 1 else [SINGLE]
    )
    incoming = iter(tensors)
    for name, part in zip(names, parts, strict=True):
        yield from _write_file(folder / name, part, incoming)
    if count > 1:
        index = {
            "metadata": {"total_size": sum(tensor.nbytes for tensor in planned)},
            "weight_map": {
                tensor.name: name for name, part in zip(names, parts, strict=True) for tensor in part
            },
        }
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _write_file(file: Path, part: list[Planned], incoming: Iterator[Tensor]) -> Iterator[int]:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for tensor in part:
        end = begin + tensor.nbytes
        entry = {"dtype": _NAMES[tensor.dtype], "shape": tensor.shape, "data_offsets": [begin, end]}
        header[tensor.name], begin = entry, end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # align the data for readers with memory maps
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for tensor in part:
            values = next(incoming)
            assert values.dtype == tensor.dtype and tuple(values.shape) == tensor.shape, tensor.name
            stream.write(_bytes_of(values.contiguous()))
            yield tensor.nbytes
        stream.flush()
        os.fsync(stream.fileno())


def _bytes_of(tensor: Tensor) -> Any:
    """Return a buffer over the memory of `tensor`, which must be contiguous and on the CPU."""
    return tensor.detach().view(-1).view(torch.uint8).numpy()
