"""`Weight`: a tensor of forge, and the tensors of transformers that hold the same values.

In this file "ours" are forge's tensors and "theirs" are the tensors of transformers. Most tensors of forge are the
concatenation of one or more tensors of transformers, all of one shape. A plain weight consists of a single tensor. The fused
weight of experts consists of many: gate and up of expert 0, gate and up of expert 1, and so on. forge/tools/hf/fused.py
has the exceptions: tensors of transformers that fuse several tensors of forge, or store a tensor transposed.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass, replace
from itertools import count, groupby

import torch
from torch import Tensor

from forge.config.model import ModelConfig
from forge.model import Transformer
from forge.tools.hf.architectures import ENDS, LAYER, Architecture
from forge.tools.hf.fused import Rows, join
from forge.tools.hf.kimi import LAST_MIX, LAYER_MIXES


@dataclass(frozen=True)
class Weight:
    """A tensor of forge and its counterpart in transformers.

    ours: name of forge's tensor, of shape `shape`; None: forge has no such tensor, and an export writes `fill`.
    theirs: names of transformers' tensors, each of shape `their_shape`. Their concatenation is forge's tensor. Empty:
        transformers has no such tensor, and an import writes zeros.
    is_state: forge's tensor is a buffer, not a parameter. dtype: forge's dtype of the buffer.
    heads: number of heads (or experts) with paired rows. Transformers stores the two rows of a pair as neighbours; forge
        stores the first rows of all pairs, then the second rows. 0: both store rows in the same order.
    first: first paired row of a head. All later rows of the head are paired, too.
    rows: the rows of transformers' tensor that hold forge's tensor; None: all. transposed: the last two dims are swapped.
    is_copy: a second copy of `ours` in transformers. An export writes the copy; an import ignores it.
    gain: name of a second tensor of transformers. forge's tensor is the product of `theirs` and this tensor, computed in
        float32 or wider.
    """

    ours: str | None
    shape: tuple[int, ...]
    theirs: tuple[str, ...]
    their_shape: tuple[int, ...]
    is_state: bool = False
    dtype: torch.dtype = torch.float32
    heads: int = 0
    first: int = 0
    rows: Rows | None = None
    transposed: bool = False
    is_copy: bool = False
    fill: float = 0.0
    gain: str = ""

    @property
    def read_shape(self) -> tuple[int, ...]:
        """The shape of the concatenation of all tensors in `theirs`."""
        return self.shape if self.rows is None and not self.transposed else self.their_shape

    def split(self, ours: Tensor) -> list[Tensor]:
        """Split forge's tensor `ours` into the tensors of transformers, each of shape `their_shape`.

        Return views, or copies if elements are reordered.
        """
        if self.heads:
            ours = self._with_pairs(ours, 2, -1)
        if self.transposed:
            ours = ours.mT
        return list(ours.reshape(len(self.theirs), *self.their_shape).unbind())

    def joined(self, out: Tensor) -> Tensor:
        """Convert `out`, the concatenation of the tensors in `theirs`, to forge's tensor. out: of shape `read_shape`."""
        if self.rows is not None:
            return self.rows.of(out, self.shape)
        if self.transposed:
            out = out.mT.contiguous()
        return self._with_pairs(out, -1, 2) if self.heads else out

    def _with_pairs(self, rows: Tensor, *sizes: int) -> Tensor:
        """Reorder the paired rows of each head: view these rows as two dims of sizes `sizes`, and swap the two dims.

        sizes: (2, -1) changes forge's order into that of transformers; (-1, 2) changes it back.
        """
        heads = rows if rows.shape[0] == self.heads else rows.unflatten(0, (self.heads, -1))
        turned = heads[:, self.first :].unflatten(1, sizes).transpose(1, 2).flatten(1, 2)
        return torch.cat([heads[:, : self.first], turned], dim=1).reshape(rows.shape)


