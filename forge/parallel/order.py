"""The fixed order in which a layout is applied to a model, and what holds it.

context      sets the attention function; sees raw attention modules
tensor       splits raw linear layers; what later steps wrap must already be split
expert       spreads the experts, which tensor parallelism leaves alone
float8       swaps linear layers, carrying over the hooks that tensor parallelism put on them
activation   wraps each block's forward, so that recomputation repeats everything above
compile      sees the block as it will run
data         shards what is left of every parameter; must know all blocks in their final form
allocate  gives each rank memory for its own shards only
initialise   fills it
"""

from __future__ import annotations

from torch import nn

STEPS = (
    "context",
    "tensor",
    "expert",
    "float8",
    "activation",
    "compile",
    "data",
    "allocate",
    "initialise",
)


def take_step(model: nn.Module, step: str) -> None:
    """Note that `step` is being applied to `model`.

    Raises RuntimeError if it has been applied before, or if a step that has to follow it has.
    """
    taken: list[str] = model.__dict__.setdefault("_forge_steps", [])
    if step in taken:
        raise RuntimeError(f"{step} has been applied to this model already; each step is applied once")
    later = [other for other in taken if STEPS.index(other) > STEPS.index(step)]
    if later:
        raise RuntimeError(f"{step} must be applied before {later[0]}; the order is {', '.join(STEPS)}")
    taken.append(step)
