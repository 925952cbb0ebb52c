"""Context parallelism: the ranks of the cp axis share every sequence. Each rank holds an early and a late chunk.

Only attention looks across tokens, so only its inner function `Attention.attend` is replaced. Linear-attention layers
exchange recurrent states instead of keys and values, for every value of parallel.context
(forge/parallel/context/states.py). Parameters are unchanged: data parallelism shards them over dp_shard x cp and sums
their gradients over these ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from forge.model import AttentionFunction, LinearAttention, Transformer
from forge.parallel.context.gathered import AllGatherAttention
from forge.parallel.context.ring import RingAttention
from forge.parallel.context.sequence import SequenceSplit
from forge.parallel.context.states import PassedStates
from forge.parallel.context.ulysses import UlyssesAttention
from forge.parallel.layout import Layout
from forge.runtime.errors import UserError

__all__ = ["SequenceSplit", "apply_context", "replace_attention"]

FUNCTIONS: dict[str, Callable[[SequenceSplit], AttentionFunction]] = {
    "allgather": AllGatherAttention,
    "ulysses": UlyssesAttention,
    "ring": RingAttention,
}


def apply_context(model: Transformer, layout: Layout) -> None:
    """Replace each layer's attention function with a function that attends to the tokens of all cp ranks.

    Raises UserError for ring attention in compiled blocks on CUDA, and for an attention module without `attend`.
    """
    check_attention(model)
    split = SequenceSplit(layout.meshes.cp)
    if (
        layout.parallel.context == "ring"
        and layout.compile.enabled
        and layout.meshes.fsdp.device_type == "cuda"
    ):
        raise UserError(
            "parallel.context = ring does not work with compile.enabled = true on CUDA: the compiler cannot "
            "trace the backward of flex_attention, which ring attention calls; use allgather or ulysses, or "
            "set compile.enabled = false"
        )
    attend, states = FUNCTIONS[layout.parallel.context](split), PassedStates(split)
    for block in model.layers.values():
        attention: Any = block.attention
        attention.attend = states if isinstance(attention, LinearAttention) else attend


def check_attention(model: Transformer) -> None:
    """Raise UserError for an attention module without `attend`. Such a module would see only this rank's tokens."""
    for layer, block in model.layers.items():
        attention = getattr(block, "attention", None)
        if not hasattr(attention, "attend"):
            raise UserError(
                f"parallel.cp splits sequences, but layers.{layer}.attention ({type(attention).__name__}) has no `attend`, "
                "so it would see only this rank's tokens; add that attribute and compute attention with it "
                "(docs/internals/extending/own-model.md), or set parallel.cp = 1"
            )


def replace_attention(model: Transformer, function: Callable[[Any], Any]) -> None:
    """Replace each layer's attention function `attend` with `function(attend)`."""
    for block in model.layers.values():
        attention: Any = block.attention
        if hasattr(attention, "attend"):
            attention.attend = function(attention.attend)