def weights_of(model: ModelConfig, architecture: Architecture) -> list[Weight]:
    """Return the Weights covering all tensors of forge and of transformers, layer by layer.

    Raises KeyError for a tensor of forge without a known counterpart.
    """
    with torch.device("meta"):
        written = model if architecture.predicts_ahead else model.model_copy(update={"mtp": None})
        transformer = Transformer(written, seq_len=1)
    parameters = dict(transformer.named_parameters())
    found: list[Weight] = []
    for name, tensor in transformer.state_dict().items():
        shape = tuple(tensor.shape)
        path, _, leaf = name.rpartition(".")
        if leaf == "query":
            found += _mix(name, shape[0])
            continue
        if path in ENDS:
            found.append(Weight(name, shape, (f"{ENDS[path]}.{leaf}",), shape))
            continue
        _, layer, inner = path.split(".", 2)
        prefix = f"model.layers.{layer}"
        places = architecture.places(model, int(layer)) if architecture.places else {}
        if (place := places.get(f"{inner}.{leaf}")) is not None:
            theirs, heads = f"{prefix}.{place.theirs}", shape[0] if place.paired else 0
            found.append(
                Weight(
                    name,
                    shape,
                    (theirs,),
                    place.shape,
                    heads=heads,
                    rows=place.rows,
                    transposed=place.transposed,
                )
            )
            continue
        if name not in parameters:
            found.append(_router_state(model, architecture, name, tensor, prefix))
        elif inner == "feed_forward.experts":
            found.append(_experts(architecture, name, shape, prefix))
        else:
            found += _parameter(model, architecture, name, shape, prefix, inner)
    ends = {weight.theirs[0]: weight for weight in found if weight.theirs}
    for layer in transformer.ahead:
        for end, theirs in (("embedding", "embed_tokens"), ("head", "shared_head.head")):
            whole = ends[f"{ENDS['embedding' if model.tie_embeddings else end]}.weight"]
            found.append(replace(whole, theirs=(f"model.layers.{layer}.{theirs}.weight",), is_copy=True))
    if transformer.mixes:
        # Transformers has tensors for a mix before the first attention, where forge has nothing to mix.
        norm, projection = _mix("layers.0.attention_mix.query", model.dim)
        found += [norm, replace(projection, ours=None, gain="")]
    named = [
        replace(
            weight,
            theirs=tuple(architecture.prefix + theirs for theirs in weight.theirs),
            gain=weight.gain and architecture.prefix + weight.gain,
        )
        for weight in found
    ]
    return _in_order(named)


def modules_ahead(names: Container[str], n_layers: int) -> int:
    """Return the number of multi-token prediction modules in a folder of transformers, i.e. of layers beyond `n_layers`.

    names: the tensor names in the folder.
    """
    return next(
        n for n in count() if f"model.layers.{n_layers + n}.{LAYER['projection']}.weight" not in names
    )


def _in_order(weights: list[Weight]) -> list[Weight]:
    """Sort Weights. Those that share a tensor of transformers become adjacent, ordered by their rows in this tensor."""
    first = {theirs: n for n, weight in reversed(list(enumerate(weights))) for theirs in weight.theirs}

    def key(numbered: tuple[int, Weight]) -> tuple[int, int]:
        number, weight = numbered
        return (number, 0) if weight.rows is None else (first[weight.theirs[0]], weight.rows.start)

    return [weight for _, weight in sorted(enumerate(weights), key=key)]


def their_tensors(weights: list[Weight], read: Callable[[Weight], Tensor]) -> Iterator[Tensor]:
    """Yield the tensors of transformers for `weights`, in order. read: returns forge's tensor of a Weight."""
    for _, group in groupby(weights, key=lambda weight: weight.theirs):
        weight, *others = group
        if weight.rows is None:
            yield from weight.split(read(weight))
        else:
            parts = [weight, *others]
            yield join([read(part) for part in parts], [p.rows for p in parts if p.rows], weight.their_shape)


