"""AdamW's update as one compiled kernel per box of a shard.

The kernel reads every input once and writes every output once. With a float32 master, a float32 gradient and bfloat16
moments, an element takes 20 bytes of memory traffic, and 2 more if the kernel also writes bfloat16 compute weights. The
kernel also multiplies gradients by the clip coefficient. Separate operators take several times as long, because each
reads and writes whole tensors.

`update_elements` is ordinary PyTorch code and also works without the compiler.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils.dlpack import from_dlpack, to_dlpack

from forge.config.layout import Compile
from forge.config.schema import OptimizerConfig
from forge.optim.adamw import AdamW
from forge.optim.optimizer import gradient, weight_decay, wide_dtype
from forge.optim.rounding import noise_bits
from forge.shard import Shard

# Maximum number of graphs of the kernel. Graphs differ in dtypes, in the presence of copies and noise, and in having
# one or several rows.
GRAPHS = 32
# Position of the skip flag in a row's noise factor, above its 16 bits of noise.
SKIP_BIT = 16


class CompiledAdamW(AdamW):
    """AdamW with a compiled update.

    Moments are in bfloat16 or in the dtype of the arithmetic. compiled: the compiler's settings. copies:
    parameter -> the same elements in a narrower compute dtype. Each step writes parameters and copies.
    """

    def __init__(
        self,
        shards: list[Shard],
        config: OptimizerConfig,
        group: ProcessGroup | None,
        compiled: Compile,
        copies: Mapping[Tensor, Tensor],
    ):
        super().__init__(shards, config, group)
        self.copies = {s.parameter: copies[s.parameter] for s in shards if s.parameter in copies}
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, GRAPHS)
        self._kernel: Callable[..., None] = torch.compile(
            update_elements, backend=compiled.backend, fullgraph=True, dynamic=True
        )
        if self.moments.rounding is not None:
            self.moments.rounding.bits = torch.compile(
                noise_bits, backend=compiled.backend, fullgraph=True, dynamic=True
            )
        self._factor: Tensor | None = None

    def scale_by(self, factor: Tensor) -> None:
        """Multiply the gradients of the next step by the device scalar `factor`."""
        self._factor = factor

    def step(self, lr: float, skip: Tensor) -> None:
        super().step(lr, skip)
        self._steps += 1 - skip
        self._factor = None

    def _update(self, shards: list[Shard], lr: float, skip: Tensor) -> None:
        numbers = self._numbers(shards[0], lr, skip).to(wide_dtype(shards[0]))
        for shard in shards:
            tensors = [
                shard.data,
                gradient(shard).contiguous(),
                self.moments.stored["exp_avg", shard.name],
                self.moments.stored["exp_avg_sq", shard.name],
                self.copies.get(shard.parameter),
            ]
            for box, noise in self._boxes(shard, tensors, numbers[-1]):
                operands = [None if t is None else _at_its_start(t) for t in box]
                self._kernel(*operands, tuple(map(_at_its_start, noise)), numbers)

    def _numbers(self, shard: Shard, lr: float, skip: Tensor) -> Tensor:
        """Return the scalar arguments of `update_elements`, float64 `[9]`, without synchronising with the device."""
        count = self._steps.max().double() + 1
        (beta1, beta2), rates = self._config.betas, shard.rates
        rate, decay = lr * rates.scale * rates.lr, weight_decay(shard.name, self._config) / rates.lr
        fixed = (1 - rate * decay, 1 - beta1, beta2, 1 - beta2, self._config.eps * rates.eps)
        of_count = (rate / (1 - beta1**count), (1 - beta2**count).sqrt())
        factor = torch.ones_like(count) if self._factor is None else self._factor.to(count)
        return torch.stack([*(torch.full_like(count, x) for x in fixed), *of_count, factor, skip.to(count)])

    def _boxes(
        self, shard: Shard, tensors: Sequence[Tensor | None], skip: Tensor
    ) -> Iterator[tuple[list[Tensor | None], tuple[Tensor, ...]]]:
        """For each box of the shard, yield the views `[rows, columns]` of `tensors` and the noise factors of both moments."""
        assert all(t is None or t.is_contiguous() for t in tensors), "a part would be a copy"
        if (rounding := self.moments.rounding) is None:
            yield [None if t is None else t.view(1, -1) for t in tensors], ()
            return
        pieces = [None if t is None else [piece for _, piece in shard.pieces(t)] for t in tensors]
        first, second = (rounding.factors(shard, slot) for slot in ("exp_avg", "exp_avg_sq"))
        for number, noise in enumerate(zip(first, second, strict=True)):
            (rows, columns), of_second = noise
            # The skip flag is stored in each row's noise, because the compiler would make a separate loop for a value
            # without a row dimension.
            rows = rows | (skip.to(torch.int32) << SKIP_BIT)
            boxes = [None if p is None else p[number].view(-1, columns.numel()) for p in pieces]
            yield boxes, (rows, columns, *of_second)


def update_elements(
    master: Tensor,
    grad: Tensor,
    first: Tensor,
    second: Tensor,
    rounded: Tensor | None,
    noise: tuple[Tensor, ...],
    numbers: Tensor,
) -> None:
    """Update elements `[rows, columns]` in place, like torch.optim.adamw with fused=True, in the dtype of `numbers`.

    rounded: the compute weights, which receive the new values in their own dtype; None: no such weights. noise: the
    factors of both moments from `StochasticRounding.factors`; () without rounding. numbers: from
    `CompiledAdamW._numbers`. A skipped step changes nothing. The skip flag is SKIP_BIT of the first factor; without
    noise, the last of `numbers`.
    """
    keep, share, decay_rate, square_share, eps, step_size, root, factor, skip = numbers.unbind()
    wide, skipped = numbers.dtype, (noise[0] >> SKIP_BIT if noise else skip) > 0
    values, scaled = master.to(wide), grad.to(wide) * factor
    mean = torch.lerp(first.to(wide), scaled, share)
    square = second.to(wide) * decay_rate + square_share * scaled * scaled
    values = values * keep - step_size * mean / (square.sqrt() / root + eps)
    for moment, wider, factors in ((first, mean, noise[:2]), (second, square, noise[2:])):
        narrow = _round(wider, factors) if factors else wider
        moment.copy_(torch.where(skipped, moment, narrow.to(moment.dtype)))
    updated = torch.where(skipped, master, values.to(master.dtype))
    master.copy_(updated)
    if rounded is not None:
        rounded.copy_(updated.to(rounded.dtype))


def _at_its_start(tensor: Tensor) -> Tensor:
    """Return a view of the same memory without a storage offset.

    With storage offsets, the compiler would make a kernel for each offset.
    """
    return tensor if tensor.storage_offset() == 0 else from_dlpack(to_dlpack(tensor))


def _round(wide: Tensor, factors: tuple[Tensor, ...]) -> Tensor:
    """Round like `StochasticRounding.copy_`: add the noise to the lower half of the float32 bits and keep the upper half."""
    rows, columns = factors
    bits = wide.to(torch.float32).view(torch.int32) + ((rows ^ columns) & 0xFFFF)
    return (bits & -0x10000).view(torch.float32)
