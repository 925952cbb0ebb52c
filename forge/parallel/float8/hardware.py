"""The GPUs with kernels for each float8 recipe, and the choice between kernels and emulation for a block format."""

from __future__ import annotations

import torch

from forge.config.layout import Precision
from forge.parallel.float8.formats import Format
from forge.parallel.float8.products import Emulated, Products

# The first compute capability with kernels (for mxfp8 the only major version), and the names of such GPUs.
_FIRST = {
    "tensorwise": ((8, 9), "Ada, Hopper or later"),
    "rowwise": ((8, 9), "Ada, Hopper or later"),
    "blockwise": ((9, 0), "Hopper or later"),
    "mxfp8": ((10, 0), "Blackwell"),
}


def missing_kernels(precision: Precision, device_type: str) -> str:
    """Return the reason why `device_type` cannot compute `precision.float8` without emulation; empty if it can."""
    recipe = precision.float8
    if device_type == "cpu":
        return f"a CPU has no kernels for precision.float8 = {recipe}"
    first, names = _FIRST[recipe]
    capability = torch.cuda.get_device_capability()
    # Consumer Blackwell (12.x) has other MX kernels.
    if capability < first or (recipe == "mxfp8" and capability[0] != first[0]):
        return (
            f"precision.float8 = {recipe} needs a GPU of compute capability {first[0]}.{first[1]} ({names}), "
            f"but this GPU has {capability[0]}.{capability[1]}"
        )
    if recipe in ("blockwise", "mxfp8") and precision.compute != "bfloat16":
        return f"the kernels of {recipe} return only bfloat16, but precision.compute = {precision.compute}"
    if precision.compute == "float64":
        return f"the kernels of {recipe} return only bfloat16 or float32, but precision.compute = float64"
    return ""


def product_format(precision: Precision, device_type: str) -> str:
    """Return the format whose peak FLOPS bounds the products: "float8" if its kernels run, else `precision.compute`."""
    recipe = precision.float8
    if recipe == "none" or precision.float8_emulate is True or missing_kernels(precision, device_type):
        return precision.compute
    return "float8"


def products_for(form: Format, *, emulate: bool) -> Products:
    """Return the products of `form`: emulated, or computed by the kernels of this machine's GPU."""
    if emulate:
        return Emulated(form)
    # Imported lazily, because these modules import torchao.
    from forge.parallel.float8.kernels import BlockwiseKernels, MXKernels

    if form.powers:
        return MXKernels(form)
    return BlockwiseKernels(form, native=torch.cuda.get_device_capability()[0] == 9)
