"""Matrix products in float8: choice of layers (apply.py), torchao's recipes (torchao.py), block formats (formats.py)."""

from forge.parallel.float8.apply import apply_float8, check_patterns, compute_in_float8
from forge.parallel.float8.gathering import gather_plain
from forge.parallel.float8.hardware import product_format
from forge.parallel.float8.torchao import scale_refresher

__all__ = [
    "apply_float8",
    "check_patterns",
    "compute_in_float8",
    "gather_plain",
    "product_format",
    "scale_refresher",
]
