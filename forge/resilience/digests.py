"""Compare digests of replicated tensors between ranks.

Every rank updates its replicas independently and never sends them again. A flipped bit on one rank therefore persists, and
the replicas diverge while the loss may look normal. The check runs before a save and costs one pass over the tensors and
one small all-gather.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from forge.runtime import compat
from forge.runtime.distributed import gather_from_ranks

# Number of elements widened to 64 bits at a time.
CHUNK = 1 << 20
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Odd, so that multiplying by it modulo 2^64 is invertible (the multiplier of Knuth's MMIX generator).
_MULTIPLIER = 6364136223846793005

Copy = tuple[str, Tensor, ProcessGroup]


def digest(tensor: Tensor) -> Tensor:
    """Return a 64-bit digest of the bits of `tensor`: an int64 scalar on its device, without a host sync.

    The elements are read as integers. The digest is their weighted sum modulo 2^64, with odd weights. The sum does not
    depend on the order of addition, and any single flipped bit changes the sum.
    """
    bits = tensor.detach().reshape(-1).view(_INTEGERS[tensor.element_size()])
    places = torch.arange(min(CHUNK, len(bits)), device=tensor.device)
    weights = (places * _MULTIPLIER) | 1
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for chunk in bits.split(CHUNK) if len(bits) else ():
        total = total * _MULTIPLIER + (chunk.long() * weights[: len(chunk)]).sum()
    return total


def differing_copies(copies: Iterable[Copy], device: torch.device) -> list[str]:
    """Return one sentence for each tensor that differs between ranks; the list is equal on all ranks.

    Collective. copies: (name, this rank's tensor, group of its replicas), in the same order on all ranks of a group.
    With more than two replicas, the sentence names the ranks that differ from the majority.
    """
    by_group: dict[ProcessGroup, list[tuple[str, Tensor]]] = {}
    for name, tensor, group in copies:
        by_group.setdefault(group, []).append((name, digest(tensor).to(device)))
    gathered: dict[ProcessGroup, Tensor] = {}  # digests of all ranks, int64 [ranks, tensors]
    differ = torch.zeros((), dtype=torch.int64, device=device)
    for group, named in by_group.items():
        own = torch.stack([one for _, one in named])
        digests = own.new_empty(group.size() * len(own))
        compat.all_gather_into(digests, own, group).wait()
        gathered[group] = digests.view(group.size(), len(own))
        differ += (gathered[group] != gathered[group][0]).sum()
    dist.all_reduce(differ)
    if not differ.item():
        return []
    mine = [
        _sentence(name, of_ranks, dist.get_process_group_ranks(group))
        for group, named in by_group.items()
        for (name, _), of_ranks in zip(named, gathered[group].T.tolist(), strict=True)
        if len(set(of_ranks)) > 1
    ]
    of_all = gather_from_ranks("comparing copies", lambda: mine)
    return list(dict.fromkeys(sentence for some in of_all for sentence in some))


def _sentence(name: str, digests: Sequence[int], ranks: Sequence[int]) -> str:
    (usual, count), *_ = Counter(digests).most_common()
    if 2 * count > len(digests):
        others = [rank for rank, one in zip(ranks, digests, strict=True) if one != usual]
        return f"{name} on rank {', '.join(map(str, others))} differs from the other ranks"
    return f"{name} differs between the ranks {', '.join(map(str, ranks))}"
