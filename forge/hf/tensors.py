"""Names and shapes of tensors: which tensors of transformers make up each tensor of forge.

One rule covers all of them: a tensor of forge is tensors of theirs, all of one shape, one after another. So a plain
weight is itself, the fused weight of experts is gate of 0, up of 0, gate of 1, and so on.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from forge.config.model import ModelConfig
from forge.hf.architectures import ENDS, LAYER, Architecture
from forge.model import Transformer


@dataclass(frozen=True)
class Weight:
    """`ours` `[shape]` holds the elements of `theirs`, each `[their_shape]`, in this order.

    ours None: forge has no such tensor, and theirs are zeros. theirs empty: they have no such tensor, and ours is zeros.
    state: not a parameter; `dtype` is what forge keeps it in. heads: RoPE's pairs are neighbours in theirs, and are
    half a head apart in ours (0: the same in both).
    """

    ours: str | None
    shape: tuple[int, ...]
    theirs: tuple[str, ...]
    their_shape: tuple[int, ...]
    state: bool = False
    dtype: torch.dtype = torch.float32
    heads: int = 0

    def split(self, ours: Tensor) -> list[Tensor]:
        """Theirs out of ours: views, or copies where elements change places."""
        if self.heads:
            pairs = ours.unflatten(0, (self.heads, 2, -1))
            ours = pairs.transpose(1, 2).flatten(0, 2)
        return list(ours.reshape(len(self.theirs), *self.their_shape).unbind())

    def joined(self, out: Tensor) -> Tensor:
        """Ours out of `out` `[shape]`, into whose memory theirs have been written one after another."""
        if not self.heads:
            return out
        pairs = out.unflatten(0, (self.heads, -1, 2))
        return pairs.transpose(1, 2).flatten(0, 2).contiguous()


def weights_of(model: ModelConfig, architecture: Architecture) -> list[Weight]:
    """Every tensor of either side, layer by layer. KeyError if forge's model has one that is not known here."""
    with torch.device("meta"):
        transformer = Transformer(model, seq_len=1)
    parameters = dict(transformer.named_parameters())
    found: list[Weight] = []
    for name, tensor in transformer.state_dict().items():
        path, _, leaf = name.rpartition(".")
        if path in ENDS:
            found.append(_same(name, tensor, f"{ENDS[path]}.{leaf}"))
            continue
        _, layer, inner = path.split(".", 2)
        place = _Place(model, architecture, f"model.layers.{layer}", inner, leaf)
        found += place.parameter(name, tensor) if name in parameters else place.router_state(name, tensor)
    return found


def _same(name: str, tensor: Tensor, theirs: str, heads: int = 0) -> Weight:
    return Weight(name, tuple(tensor.shape), (theirs,), tuple(tensor.shape), heads=heads)


def _zeros(theirs: str, *shape: int) -> Weight:
    return Weight(None, shape, (theirs,), shape)


@dataclass(frozen=True)
class _Place:
    """One tensor of a layer: `leaf` of module `inner`, for both sides."""

    model: ModelConfig
    architecture: Architecture
    prefix: str
    inner: str
    leaf: str

    def parameter(self, name: str, tensor: Tensor) -> Iterator[Weight]:
        """The tensor, and what theirs have beside it."""
        if self.inner == "feed_forward.experts":
            yield self._experts(name, tuple(tensor.shape))
            return
        theirs = f"{self.prefix}.{(LAYER | dict(self.architecture.layer))[self.inner]}"
        rotated = {"attention.wq": self.model.n_heads, "attention.wk": self.model.n_kv_heads}
        heads = rotated.get(self.inner, 0) if self.architecture.interleaved_rope else 0
        yield _same(name, tensor, f"{theirs}.{self.leaf}", heads)
        if self.inner == "attention.wo" and self.architecture.bias_of_output and self.model.attention_bias:
            yield _zeros(f"{theirs}.bias", self.model.dim)
        if self.inner == "feed_forward.router" and self.architecture.shared_experts_always:
            yield from self._no_shared_experts()

    def router_state(self, name: str, tensor: Tensor) -> Iterator[Weight]:
        """The bias on the choice goes along where they have one; the counts of the last step are forge's alone."""
        shape, theirs = tuple(tensor.shape), self.architecture.router_bias
        if self.leaf != "bias" or theirs is None:
            yield Weight(name, shape, (), shape, state=True, dtype=tensor.dtype)
            return
        assert self.model.moe is not None
        # It counts only where the load is balanced by it.
        ours = name if self.model.moe.balance == "bias" else None
        their_shape = (1,) * (self.architecture.router_bias_axes - 1) + shape
        yield Weight(ours, shape, (f"{self.prefix}.{theirs}",), their_shape, state=True, dtype=tensor.dtype)

    def _experts(self, name: str, shape: tuple[int, ...]) -> Weight:
        module, gate, up, down = self.architecture.experts
        projections = {"w13": (gate, up), "w2": (down,)}[self.leaf]
        theirs = tuple(
            f"{self.prefix}.{module}.{expert}.{projection}.weight"
            for expert in range(shape[0])
            for projection in projections
        )
        return Weight(name, shape, theirs, (shape[1] // len(projections), shape[2]))

    def _no_shared_experts(self) -> Iterator[Weight]:
        assert self.model.moe is not None
        if self.model.moe.n_shared_experts == 0:
            wide, tall = (0, self.model.dim), (self.model.dim, 0)
            for module, shape in (("w1", wide), ("w3", wide), ("w2", tall)):
                yield _zeros(f"{self.prefix}.{LAYER[f'feed_forward.shared.{module}']}.weight", *shape)
