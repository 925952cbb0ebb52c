"""`ShardTensor`: shows DCP a global tensor of which this rank holds some boxes, to save and to reshard.

DCP asks an object in a state dict three things, under the names of its `_Checkpointable` protocol: what to
write, which chunks it wants, and the memory of one chunk. Answering them for boxes is all that is needed for
a checkpoint to move between a DTensor's rows, a contiguous buffer's flat slices and whole tensors.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from forge.shard import Shard

# What DCP's format and its index add to a piece of a tensor, at most.
PIECE_BYTES = 2048

NamedTensors: TypeAlias = dict[str, tuple[Shard, Tensor]]
"""Name in the checkpoint -> the shard and this rank's values, laid out like `shard.data`."""


class ShardTensor(torch.Tensor):
    """A tensor of the shard's global shape without storage of its own; only DCP may use it.

    `values` (contiguous, laid out like `shard.data`) is what is written and loaded into, box by box. A rank
    may hold no box at all: it then writes and reads nothing.
    """

    _pieces: dict[tuple[int, ...], Tensor]

    @staticmethod
    def __new__(cls, shard: Shard, values: Tensor) -> ShardTensor:
        make: Any = torch.Tensor._make_wrapper_subclass
        return make(cls, shard.global_shape, dtype=values.dtype, device=values.device)

    def __init__(self, shard: Shard, values: Tensor):
        assert values.is_contiguous(), f"{shard.name}: pieces of non-contiguous values would be copies"
        # Boxes of one rank never overlap, so their offsets tell them apart once the empty ones are gone.
        self._pieces = {box.offsets: piece for box, piece in shard.pieces(values) if box.numel}

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise NotImplementedError(f"ShardTensor is a description for checkpoints and cannot compute {func}")

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"ShardTensor(shape={tuple(self.shape)}, dtype={self.dtype}, boxes={len(self._pieces)})"

    @property
    def written_bytes(self) -> int:
        """What this rank's pieces take in DCP's files, at most."""
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