def _parameter(
    model: ModelConfig, architecture: Architecture, name: str, shape: tuple[int, ...], prefix: str, inner: str
) -> Iterator[Weight]:
    """Yield the Weight of parameter `name` in module `inner` of a layer. prefix: the layer's name in transformers.

    Then yield Weights of related tensors of transformers that forge lacks, e.g. a bias. They are exported as zeros.
    """
    leaf = name.rpartition(".")[2]
    theirs = f"{prefix}.{(LAYER | dict(architecture.layer))[inner]}"
    heads, first = _rotated(model).get(inner, (0, 0)) if architecture.interleaved_rope else (0, 0)
    yield Weight(name, shape, (f"{theirs}.{leaf}",), shape, heads=heads, first=first)
    lacks_bias = model.attention_bias and not model.attention_output_bias
    if inner == "attention.wo" and architecture.output_bias and lacks_bias:
        yield _zeros(f"{theirs}.bias", model.dim)
    if inner == "feed_forward.router" and architecture.shared_experts_always:
        assert model.moe is not None
        if model.moe.n_shared_experts == 0:
            for module, sizes in (("w1", (0, model.dim)), ("w3", (0, model.dim)), ("w2", (model.dim, 0))):
                yield _zeros(f"{prefix}.{LAYER[f'feed_forward.shared.{module}']}.weight", *sizes)


def _mix(name: str, dim: int) -> list[Weight]:
    """Return two Weights for the tensor `name`, the query `[dim]` with which attention residuals weight earlier outputs.

    In folders of Kimi K3, this query is the product of two tensors: a projection to one number, and the gain of a norm.
    The first Weight exports a gain of ones. The second exports the query as the projection, and imports the product.
    """
    *layer, module, _ = name.split(".")
    theirs = f"model.layers.{layer[1]}.{LAYER_MIXES[module]}" if layer else f"model.{LAST_MIX}"
    gain = f"{theirs}_norm.weight"
    return [
        Weight(None, (dim,), (gain,), (dim,), fill=1.0),
        Weight(name, (dim,), (f"{theirs}_proj.weight",), (1, dim), gain=gain),
    ]


def _rotated(model: ModelConfig) -> dict[str, tuple[int, int]]:
    """Return a dict from projection to (number of its heads, first row of a head that RoPE rotates)."""
    if model.latent is None:
        return {"attention.wq": (model.n_heads, 0), "attention.wk": (model.n_kv_heads, 0)}
    queries = (model.n_heads, model.latent.qk_nope_head_dim)
    return {
        "attention.wq": queries,
        "attention.wq_b": queries,
        "attention.wkv_a": (1, model.latent.kv_lora_rank),
    }


def _zeros(theirs: str, *shape: int) -> Weight:
    return Weight(None, shape, (theirs,), shape)


def _router_state(
    model: ModelConfig, architecture: Architecture, name: str, tensor: Tensor, prefix: str
) -> Weight:
    """Return the Weight of a router's buffer: the bias on the choice of experts, or the counts, which transformers lacks."""
    shape = tuple(tensor.shape)
    if not name.endswith(".bias") or architecture.router_bias is None:
        return Weight(name, shape, (), shape, is_state=True, dtype=tensor.dtype)
    assert model.moe is not None
    # With other balancing, forge does not use the bias, and an export writes zeros.
    ours = name if model.moe.biased else None
    their_shape = (1, *shape) if architecture.router_bias_is_2d else shape
    theirs = f"{prefix}.{architecture.router_bias}"
    return Weight(ours, shape, (theirs,), their_shape, is_state=True, dtype=tensor.dtype)


def _experts(architecture: Architecture, name: str, shape: tuple[int, ...], prefix: str) -> Weight:
    module, gate, up, down = architecture.experts
    projections = (gate, up) if name.endswith(".w13") else (down,)
    theirs = tuple(
        f"{prefix}.{module}.{expert}.{projection}.weight"
        for expert in range(shape[0])
        for projection in projections
    )
    return Weight(name, shape, theirs, (shape[1] // len(projections), shape[2]))
