"""Find the matrix products that the given hardware computes in float8, and the layers that stay in precision.compute."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from torch import Tensor, nn

from forge.config import Config
from forge.model import Experts
from forge.model.experts import RowGroups, grouped_linear
from forge.parallel.build import build_meta_model
from forge.parallel.float8.apply import choose_experts, choose_layers
from forge.parallel.float8.formats import FORMATS
from forge.parallel.float8.gathering import GatheredWeight
from forge.parallel.float8.layers import BlockFormatLinear, convert_experts, grouped
from forge.parallel.modules import for_all_layers
from forge.tools.plan.hardware import Hardware

# Recipe -> pattern of the GPUs without kernels for this recipe (forge/parallel/float8/hardware.py, kernels.py).
_WITHOUT = {
    "tensorwise": "A100",
    "rowwise": "A100",
    "blockwise": "A100|L40S",
    "mxfp8": "A100|L40S|H100|H200",
}


def products_in_float8(config: Config, hardware: Hardware) -> set[str]:
    """Return the kinds of products that run on float8 kernels: "linear", "experts", both or none.

    Emulated products do not count.
    """
    recipe, chosen = config.precision.float8, config.precision
    if recipe == "none" or chosen.float8_emulate is True or not _has_kernels(recipe, hardware):
        return set()
    grouped = recipe == "mxfp8" and config.model.moe is not None and chosen.float8_experts is not False
    return {"linear", "experts"} if grouped else {"linear"}


def float8_notes(config: Config, hardware: Hardware | None) -> Iterator[str]:
    """Yield notes on float8 for the report: emulated products, layers not in float8, memory that the plan leaves out."""
    recipe = config.precision.float8
    if recipe == "none":
        return
    if recipe in FORMATS:
        yield (
            f"precision.float8 = {recipe}: memory is planned without the float8 codes and scales of the running layer; "
            "weights gathered by FSDP2 in float8 are counted with their float8 size"
        )
    else:
        yield f"precision.float8 = {recipe}: memory and collectives are planned without float8"
    if hardware is not None:
        fast = products_in_float8(config, hardware)
        card = hardware.card or "a CPU"
        if not fast:
            compute = "the run is slower than this plan, which assumes matrix products in precision.compute"
            yield f"precision.float8 = {recipe} is emulated on {card}: {compute}"
        elif (
            recipe == "blockwise"
            and config.model.moe is not None
            and config.precision.float8_experts is not False
        ):
            yield f"precision.float8 = blockwise: routed experts are emulated on {card}, so the run is slower than this plan"
    model = build_meta_model(config)
    left_out = choose_layers(model, config.precision)[1]
    reasons = Counter(
        re.sub(r"has sides \d+ x \d+ on each rank, which", "has sides that", why) for why in left_out.values()
    )
    for reason in reasons:
        names = for_all_layers(
            name
            for name, why in left_out.items()
            if re.sub(r"has sides \d+ x \d+ on each rank, which", "has sides that", why) == reason
        )
        yield f"not in float8: {', '.join(sorted(names))} {reason}"
    if config.model.moe is not None and not choose_experts(model, config.precision):
        yield "not in float8: routed experts"


class PlainProducts:
    """`Products` for fake tensors: multiply unquantised operands with the operators of `precision.compute`.

    A weight gathered as float8 codes has no copy in `precision.compute`. In its place, the product takes a tensor of
    the weight's shape with all strides 0, which needs almost no memory.
    """

    def output(self, x: Tensor, weight: Tensor) -> Tensor:
        return x @ _plain(weight).mT

    def grad_input(self, grad: Tensor, weight: Tensor) -> Tensor:
        return grad @ _plain(weight)

    def grad_weight(self, grad: Tensor, x: Tensor) -> Tensor:
        return grad.flatten(0, -2).mT @ x.flatten(0, -2)

    def grouped_output(self, rows: Tensor, weight: Tensor, groups: RowGroups) -> Tensor:
        return grouped_linear(rows, _plain(weight), groups)

    def grouped_grad_input(self, grad: Tensor, weight: Tensor, groups: RowGroups) -> Tensor:
        return grouped_linear(grad, _plain(weight).mT, groups)


def use_plain_products(model: nn.Module) -> None:
    """Set `PlainProducts` as the products of all layers and experts in a float8 block format.

    FSDP2 still gathers float8 codes and scales.
    """
    for module in model.modules():
        if isinstance(module, BlockFormatLinear):
            module.products = PlainProducts()
        elif isinstance(module, Experts) and getattr(module.multiply, "func", None) is grouped:
            convert_experts(module, PlainProducts())


def _plain(weight: Tensor) -> Tensor:
    if not isinstance(weight, GatheredWeight):
        return weight
    strides = [0] * weight.ndim
    return weight.codes.new_empty(1, dtype=weight.dtype).as_strided(weight.shape, strides)


def _has_kernels(recipe: str, hardware: Hardware) -> bool:
    return bool(hardware.card) and not re.search(_WITHOUT[recipe], hardware.card)
