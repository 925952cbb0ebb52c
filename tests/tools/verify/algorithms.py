"""Optimizers with their options, and a custom optimizer and model. Only a complete reference verifies them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from forge.model import Transformer
from forge.optim.adamw import AdamW
from forge.optim.matrices import MatrixBatch, WholeMatrices
from forge.optim.optimizer import gradient, write_unless
from forge.shard import Box, Shard

HERE = "tests.tools.verify.algorithms"
MUON = ("--optimizer.name=muon",)
NEURON = "--optimizer.muon.second_moment=neuron"
HEADS = "--optimizer.muon.split_heads=true"
CLIP = "--optimizer.muon.qk_clip=0.03"
CAUTIOUS = "--optimizer.muon.cautious_decay=true"
POLAR = "--optimizer.muon.orthogonalization=polar_express"
EMA = "--optimizer.ema=0.9"
MUP = (
    "--optimizer.parametrization=mup",
    "--optimizer.mup.base_dim=64",
)  # debug configs are 256 wide, mla_debug 128
BF16 = "--optimizer.moment_dtype=bfloat16"
INT8 = "--optimizer.moment_dtype=int8"
SHAMPOO = f"--optimizer.name={HERE}:OneSidedShampoo"
# k3_debug.toml and ladder.toml set keys of Muon, which other optimizers refuse.
NO_MUON = tuple(f"--optimizer.muon.{key}" for key in ("qk_clip=0", "momentum=0.95", "second_moment=none"))
LION = ("--optimizer.name=lion", *NO_MUON)
ADAMW = ("--optimizer.name=adamw", *NO_MUON)
OPTIONS = {
    "neuron": (*MUON, NEURON),
    "split_heads": (*MUON, HEADS),
    "qk_clip": (*MUON, CLIP),
    "cautious_decay": (*MUON, CAUTIOUS),
    "polar_express": (*MUON, POLAR),
    "muon bfloat16": (*MUON, BF16, NEURON),
    "lion bfloat16": (*LION, BF16, EMA),
    "lion": (*LION, *MUP),
    "adamw int8": (*ADAMW, INT8, *MUP),
    "adamw bfloat16": (*ADAMW, BF16, EMA),
    "owner state": (SHAMPOO, *NO_MUON),
}


class Looped(Transformer):
    """A model that applies its blocks twice."""

    def __init__(self, *args: Any, **parts: Any):
        super().__init__(*args, **parts)
        self.trunk = 2 * self.trunk


class OneSidedShampoo:
    """theta <- theta - lr P^(-1/4) g. P is a mean of g g^T, held by the matrix's owner rank. AdamW updates all else."""

    def __init__(self, shards: list[Shard], config: Any, group: ProcessGroup | None):
        self._shards = [s for s in shards if s.name.startswith("layers.") and s.kind in ("dense", "expert")]
        self._shards = [s for s in self._shards if len(s.global_shape) > 1]
        names = {shard.name for shard in self._shards}
        self._rest = AdamW([shard for shard in shards if shard.name not in names], config, group)
        self._matrices = WholeMatrices(self._shards, group, dtype=torch.float64)
        runs = [run for batch in self._matrices.batches for run in batch.runs]
        self.grams = []
        for number, shard in enumerate(self._shards):
            *stack, rows, _ = shard.global_shape
            boxes = [
                Box(
                    (run.first, 0, 0) if stack else (0, 0), (run.count, rows, rows) if stack else (rows, rows)
                )
                for run in runs
                if run.number == number
            ]
            values = torch.zeros(sum(box.numel for box in boxes), dtype=torch.float64)
            shape = torch.Size([*stack, rows, rows])
            self.grams.append(Shard(shard.name, shape, tuple(boxes), values, kind=shard.kind))
        pieces = [iter([piece for _, piece in gram.pieces(gram.data)]) for gram in self.grams]
        self._of_batch = {
            id(batch): [next(pieces[run.number]).view(-1, run.shape[0], run.shape[0]) for run in batch.runs]
            for batch in self._matrices.batches
        }

    def step(self, lr: float, skip: Tensor) -> None:
        self._rest.step(lr, skip)
        updates = [gradient(shard).double().contiguous().clone() for shard in self._shards]

        def precondition(matrices: Tensor, batch: MatrixBatch) -> Tensor:
            held = self._of_batch[id(batch)]
            gram = torch.cat(held).lerp(matrices @ matrices.mT, 0.1)
            for one, values in zip(held, gram.split([len(one) for one in held]), strict=True):
                write_unless(skip, one, values)
            sizes, vectors = torch.linalg.eigh(gram)
            powers = sizes.clamp(min=0).add(1e-6).pow(-0.25).unsqueeze(-1)
            return vectors @ (powers * (vectors.mT @ matrices))

        self._matrices.replace(updates, precondition)
        for shard, update in zip(self._shards, updates, strict=True):
            write_unless(skip, shard.data, shard.data - lr * update)

    def tensors(self) -> Iterator[tuple[str, Shard, Tensor]]:
        yield from self._rest.tensors()
        yield from (("gram", gram, gram.data) for gram in self.grams)

    def state(self) -> dict[str, Any]:
        return self._rest.state()

    def load_state(self, state: dict[str, Any]) -> None:
        self._rest.load_state(state)
