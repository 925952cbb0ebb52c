"""Print the planned peak of a configuration in bytes. A run starts this program after it runs out of memory.

python -m forge.tools.plan.peak WORLD_SIZE RANKS_PER_NODE card|host < config.toml
"""

from __future__ import annotations

import sys

from forge.config import Config, check_world, parse_toml_text
from forge.tools.plan.command import largest
from forge.tools.plan.hardware import Hardware, Link
from forge.tools.plan.plan import make_plan

# The peak depends only on the kind of hardware (GPU or CPU) and on the ranks of a node. The other values are placeholders.
_LINK = Link(gb_per_s=1, latency_us=0)


def planned_peak(config: Config, world: int, per_node: int, on_gpu: bool) -> int:
    """Return the bytes of live tensors at the peak, on the fullest rank.

    Raises UserError if the config cannot be planned.
    """
    config = largest(config)
    hardware = Hardware(
        card="any" if on_gpu else "",
        memory_gib=1,
        memory_gb_per_s=1,
        cards_per_node=per_node,
        node=_LINK,
        cluster=_LINK,
    )
    plan = make_plan(config, check_world(config, world), hardware)
    return max(stage.peak.size for stage in plan.stages)


if __name__ == "__main__":
    print(
        planned_peak(
            parse_toml_text(sys.stdin.read()), int(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "card"
        )
    )
