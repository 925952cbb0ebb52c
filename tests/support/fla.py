"""A stub of flash-linear-attention, whose kernels need a GPU. It has fla-core 0.6.0's signatures and forge's recurrence."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from torch import Tensor

from forge.model import linear_attention
from forge.model.delta_rule import recurrent_delta_rule
from forge.parallel.context import states

calls: list[str] = []


def install() -> None:
    """Make this process compute linear attention through the stub, on any device and in any dtype."""
    for name, kernel in (("kda", "chunk_kda"), ("gated_delta_rule", "chunk_gated_delta_rule")):
        module = ModuleType(f"fla.ops.{name}")
        setattr(module, kernel, _by_channel if name == "kda" else _by_head)
        for package in ("fla", "fla.ops"):
            sys.modules.setdefault(package, ModuleType(package))
        sys.modules[module.__name__] = module
    for user in (linear_attention, states):
        user.is_for_kernels = lambda k, v, log_decay: True  # type: ignore[attr-defined]


def remove() -> None:
    """Remove the stub from the process. Otherwise other libraries would use it, e.g. transformers."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "fla"]:
        del sys.modules[name]


def _by_head(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **options: Any
) -> tuple[Tensor, Tensor | None]:
    assert g.shape == beta.shape == v.shape[:3]
    return _by_channel(q, k, v, g.unsqueeze(-1), beta, **options)


def _by_channel(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
) -> tuple[Tensor, Tensor | None]:
    assert q.shape == k.shape and q.dtype == k.dtype == v.dtype
    calls.append("decays by head" if g.shape[-1] == 1 else "decays by channel")
    q = q * (k.shape[-1] ** -0.5 if scale is None else scale)
    out, last = recurrent_delta_rule(q, k, v, g, beta, None, initial_state)
    return out.to(v.dtype), last if output_final_state else None
