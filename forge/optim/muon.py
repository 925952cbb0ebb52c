"""Muon: orthogonalised momentum on whole matrices under every engine and layout; AdamW for all other parameters.

Jordan et al., "Muon", 2024, in the form of `torch.optim.Muon`; match_rms_adamw is from Liu et al., "Muon is Scalable
for LLM Training", 2025 (arXiv:2502.16982); second_moment = neuron from Li et al., "NorMuon", 2025 (arXiv:2510.05491);
cautious_decay from Chen et al., "Cautious Weight Decay", 2025 (arXiv:2510.12402); qk_clip from Kimi Team, "Kimi K2",
2025 (arXiv:2507.20534).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import repeat
from math import sqrt
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from forge.config.schema import OptimizerConfig
from forge.optim.adamw import AdamW
from forge.optim.matrices import MatrixBatch, WholeMatrices
from forge.optim.moments import make_moments
from forge.optim.optimizer import gradient, weight_decay, wide_dtype, write_unless
from forge.runtime.errors import UserError
from forge.shard import Box, Shard

log = logging.getLogger(__name__)

# Added to square roots of moments, so rows of zeros stay zeros.
LEAST_MOMENT = 1e-10


class Muon:
    """The update theta <- theta - lr * (weight_decay * theta + factor * O), with O the orthogonalised momentum.

    `optimizer.muon.adjust_lr` determines the factor. A matrix is a global 2-D tensor or one expert of a 3-D tensor;
    with `split_heads`, one head of the query, key or value projection. Orthogonalisation runs in float64 if storage is
    float64, otherwise in bfloat16 on CUDA and in float32 elsewhere. Momentum is a mean of gradients, laid out like the
    parameter. One rank, the matrix's owner, orthogonalises it. With second_moment = "neuron" the owner also holds the
    second moment of each row.
    """

    def __init__(
        self,
        shards: list[Shard],
        config: OptimizerConfig,
        group: ProcessGroup | None = None,
        adamw: Callable[..., AdamW] = AdamW,
    ):
        """Allocate the state.

        adamw: class of the optimizer for all other parameters, with arguments (shards, config, group).
        """
        self._config, self._keys = config, config.muon
        self._shards = [shard for shard in shards if _is_muons(shard)]
        self._all, self._logits = shards, dict[str, tuple[Tensor, Tensor]]()
        self._rest = adamw([shard for shard in shards if not _is_muons(shard)], config, group)
        self.copies: Mapping[Tensor, Tensor] = getattr(self._rest, "copies", {})
        self._moments = make_moments(self._shards, ("momentum",), config, group)
        self._updates = torch.zeros((), dtype=torch.int64, device=shards[0].data.device)
        self._dtype = _iteration_dtype(self._shards)
        heads = [shard.heads if self._keys.split_heads else 1 for shard in self._shards]
        self._factors = [self._factor(s, n) for s, n in zip(self._shards, heads, strict=True)]
        self._matrices = WholeMatrices(self._shards, group, dtype=self._dtype, heads=heads)
        self._rows: _RowMoments | None = None
        if self._keys.second_moment == "neuron":
            self._rows = _RowMoments(self._shards, self._matrices.batches, config.betas[1])
        elements = sum(shard.global_shape.numel() for shard in self._shards)
        log.info(
            "muon updates %d tensors (%s elements in total); adamw updates all other parameters",
            len(self._shards),
            f"{elements:,}",
        )

    def step(self, lr: float, skip: Tensor) -> None:
        self._moments.draw(self._updates)
        self._rest.step(lr, skip)
        write_unless(skip, self._updates, self._updates + 1)
        if not self._shards:
            return
        lr *= (self._keys.lr or self._config.lr) / self._config.lr
        updates = [self._update(shard, skip) for shard in self._shards]
        self._moments.finish()
        self._matrices.replace(updates, partial(self._orthogonal, skip=skip))
        for shard, update, factor in zip(self._shards, updates, self._factors, strict=True):
            weight = shard.data.to(wide_dtype(shard))
            rate = lr * shard.rates.scale
            decay: float | Tensor = rate * weight_decay(shard.name, self._config)
            if self._keys.cautious_decay:
                decay = (update * weight.sign() > _least_update(shard, weight.dtype)).to(weight.dtype) * decay
            write_unless(
                skip,
                shard.data,
                (weight * (1 - decay)).sub_(update, alpha=rate * shard.rates.orthogonal * factor),
            )
        if self._keys.qk_clip:
            self._clip_logits(skip)

    def _clip_logits(self, skip: Tensor) -> None:
        """Scale down the query and key weights of each head whose largest logit in this step is above `qk_clip`.

        Frozen weights keep their values, so such a head's logits may stay above the limit.

        skip: scalar; nonzero in a skipped step, which changes nothing.
        """
        for shard in (one for one in self._all if one.name in self._logits and one.rates.scale):
            (largest, powers), limit = self._logits[shard.name], self._keys.qk_clip
            # Heads without any observation have -inf.
            over = (largest > limit) & (skip == 0)
            scale = torch.where(over, limit / largest, 1.0).unsqueeze(-1)  # [heads, 1]
            rows = scale.pow(powers).flatten().to(wide_dtype(shard))
            for box, piece in shard.pieces(shard.data):
                of_rows = rows[box.offsets[0] : box.offsets[0] + box.sizes[0]]
                piece.mul_(of_rows.view(-1, *[1] * (piece.dim() - 1)))
            if shard.parameter in self.copies:
                self.copies[shard.parameter].view_as(shard.data).copy_(shard.data)

    def bound_logits(self, logits: dict[str, tuple[Tensor, Tensor]]) -> None:
        """Set the largest attention logits. Each step scales down the query and key weights of heads above `qk_clip`.

        logits: parameter -> (largest logit of each head, powers), see `LargestLogits`.
        """
        self._logits = logits

    def _update(self, shard: Shard, skip: Tensor) -> Tensor:
        """Add the gradient to the momentum. Return the tensor to orthogonalise, laid out like `shard.data`."""
        mean = self._moments.read(shard, "momentum")
        # In a skipped step, the mean itself takes the gradient's place, so nothing changes and all values are finite.
        new = torch.where(skip > 0, mean, gradient(shard).to(mean.dtype))
        mean.lerp_(new, 1 - self._keys.momentum)
        update = new.lerp_(mean, self._keys.momentum) if self._keys.nesterov else mean.clone()
        self._moments.write(shard, "momentum", mean)
        return update.to(self._dtype).contiguous()

    def _orthogonal(self, matrices: Tensor, batch: MatrixBatch, skip: Tensor) -> Tensor:
        result = orthogonalize_(matrices, self._keys.ns_steps, self._keys.orthogonalization)
        return result if self._rows is None else self._rows.normalize(result, batch, skip)

    def _factor(self, shard: Shard, heads: int) -> float:
        """Return the learning-rate factor for the shape of the shard's matrices, by `optimizer.muon.adjust_lr`."""
        rows, columns = shard.global_shape[-2] // heads, shard.global_shape[-1]
        if self._keys.adjust_lr == "original":
            return sqrt(max(1, rows / columns))
        return 0.2 * sqrt(max(rows, columns))

    def follow(self, config: OptimizerConfig) -> None:
        """Use weight_decay, betas, eps and muon.momentum of `config`, beginning with the next step."""
        self._config, self._keys = config, config.muon
        self._rest.follow(config)
        if self._rows is not None:
            self._rows.decay = config.betas[1]

    def tensors(self) -> Iterator[tuple[str, Shard, Tensor]]:
        yield from self._moments.tensors()
        if self._rows is not None:
            for shard in self._rows.shards:
                yield "row_moment", shard, shard.data
        yield from self._rest.tensors()

    def state(self) -> dict[str, Any]:
        """Return the number of updates, not counting skipped steps. Synchronises with the device."""
        # AdamW counts by parameter, and this rank may have no element of AdamW's parameters.
        return self._rest.state() | {"updates": int(self._updates)}

    def load_state(self, state: dict[str, Any]) -> None:
        self._rest.load_state(state)
        self._updates.fill_(state["updates"])
        self._moments.share_loaded()


