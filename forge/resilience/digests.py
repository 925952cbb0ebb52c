"""Do ranks that hold copies of the same numbers still hold the same? A digest of each tensor, compared.

Copies are updated identically and never sent again. So a bit that flips in one of them stays, and the copies drift apart
while the loss may look well. One pass over the tensors and one small all-gather, where a save waits anyway.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

# Elements that are widened to 64 bits at a time.
CHUNK = 1 << 20
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Odd, so that multiplying by it modulo 2^64 loses nothing (the multiplier of Knuth's MMIX generator).
_MULTIPLIER = 6364136223846793005

Copy = tuple[str, Tensor, ProcessGroup]


def digest(tensor: Tensor) -> Tensor:
    """A 64-bit fingerprint of the bits of `tensor`, an int64 scalar on its device, without waiting for it.

    A sum of elements, as integers, times odd weights, modulo 2^64: the same in whatever order a device adds up, and
    another if any one bit is.
    """
    bits = tensor.detach().reshape(-1).view(_INTEGERS[tensor.element_size()])
    places = torch.arange(min(CHUNK, len(bits)), device=tensor.device)
    weights = (places * _MULTIPLIER) | 1
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for chunk in bits.split(CHUNK) if len(bits) else ():
        total = total * _MULTIPLIER + (chunk.long() * weights[: len(chunk)]).sum()
    return total


def differing_copies(copies: Iterable[Copy], device: torch.device) -> list[str]:
    """Which tensors differ on which ranks, one sentence each and the same on every rank; empty if all is well.

    copies: name, what this rank holds, and the group whose ranks hold the same; in the same order on all ranks of a group.
    Collective over all ranks. Of two copies nobody knows which is the right one; of more, the majority's.
    """
    by_group: dict[ProcessGroup, list[tuple[str, Tensor]]] = {}
    for name, tensor, group in copies:
        by_group.setdefault(group, []).append((name, digest(tensor).to(device)))
    gathered = {group: _gather([one for _, one in named], group) for group, named in by_group.items()}
    differ = torch.zeros((), dtype=torch.int64, device=device)
    for digests in gathered.values():
        differ += (digests != digests[0]).sum()
    dist.all_reduce(differ)
    if not differ.item():
        return []
    mine = [
        _sentence(name, of_ranks, dist.get_process_group_ranks(group))
        for group, named in by_group.items()
        for (name, _), of_ranks in zip(named, gathered[group].T.tolist(), strict=True)
        if len(set(of_ranks)) > 1
    ]
    everyones: list[list[str]] = [[]] * dist.get_world_size()
    dist.all_gather_object(everyones, mine)
    return list(dict.fromkeys(sentence for some in everyones for sentence in some))


def _gather(digests: list[Tensor], group: ProcessGroup) -> Tensor:
    """int64 `[ranks of the group, tensors]`."""
    mine = torch.stack(digests)
    everyones = mine.new_empty(group.size() * len(mine))
    dist.all_gather_into_tensor(everyones, mine, group=group)
    return everyones.view(group.size(), len(mine))


def _sentence(name: str, digests: Sequence[int], ranks: Sequence[int]) -> str:
    (usual, count), *_ = Counter(digests).most_common()
    if 2 * count > len(digests):
        others = [rank for rank, one in zip(ranks, digests, strict=True) if one != usual]
        return f"{name} on rank {', '.join(map(str, others))} is not what the other ranks hold"
    return f"{name} differs between the ranks {', '.join(map(str, ranks))}"
