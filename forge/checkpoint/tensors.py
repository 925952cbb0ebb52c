"""A rank's part of a checkpoint's tensors, presented to DCP (torch.distributed.checkpoint) as boxes of global tensors.

A box is a rectangular slice. DCP calls three methods of an object in a state dict (protocol `_Checkpointable`). They
return the items to write, the chunks to read, and the memory of one chunk. `ShardTensor` answers with boxes of the global
tensor. A checkpoint can therefore be loaded into any layout: a DTensor's rows, a contiguous buffer's flat slices, or whole
tensors.
"""

from __future__ import annotations

from typing import Any, TypeAlias
from zlib import crc32

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from forge.shard import Shard

# An upper bound of the bytes added by DCP's format and index to each piece of a tensor.
PIECE_BYTES = 2048

NamedTensors: TypeAlias = dict[str, tuple[Shard, Tensor]]
"""Name in the checkpoint -> (shard, this rank's values). Values are laid out like `shard.data`."""


class ShardTensor(torch.Tensor):
    """A tensor of the shard's global shape without storage, only for DCP.

    DCP writes or loads `values` (contiguous, laid out like `shard.data`) box by box. A rank without boxes writes and
    reads nothing.
    """

    _pieces: dict[tuple[int, ...], Tensor]

    @staticmethod
    def __new__(cls, shard: Shard, values: Tensor) -> ShardTensor:
        make: Any = torch.Tensor._make_wrapper_subclass
        return make(cls, shard.global_shape, dtype=values.dtype, device=values.device)

    def __init__(self, shard: Shard, values: Tensor):
        assert values.is_contiguous(), f"{shard.name}: pieces of non-contiguous values would be copies"
        # Boxes of one rank never overlap, so the offsets of its non-empty boxes are unique.
        self._pieces = {box.offsets: piece for box, piece in shard.pieces(values) if box.numel}

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise NotImplementedError(f"{func} cannot run on a ShardTensor, which has no values")

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"ShardTensor(shape={tuple(self.shape)}, dtype={self.dtype}, boxes={len(self._pieces)})"

    @property
    def written_bytes(self) -> int:
        """Return an upper bound of the number of bytes that DCP writes for this rank's parts of the tensor."""
        return sum(piece.numel() * piece.element_size() + PIECE_BYTES for piece in self._pieces.values())

    def __create_write_items__(self, fqn: str, _object: Any) -> list[WriteItem]:
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.size()),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=piece.size())
            for offsets, piece in self._pieces.items()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        assert index.offset is not None, index
        return self._pieces[tuple(index.offset)]


def writes(name: str, shard: Shard) -> bool:
    """Return whether this rank writes its part of the tensor `name`.

    If several ranks hold a replica of the part, a hash of the name selects the writing rank.
    """
    copies = shard.replicas
    return copies is None or crc32(name.encode()) % copies.size() == copies.rank()
