"""FSDP2 gathers weights of the block formats as codes and scales: one byte per weight instead of two.

A shard holds whole blocks, so its codes equal those of the whole weight. FSDP2 calls two methods of the tensor subclass
`ShardedWeight`: `fsdp_pre_all_gather` quantises the shard; `fsdp_post_all_gather` makes the gathered weight.

    blockwise  square blocks serve the products of forward and backward
    mxfp8      forward sums over columns, backward over rows. The two directions need different codes, so each gathers
               its own. A weight kept gathered until backward, or used by recomputation, is gathered in
               precision.compute
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from forge.config import Config
from forge.model import Experts
from forge.parallel.float8.formats import Format, Quantised
from forge.parallel.layout import Layout, frees_after_forward

aten: Any = torch.ops.aten
# Operators used by FSDP2 and by allocation; their results are wrapped as ShardedWeight again.
_KEPT = (
    *(aten.detach, aten.empty_like, aten.new_zeros, aten.new_empty, aten.zeros_like, aten.slice, aten.copy_),
    *(aten.view, aten.as_strided, aten._to_copy, aten._pin_memory, aten.split, aten.clone, aten.narrow),
)


class ShardedWeight(torch.Tensor):
    """A weight, or a shard of a weight, that FSDP2 gathers in `form`. `_tensor`: the values."""

    @staticmethod
    def __new__(cls, tensor: Tensor, form: Format) -> ShardedWeight:
        return torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            tensor.size(),
            strides=tensor.stride(),
            storage_offset=tensor.storage_offset(),
            dtype=tensor.dtype,
            layout=tensor.layout,
            device=tensor.device,
            pin_memory=tensor.is_pinned() if tensor.device.type == "cpu" else False,
            requires_grad=tensor.requires_grad,
        )

    def __init__(self, tensor: Tensor, form: Format):
        self._tensor, self.form = tensor, form

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        form = next(arg for arg in args if isinstance(arg, ShardedWeight)).form
        plain_args, plain_kwargs = tree_map_only(ShardedWeight, lambda one: one._tensor, (args, kwargs or {}))
        result = func(*plain_args, **plain_kwargs)
        if func.overloadpacket is aten.copy_:
            return args[0]
        return (
            tree_map_only(Tensor, lambda one: cls(one, form), result)
            if func.overloadpacket in _KEPT
            else result
        )

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"ShardedWeight({self._tensor!r}, {self.form.name})"

    def fsdp_pre_all_gather(
        self,
        mesh: Any,
        outer_size: torch.Size,
        outer_stride: tuple[int, ...],
        module: nn.Module,
        mp_policy: Any,
    ) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        """Return (codes as uint8, scales) of this shard, and (dim,): the dimension over which the next product sums."""
        # A graph task id other than -1 means backward.
        dim = -1 if self.form.square or torch._C._current_graph_task_id() == -1 else -2
        values = self._tensor.to(mp_policy.param_dtype or self._tensor.dtype)
        codes, scales = self.form.quantise(values, self.form.of_weight(dim))
        return (_bytes(codes), _bytes(scales) if self.form.powers else scales.contiguous()), (dim,)

    def fsdp_post_all_gather(
        self, outputs: tuple[Tensor, ...], metadata: tuple[int, ...], dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        """Return the gathered weight, and its tensors, which FSDP2 frees later.

        If `out`, an existing GatheredWeight, is given, update `out` instead and return None.
        """
        codes, scales = outputs
        if out is not None:
            out.codes, out.scales, out.summed = codes, scales, metadata[0]
            return None
        return GatheredWeight(codes, scales, self.form, metadata[0], dtype), (codes, scales)


class GatheredWeight(torch.Tensor):
    """A whole weight as codes and scales, for products that sum over dimension `summed`, -1 or -2.

    Shape and dtype are those of the dequantised weight.
    """

    @staticmethod
    def __new__(
        cls, codes: Tensor, scales: Tensor, form: Format, dim: int, dtype: torch.dtype
    ) -> GatheredWeight:
        return torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, codes.size(), strides=codes.stride(), dtype=dtype, device=codes.device
        )

    def __init__(self, codes: Tensor, scales: Tensor, form: Format, summed: int, dtype: torch.dtype):
        self.codes, self.scales, self.form, self.summed = codes, scales, form, summed

    def quantised(self, dim: int) -> Quantised:
        """Return codes and scales for a product summing over `dim`, -1 or -2."""
        assert dim == self.summed or self.form.square, "gathered for the products of the other direction"
        scales = self.scales.view(torch.float8_e8m0fnu) if self.form.powers else self.scales
        return Quantised(self.codes.view(torch.float8_e4m3fn), scales)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        one = args[0]
        # FSDP2 calls as_strided, and PyTorch's split backward calls view, both with the same shape.
        same = func.overloadpacket in (aten.as_strided, aten.view) and tuple(args[1]) == tuple(one.shape)
        if same or func.overloadpacket in (aten.detach, aten.alias):
            return cls(one.codes, one.scales, one.form, one.summed, one.dtype)
        if func.overloadpacket is aten.zeros_like:  # the gradient of a weight that no microbatch has used
            return torch.zeros(one.shape, dtype=one.dtype, device=one.codes.device)
        raise NotImplementedError(
            f"{func} cannot run on a weight that FSDP2 has gathered as float8 codes; set precision.float8_all_gather = false"
        )

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"GatheredWeight({list(self.shape)}, {self.form.name})"


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


def may_gather_in_blocks(form: Format, layout: Layout | Config) -> bool:
    """Return whether FSDP2 can gather weights of `form` as codes and scales, provided that shards consist of whole blocks."""
    if layout.precision.float8_all_gather is False or layout.parallel.data_parallel != "fsdp2":
        return False
    if layout.parallel.tp > 1 or layout.parallel.ep > 1 or layout.compile.enabled:
        return False
    if isinstance(layout.parallel.reshard_after_forward, int):
        return False  # FSDP2 gathers a weight resharded over fewer ranks as one tensor
    if form.square:
        return True
    return layout.activation_checkpoint.mode in ("none", "offload") and frees_after_forward(layout)


def gather_in_blocks(weights: dict[str, tuple[nn.Module, str]], form: Format, layout: Layout) -> list[str]:
    """Make FSDP2 gather `weights` as codes and scales where possible, in place. Return the names of these weights.

    weights: parameter name -> (module, attribute). A weight is left unchanged if a shard would not have whole blocks.
    """
    if not may_gather_in_blocks(form, layout):
        return []
    taken = []
    for name, (module, leaf) in weights.items():
        weight = getattr(module, leaf)
        mesh = layout.meshes.fsdp_experts if isinstance(module, Experts) else layout.meshes.fsdp
        ranks = mesh.size(mesh.ndim - 1)
        rows = 1 if isinstance(module, Experts) else form.block
        whole = (
            not any(side % form.block for side in weight.shape[-2:]) and weight.shape[0] % (rows * ranks) == 0
        )
        if ranks > 1 and whole:
            setattr(module, leaf, nn.Parameter(ShardedWeight(weight.detach(), form), weight.requires_grad))
            taken.append(name)
    return taken


def gather_plain(modules: tuple[nn.Module, ...]) -> None:
    """Make FSDP2 gather mxfp8 weights of `modules` in precision.compute, in place.

    Call for modules that stay gathered until backward: backward needs other codes than forward.
    """
    for module in modules:
        for inner in module.modules():
            for name, weight in list(inner.named_parameters(recurse=False)):
                if isinstance(weight, ShardedWeight) and not weight.form.square:
                    inner.register_parameter(name, nn.Parameter(weight._tensor, weight.requires_grad))
