"""Read and write files in the safetensors format, one tensor at a time.

8 bytes: the header's length, little endian. The header: JSON, for every tensor its dtype, shape and the begin and end of
its bytes in the data. The data: the tensors without gaps, row-major, little endian. (The safetensors library writes only
tensors that are all in memory, and maps files into memory to read them, where a file that gets shorter kills the process.)
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from forge.runtime.errors import UserError
from forge.runtime.files import read_json

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
# Of one byte, which are read by `read_bytes` alone.
BYTES = ("U8", "F8_E4M3")
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_LARGEST_HEADER = 100 << 20


class Stored(NamedTuple):
    """A tensor in a file: `dtype` in the format's spelling, `begin` the offset of its first byte in the file."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int

    def read_into(self, out: Tensor) -> None:
        """Fill `out`, a contiguous CPU tensor of this dtype and number of elements."""
        assert out.is_contiguous() and out.dtype == DTYPES[self.dtype] and out.numel() == prod(self.shape)
        self._fill(out)

    def read_bytes(self) -> Tensor:
        """Return a tensor of bytes: uint8 `[shape]`."""
        assert self.dtype in BYTES
        out = torch.empty(self.shape, dtype=torch.uint8)
        self._fill(out)
        return out

    def _fill(self, out: Tensor) -> None:
        with self.file.open("rb") as stream:
            stream.seek(self.begin)
            if stream.readinto(_bytes_of(out)) != out.nbytes:
                raise UserError(f"{self.file}: became shorter while it was read")


def find_tensors(folder: Path) -> dict[str, Stored]:
    """Return every tensor of a folder with one `model.safetensors`, or with several files and their index, by name.

    Reads and checks all headers, no data. Raises UserError (exit 2) that names the file.
    """
    if (folder / SINGLE).is_file():
        return read_header(folder / SINGLE)
    index = folder / INDEX
    if not index.is_file():
        pickles = any(folder.glob("pytorch_model*.bin"))
        remedy = (
            "; pickled weights (.bin) are not read: load and save them in transformers" if pickles else ""
        )
        raise UserError(f"{folder}: has neither {SINGLE} nor {INDEX}{remedy}")
    try:
        places = read_json(index.read_text("utf-8"))["weight_map"]
        if not all(Path(file).name == file for file in places.values()):
            raise ValueError("it names a file outside the folder")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{index}: is not an index of safetensors files: {error}") from None
    headers = {file: read_header(folder / file) for file in sorted(set(places.values()))}
    for name, file in places.items():
        if name not in headers[file]:
            raise UserError(f"{folder / file}: lacks {name}, which {INDEX} lists")
    return {name: headers[file][name] for name, file in places.items()}


def read_header(file: Path) -> dict[str, Stored]:
    """Return the tensors of one file by name, after checking that the file is exactly as long as its header implies."""
    tensors: dict[str, Stored] = {}
    try:
        with file.open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            length = int.from_bytes(stream.read(8), "little")
            if size < 8 or length > min(size - 8, _LARGEST_HEADER):
                raise UserError(f"{file}: is cut off within its header, or is not a safetensors file")
            header = read_json(stream.read(length))
        header.pop("__metadata__", None)
        begin = end = 8 + length
        for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            first, last = (begin + offset for offset in entry["data_offsets"])
            shape, dtype = tuple(entry["shape"]), DTYPES.get(entry["dtype"])
            if first != end or last < first or not all(type(n) is int and n >= 0 for n in shape):
                raise ValueError(f"{name} does not begin where the tensor before it ends")
            size_of = 1 if entry["dtype"] in BYTES else dtype and dtype.itemsize
            if size_of and last - first != prod(shape) * size_of:
                raise ValueError(f"{name} has {last - first} bytes for {prod(shape)} of {entry['dtype']}")
            tensors[name], end = Stored(file, entry["dtype"], shape, first), last
    except OSError as error:
        raise UserError(f"{file}: cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{file}: its header is damaged: {error}") from None
    if size != end:
        raise UserError(f"{file}: has {size} bytes, and its header says {end}: it is cut off or damaged")
    return tensors


class Planned(NamedTuple):
    """A tensor that will be written."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def write_tensors(
    folder: Path, planned: Sequence[Planned], tensors: Iterable[Tensor], limit: int
) -> Iterator[int]:
    """Write files of at most `limit` bytes (or one tensor), and an index if there are several.

    `tensors` yields those of `planned` in order; each is taken only after the one before it is written. Yields the
    number of bytes of each tensor written.
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
    text += b" " * (-len(text) % 8)  # aligns the data for readers that map the file
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
    """A writable view of the memory of `tensor`, contiguous and on the CPU."""
    return tensor.detach().view(-1).view(torch.uint8).numpy()
