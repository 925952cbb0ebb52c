"""DCP's index of a checkpoint, `.metadata`, read safely.

It is a pickle: its checksum is compared before it is opened, and it may name nothing but DCP's own plain records.
"""

from __future__ import annotations

import enum
import hashlib
import io
import pickle
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

from forge.checkpoint.manifest import Damaged, read_manifest


def read_index(folder: Path) -> Metadata:
    """Return the index of the checkpoint in `folder`. Raises Damaged if it is not what was saved. Not collective.

    The index refers only to bytes of files that the manifest lists, and to no tensor larger than these files.
    """
    content = (folder / ".metadata").read_bytes()
    files = read_manifest(folder)["files"]
    if hashlib.sha256(content).hexdigest() != files.get(".metadata", {}).get("sha256"):
        raise Damaged(".metadata has a wrong checksum")
    try:
        metadata = _Unpickler(io.BytesIO(content)).load()
    except (pickle.UnpicklingError, EOFError, ValueError, TypeError, AttributeError, IndexError) as error:
        raise Damaged(f".metadata cannot be read: {error}") from error
    if not isinstance(metadata, Metadata):
        raise Damaged(f".metadata holds a {type(metadata).__name__}")
    metadata.storage_meta = StorageMeta()
    _require_within(metadata, files)
    return metadata


def _require_within(metadata: Metadata, files: dict[str, Any]) -> None:
    for place in (metadata.storage_data or {}).values():
        size = files.get(place.relative_path, {}).get("size")
        if size is None:
            raise Damaged(f".metadata refers to {place.relative_path}, which is not a file of the checkpoint")
        if not 0 <= place.offset <= place.offset + place.length <= size:
            raise Damaged(f".metadata refers to bytes after the end of {place.relative_path}")
    total = sum(file["size"] for file in files.values())
    for name, saved in metadata.state_dict_metadata.items():
        if isinstance(saved, TensorStorageMetadata):
            needed = prod(saved.size) * saved.properties.dtype.itemsize
            if min(saved.size, default=0) < 0 or needed > total:
                raise Damaged(f".metadata gives {name} {needed} bytes, and all files have {total}")


_ADMITTED = {
    "torch.distributed.checkpoint.metadata": {
        *("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties", "_MEM_FORMAT_ENCODING"),
        *("TensorStorageMetadata", "ChunkStorageMetadata", "BytesStorageMetadata"),
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    # DCP's own writer adds the folder's path.
    "pathlib": {"PosixPath"},
    "pathlib._local": {"PosixPath"},
}


def _enum_member(kind: Any, name: Any) -> enum.Enum:
    """What `getattr` may do in a pickle: Python 3.11.0 to 3.11.3 pickle a member of an enumeration by class and name."""
    if isinstance(kind, type) and issubclass(kind, enum.Enum) and name in kind.__members__:
        return kind[name]
    raise pickle.UnpicklingError(f".metadata refers to an attribute {name!r}, which no checkpoint needs")


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _enum_member
        dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if dtype or name in _ADMITTED.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f".metadata refers to {module}.{name}, which no checkpoint needs")
