"""Valid and damaged Megatron datasets for tests."""

import struct
from dataclasses import dataclass, field

import numpy as np


@dataclass
class Written:
    """The content of a Megatron dataset: sequences of `lengths`, with token ids counting up from 0."""

    lengths: list[int]
    firsts: list[int]
    code: int = 8
    dtype: str = "<u2"
    version: int = 1
    magic: bytes = b"MMIDIDX\x00\x00"
    tail: bytes = b""
    pointers: list[int] = field(default_factory=list)

    def to(self, prefix):
        ids = np.arange(sum(self.lengths)).astype(self.dtype)
        ids.tofile(f"{prefix}.bin")
        starts = [sum(self.lengths[:i]) * ids.itemsize for i in range(len(self.lengths))]
        header = struct.pack("<QBQQ", self.version, self.code, len(self.lengths), len(self.firsts))
        arrays = [(self.lengths, "<i4"), (self.pointers or starts, "<i8"), (self.firsts, "<i8")]
        content = b"".join(np.array(values, dtype).tobytes() for values, dtype in arrays)
        prefix.with_name(f"{prefix.name}.idx").write_bytes(self.magic + header + content + self.tail)
        return prefix