class _RowMoments:
    """Second moments of the rows of orthogonalised matrices. Each is stored on the owner of its matrix.

    shards: one per matrix parameter, with the parameter's name and its shape without the last dimension. Boxes are the rows
    of the matrices that this rank owns.
    """

    def __init__(self, shards: list[Shard], batches: list[MatrixBatch], decay: float):
        self.decay = decay
        boxes: dict[int, list[Box]] = {number: [] for number in range(len(shards))}
        for run in (run for batch in batches for run in batch.runs):
            rows = run.shape[0]
            if len(shards[run.number].global_shape) == 3:
                boxes[run.number].append(Box((run.first, 0), (run.count, rows)))
            else:
                boxes[run.number].append(Box((run.first * rows,), (run.count * rows,)))
        self.shards = []
        for number, shard in enumerate(shards):
            values = shard.data.new_zeros(sum(box.numel for box in boxes[number]), dtype=wide_dtype(shard))
            self.shards.append(
                Shard(shard.name, shard.global_shape[:-1], tuple(boxes[number]), values, kind=shard.kind)
            )
        # For each batch, views of the moments in the order of its runs.
        pieces = [iter([piece for _, piece in shard.pieces(shard.data)]) for shard in self.shards]
        self._of_batch = {
            id(batch): [next(pieces[run.number]).view(-1, batch.shape[0]) for run in batch.runs]
            for batch in batches
        }

    def normalize(self, matrices: Tensor, batch: MatrixBatch, skip: Tensor) -> Tensor:
        """Divide each row of `matrices` `[n, rows, columns]` by the square root of its second moment.

        Then restore each matrix's norm. The paper scales to norm 0.2 sqrt(rows * columns). For an orthogonal matrix
        under match_rms_adamw, the two scales are equal.
        """
        moments = torch.cat(self._of_batch[id(batch)])
        wide = matrices.to(moments.dtype)
        new = moments.lerp(wide.square().mean(-1), 1 - self.decay)
        counts = [run.count for run in batch.runs]
        for held, values in zip(self._of_batch[id(batch)], new.split(counts), strict=True):
            write_unless(skip, held, values)
        scaled = wide / (new.sqrt() + LEAST_MOMENT).unsqueeze(-1)
        before = torch.linalg.vector_norm(wide, dim=(1, 2), keepdim=True)
        after = torch.linalg.vector_norm(scaled, dim=(1, 2), keepdim=True)
        return (scaled * (before / after.clamp(min=LEAST_NORM))).to(matrices.dtype)


