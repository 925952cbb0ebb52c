"""FLOPs and bytes of an operator."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor
from torch.utils._pytree import tree_iter

# Positions of a matrix product's factors among its arguments.
FACTORS = {
    "mm": (0, 1),
    "addmm": (1, 2),
    "addmm_": (1, 2),
    "bmm": (0, 1),
    "baddbmm": (1, 2),
    "_grouped_mm": (0, 1),
    "linalg_solve_triangular": (0, 1),
    "affine_scan": (0, 1),
}
LINEAR = ("mm", "addmm", "addmm_")
ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"
# Attention on a GPU: forge/tools/plan/attention.py.
PLANNED = "planned_attention"
# Operators without data movement.
FREE = ("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "_unsafe_view")
# Operators not fused by a compiler: packing and unpacking by engines, lookups, sorting, accumulation into gradients.
UNFUSED = (
    *("split_with_sizes_copy", "_foreach_copy_", "all_gather_copy_in", "chunk_cat", "add_", "zeros_like"),
    "lower_triangle",
    *(
        "embedding",
        "embedding_dense_backward",
        "index",
        "index_put_",
        "index_put",
        "index_select",
        "index_add",
    ),
    *("gather", "scatter", "scatter_", "scatter_add", "sort", "topk", "cumsum", "bincount", "histc"),
)
# Operators that touch only part of large tensors: for each tensor, count the bytes of the smallest tensor.
SPARSE = ("gather", "scatter_", "all_gather_copy_in")


@dataclass(frozen=True)
class Work:
    """The cost of one operator. flops: FLOPs. size: bytes read and written.

    kind: `product` or `attention`. An operator without FLOPs is `memory` if a compiler fuses it with its neighbours,
    otherwise `copy`. linear: True for a product of a linear layer; every float8 recipe converts it. experts: True for the
    output and input-gradient products of routed experts; only block formats convert these.
    """

    kind: Literal["product", "attention", "memory", "copy"]
    dtype: str
    flops: float
    size: float
    linear: bool = False
    experts: bool = False


def work_of(func: Any, args: Any, output: Any) -> Work | None:
    """Return the work of an operator. None for views, allocations and queries of a tensor's properties."""
    name = func._overloadpacket.__name__
    if name in FREE or func.namespace == "prim" or _is_view(func):
        return None
    tensors = [leaf for leaf in tree_iter((args, output)) if isinstance(leaf, Tensor)]
    size = sum(tensor.nbytes for tensor in tensors)
    if name in SPARSE:
        size = len(tensors) * min(tensor.nbytes for tensor in tensors)
    if name in FACTORS:
        left, right = (args[place] for place in FACTORS[name])
        experts = name == "_grouped_mm" and right.ndim == 3
        flops = 2.0 * left.numel() * right.shape[-1]
        # Products of bfloat16 factors in float32 belong to a router, not to a linear layer (forge/model/split_product.py).
        linear = name in LINEAR and output.dtype == left.dtype
        return Work("product", str(left.dtype), flops, size, linear, experts)
    if name in (ATTENTION, PLANNED):
        q, k, v = args[:3]
        scores = args[3] if name == PLANNED else _scores(q, k, causal=len(args) > 4 and args[4])
        return Work("attention", str(q.dtype), _attention(q, scores, q.shape[-1] + v.shape[-1]), size)
    if name in (f"{ATTENTION}_backward", f"{PLANNED}_backward"):
        q, k, v = args[1:4]
        scores = args[4] if name.startswith(PLANNED) else _scores(q, k, causal=args[7])
        # Backward has five products, forward two, because flash attention recomputes the scores.
        return Work("attention", str(q.dtype), _attention(q, scores, 3 * q.shape[-1] + 2 * v.shape[-1]), size)
    return Work("copy" if name in UNFUSED else "memory", "", 0.0, size) if tensors else None


def _attention(q: Tensor, scores: float, width: int) -> float:
    """Return the FLOPs of attention over the batch and all heads of q `[batch, heads, seq, head_dim]`.

    scores: number of computed scores per sequence and head. width: multiply-adds per score.
    """
    return 2.0 * q.shape[0] * q.shape[1] * width * scores


def _scores(q: Tensor, k: Tensor, *, causal: bool) -> float:
    """Return the number of scores per head computed by PyTorch's CPU kernel. q, k: `[batch, heads, seq, head_dim]`."""
    queries, keys = q.shape[2], k.shape[2]
    return queries * (queries + 1) / 2 if causal and queries == keys else queries * keys


@functools.cache
def _is_view(func: Any) -> bool:
    returned = [value.alias_info for value in func._schema.returns]
    return any(alias is not None and not alias.is_write for alias in returned)
