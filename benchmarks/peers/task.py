"""A training task as a folder, and the training curve of one package.

`hf/` has the initial weights and config.json in Hugging Face's format. `batches.safetensors` has the tokens and labels.
`task.json` has all other fields of the task. `curve.json` has the curve of the package.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor


@dataclass(frozen=True)
class Task:
    """A training task, independent of the package.

    tokens, labels: int64 `[steps, batch, seq]`; a label is the next token.
    rates: the learning rate of each step: `warmup` steps of rise, constant `lr`, then `decay` steps of cosine decay; the
    last step has `min_lr_ratio * lr`.
    max_norm: the gradient norm above which gradients are scaled down.
    dtype: the format of parameters.
    """

    folder: Path
    tokens: Tensor
    labels: Tensor
    rates: list[float]
    lr: float
    warmup: int
    decay: int
    min_lr_ratio: float
    betas: list[float]
    eps: float
    weight_decay: float
    max_norm: float
    dtype: str

    @property
    def weights(self) -> Path:
        """The folder with the initial weights and config.json."""
        return self.folder / "hf"

    def rows_of(self, rank: int, world: int) -> tuple[Tensor, Tensor]:
        """Return the tokens and labels of `rank` among `world` ranks: int64 `[steps, batch / world, seq]` each."""
        return self.tokens.chunk(world, dim=1)[rank], self.labels.chunk(world, dim=1)[rank]

    def save(self) -> None:
        """Write all parts of the task except the weights into the folder."""
        tensors = {"tokens": self.tokens, "labels": self.labels}
        rest = {key: value for key, value in vars(self).items() if key not in tensors and key != "folder"}
        save_file(tensors, self.folder / "batches.safetensors")
        (self.folder / "task.json").write_text(json.dumps(rest))

    @staticmethod
    def load(folder: Path) -> Task:
        """Return the task that `save` wrote."""
        rest = json.loads((folder / "task.json").read_text())
        return Task(folder, **load_file(folder / "batches.safetensors"), **rest)


@dataclass
class Curve:
    """Per step: the mean cross-entropy of the batch, the gradient norm before clipping, and the learning rate.

    ended: the clock in seconds at the end of each step.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    ended: list[float] = field(default_factory=list)

    def append(self, loss: float, norm: float, rate: float) -> None:
        """Add a step that ends now."""
        self.losses.append(loss)
        self.norms.append(norm)
        self.rates.append(rate)
        self.ended.append(time.perf_counter())

    def save(self, folder: Path) -> None:
        (folder / "curve.json").write_text(json.dumps(asdict(self)))

    @staticmethod
    def load(folder: Path) -> Curve:
        """Return the curve that `save` wrote."""
        return Curve(**json.loads((folder / "curve.json").read_text()))
