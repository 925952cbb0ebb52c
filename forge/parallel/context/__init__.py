"""Context parallelism: the ranks of the cp axis share every sequence, each holding an early and a late part of it.

Only attention looks across tokens, so only the attention function is replaced (`Attention.attend`); parameters are
not touched: fsdp shards them over dp_shard x cp and sums their gradients there.
"""

from forge.parallel.context.apply import apply_context
from forge.parallel.context.sequence import Inputs, SequenceSplit

__all__ = ["Inputs", "SequenceSplit", "apply_context"]
