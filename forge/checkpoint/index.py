"""DCP's index of a checkpoint, `.metadata`, read safely.

It is a pickle: its checksum is compared before it is opened, and it may name nothing but DCP's own plain records.
"""

from __future__ import annotations

import enum
import hashlib
import io
import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from forge.checkpoint.manifest import Damaged, read_manifest


def read_index(folder: Path) -> Metadata:
    """Return the index of the checkpoint in `folder`. Raises Damaged if it is not what was saved. Not collective."""
    content = (folder / ".metadata").read_bytes()
    expected = read_manifest(folder)["files"].get(".metadata", {})
    if hashlib.sha256(content).hexdigest() != expected.get("sha256"):
        raise Damaged(".metadata has a wrong checksum")
    metadata = _Unpickler(io.BytesIO(content)).load()
    if not isinstance(metadata, Metadata):
        raise pickle.UnpicklingError(f".metadata holds a {type(metadata).__name__}")
    metadata.storage_meta = StorageMeta()
    return metadata


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