def _is_muons(shard: Shard) -> bool:
    """Return whether Muon updates this parameter. True for a matrix, or a stack of expert matrices, inside a block.

    Routers and convolutions are excluded. Raises UserError (exit 2) for a parameter inside a block that is neither a
    vector, a matrix nor a stack of expert matrices.
    """
    dims = len(shard.global_shape)
    vectors = shard.name.endswith("bias")  # a 2-D bias is one vector per expert
    if not shard.name.startswith("layers.") or shard.kind in ("router", "convolution") or dims < 2 or vectors:
        return False
    if dims == 2 or (dims == 3 and shard.kind == "expert"):
        return True
    shape = " x ".join(map(str, shard.global_shape))
    raise UserError(
        f'optimizer.name = "muon": {shard.name} of {shape} is not a matrix, and Muon updates matrices only; use adamw, or an '
        "optimizer of your own (docs/internals/extending/optimizer.md)"
    )


def _least_update(shard: Shard, dtype: torch.dtype) -> float:
    """Return the threshold below which an element of an orthogonal update may be rounding noise.

    Cautious weight decay ignores the sign of smaller elements, because the sign of rounding noise depends on the
    layout. Typical elements of an orthogonal matrix are of size 1 / sqrt(longer side).
    """
    return sqrt(torch.finfo(dtype).eps / max(shard.global_shape[-2:]))


def _iteration_dtype(shards: list[Shard]) -> torch.dtype:
    wide = {wide_dtype(shard) for shard in shards}
    if torch.float64 in wide:
        return torch.float64
    on_gpu = any(shard.parameter.is_cuda for shard in shards)
    return torch.bfloat16 if on_gpu else torch.float32


# Orthogonalisation by matrix products only: approximates the nearest (semi-)orthogonal matrix.
#
# Each step maps every singular value s of X to a s + b s^3 + c s^5 and keeps the singular vectors:
# X <- a X + (b G + c G^2) X with G = X X^T. Jordan et al., "Muon: an optimizer for hidden layers in neural networks", 2024.

Method: TypeAlias = Literal["newton_schulz", "polar_express"]

# The same coefficients in every step; singular values end between about 0.7 and 1.2, not at 1.
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
# Amsel et al., "The Polar Express", 2025 (arXiv:2505.16932): optimal for each step if singular values start above 1e-3.
# Later steps repeat the last coefficients.
POLAR_EXPRESS = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
    (1.875, -1.25, 0.375),
)
# The paper's margin for rounding. Without it, a singular value just above 1 would grow.
ROOM = 1.01
LEAST_NORM = 1e-7


def orthogonalize_(matrices: Tensor, steps: int, method: Method = "newton_schulz") -> Tensor:
    """Orthogonalise matrices `[n, rows, columns]` in place, in their dtype, and return them. A zero matrix stays zero."""
    # A GPU computes all matrices in one batched product. A CPU computes the matrices of a batch one after another anyway.
    # In a loop over matrices, temporaries stay in the cache, and a plain product is faster than a batch of one.
    for some in [matrices] if matrices.is_cuda else matrices.unbind():
        _iterate_(some, _coefficients(steps, method), ROOM if method == "polar_express" else 1.0)
    return matrices


def _iterate_(matrices: Tensor, coefficients: list[tuple[float, float, float]], room: float) -> None:
    """Apply one polynomial per step, in place. matrices: `[n, rows, columns]`, or one matrix `[rows, columns]`.

    Matrices are first divided by their Frobenius norm times `room`. coefficients: (a, b, c) of each step.
    """
    tall = matrices.shape[-2] > matrices.shape[-1]
    add_product = torch.addmm if matrices.ndim == 2 else torch.baddbmm
    norm = torch.linalg.vector_norm(matrices, dim=(-2, -1), keepdim=True)
    x = matrices / (norm * room).clamp_(min=LEAST_NORM)
    for number, (a, b, c) in enumerate(coefficients, start=1):
        # Use the smaller of the two Gram matrices; the result is the same from either side.
        gram = x.mT @ x if tall else x @ x.mT
        polynomial = add_product(gram, gram, gram, beta=b, alpha=c)
        out = matrices if number == len(coefficients) else None
        x = add_product(x, *((x, polynomial) if tall else (polynomial, x)), beta=a, out=out)


def _coefficients(steps: int, method: Method) -> list[tuple[float, float, float]]:
    if method == "newton_schulz":
        return [NEWTON_SCHULZ] * steps
    *first, last = POLAR_EXPRESS
    safe = [(a / ROOM, b / ROOM**3, c / ROOM**5) for a, b, c in first]
    return [*safe, *repeat(last, max(0, steps - len(safe)))][:steps]
