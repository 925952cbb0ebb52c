"""Defects in the interaction of two features, planted on a layout's ranks like those of tests/support/defects.py."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from forge.model import Transformer
from forge.shard import Box, Rates, Shard


def look_ahead_within_the_part() -> None:
    """Multi-token prediction limited to a cp rank's own tokens."""
    from forge.model.mtp import look_ahead
    from forge.parallel.context.sequence import SequenceSplit

    local = SequenceSplit.local_part

    def part(self: Any, batch: Any) -> Any:
        inputs = local(self, batch)
        if inputs.ahead is None:
            return inputs
        return replace(inputs, ahead=look_ahead(inputs.tokens, inputs.labels, None, self.depth))

    SequenceSplit.local_part = part


def shared_experts_on_every_rank() -> None:
    """Shared experts added by every tp rank."""
    from forge.parallel.expert import PieceRoutedMoE

    def forward(self: Any, x: Tensor, labels: Tensor | None = None) -> Tensor:
        return self.routed(x, labels) + self.mesh.size() * self.shared(x)

    PieceRoutedMoE.forward = forward


def latent_norms_left_apart() -> None:
    """The norm of MLA's latent without the gradient of other tp ranks' heads."""
    _left_apart(["kv_norm"])


def head_norms_left_apart() -> None:
    """QK norms without the gradient of other tp ranks' heads."""
    _left_apart(["q_norm", "k_norm"])


def routers_left_apart() -> None:
    """Router weights without the gradient of other tp ranks' tokens (torchtitan #2387)."""
    _left_apart(["router"])


def _left_apart(names: Collection[str]) -> None:
    from forge.parallel.step import model

    partial = model.partial_shards
    model.partial_shards = lambda *given: [
        shard for shard in partial(*given) if not any(name in shard.name for name in names)
    ]


def expert_inputs_left_apart() -> None:
    """Without sequence parallelism, gradients of the experts' input not summed over tp (torchtitan #4054)."""
    from forge.parallel import expert
    from forge.parallel.step.collectives import _own_piece

    expert.own_piece = _own_piece


def expert_biases_on_every_rank() -> None:
    """Output biases of experts times tp (torchtitan #4245)."""
    from forge.model.experts import Experts

    compute = Experts.compute

    def several(self: Any, rows: Any, groups: Any, held: Any) -> Tensor:
        *others, bias = held
        return compute(self, rows, groups, (*others, dist.get_world_size() * bias))

    Experts.compute = several


def routers_balanced_without_tp() -> None:
    """Router counts not summed over tp (torchtitan #4154)."""
    from forge.parallel.step.routers import Routers

    init = Routers.__init__

    def without_tp(self: Any, parts: Any, layout: Any) -> None:
        init(self, parts, layout)
        self._stage = layout.meshes.loss

    Routers.__init__ = without_tp


def sequence_loss_of_own_tokens() -> None:
    """A sequence balancing loss over a cp rank's own tokens."""
    from forge.parallel import expert

    expert.sum_over = lambda counts, ranks: counts


def last_row_dropped() -> None:
    """An expert exchange without the last row of an uneven split."""
    from forge.parallel import dispatch

    combine = dispatch.combine

    def without_last(rows: Tensor, *rest: Any) -> Tensor:
        return combine(torch.cat([rows[:-1], torch.zeros_like(rows[-1:])]), *rest)

    dispatch.combine = without_last


def sinks_counted_twice() -> None:
    """Attention sinks counted by every tp rank in the gradient norm (Megatron-LM #7452)."""
    from forge.tools.verify import record

    report = record.report_gradients
    record.report_gradients = lambda shards, *rest, **options: report(
        [*shards, *(shard for shard in shards if "sinks" in shard.name)], *rest, **options
    )


def flat_slices_without_decay() -> None:
    """Weight decay skipped on flat zero1 slices, as if they were vectors."""
    from forge.optim import adamw

    decay = adamw.weight_decay
    flat: list[str] = []

    init = adamw.AdamW.__init__

    def noting(self: Any, shards: list[Shard], *rest: Any) -> None:
        flat.extend(s.name for s in shards if s.data.dim() < 2)
        init(self, shards, *rest)

    adamw.AdamW.__init__ = noting
    adamw.weight_decay = lambda name, config: 0.0 if name in flat else decay(name, config)


def norm_of_the_batch() -> None:
    """NorMuon with one norm for all matrices of an owner."""
    from forge.optim.muon import LEAST_MOMENT, _RowMoments

    normalize = _RowMoments.normalize

    def together(self: Any, matrices: Tensor, batch: Any, skip: Tensor) -> Tensor:
        normalize(self, matrices, batch, skip)
        moments = torch.cat(self._of_batch[id(batch)])
        scaled = matrices / (moments.sqrt() + LEAST_MOMENT).unsqueeze(-1)
        return scaled * (matrices.norm() / scaled.norm())

    _RowMoments.normalize = together


def own_largest_logits() -> None:
    """QK-clip by the maximum logits of the rank's own samples."""
    from forge.parallel.logits import LargestLogits

    LargestLogits.complete = lambda self: None


def heads_by_own_rows() -> None:
    """Muon that splits by heads only those matrices whose rows are all on one rank (Megatron-LM #7117)."""
    from forge.optim.muon import Muon

    init = Muon.__init__

    def deciding(self: Any, shards: list[Shard], config: Any, *others: Any) -> None:
        def known(shard: Shard) -> Shard:
            whole = all(box.sizes == tuple(shard.global_shape) for box in shard.boxes)
            return shard if whole else replace(shard, heads=1)

        init(self, [known(shard) for shard in shards], config, *others)

    Muon.__init__ = deciding


def own_part_of_matrices() -> None:
    """Muon on a zero1 rank's slice of a matrix (DeepSpeed #8090)."""
    from forge.optim.matrices import _Round

    def gather(self: Any, held: list[Tensor], empty: Tensor) -> tuple[list[Tensor], Callable[[], None]]:
        whole = [empty.new_zeros(batch.count, *batch.shape) for batch in self.batches]
        for source, target in self._to_owners._kept:
            target.of(whole).copy_(source.of(held))
        return whole, lambda: None

    _Round.gather = gather


def states_pass_documents() -> None:
    """Linear attention's state leaking across documents between cp ranks."""
    from forge.model import AttentionMask
    from forge.parallel.context.states import PassedStates

    PassedStates.prepare = lambda self, mask, x: AttentionMask(mask.window, mask.documents)


def second_use_without_gradient() -> None:
    """zero2 without the gradient of a weight's second use (DeepSpeed #8224)."""
    from forge.model.transformer import Block

    forward, used = Block.forward, set()

    def once(self: Any, x: Tensor, shared: Any) -> Tensor:
        if self not in used:
            used.add(self)
            return forward(self, x, shared)
        used.remove(self)
        weights = dict(self.named_parameters())
        for parameter in weights.values():
            parameter.requires_grad_(False)
        out = forward(self, x, shared)
        for parameter in weights.values():
            parameter.requires_grad_(True)
        return out

    Block.forward = once


def mean_before_the_step() -> None:
    """EMA over a zero1 rank's weights before the update."""
    from forge.optim.ema import WithAverage

    step = WithAverage.step

    def late(self: Any, lr: float, skip: Tensor) -> None:
        shards, self._shards = self._shards, []
        before = [shard.data.clone() for shard in shards]
        step(self, lr, skip)
        self._shards = shards
        decay = min(self._decay, self._updates.item() / (9 + self._updates.item()))
        for shard, values in zip(shards, before, strict=True):
            self._means[shard.name].lerp_(values, 1 - decay)

    WithAverage.step = late


def experts_not_clipped() -> None:
    """Gradient clipping without experts."""
    from forge.train import step

    clip = step.clip_gradients
    step.clip_gradients = lambda shards, *rest: clip([s for s in shards if s.kind != "expert"], *rest)


def keys_in_another_order() -> None:
    """Ulysses repeating grouped keys in the wrong order."""
    from forge.parallel.context.ulysses import UlyssesAttention

    call = UlyssesAttention.__call__

    def repeated(self: Any, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
        repeats = max(1, self.split.ranks // k.shape[1])
        return call(self, q, k.repeat(1, repeats, 1, 1), v.repeat(1, repeats, 1, 1), *rest)

    UlyssesAttention.__call__ = repeated


def windows_taken_as_whole() -> None:
    """Ring attention without the mask of partly visible key blocks."""
    from forge.parallel.context.ring import PlainKernel

    table = PlainKernel.make_table
    PlainKernel.make_table = staticmethod(lambda window, *rest: table(0, *rest))


def sinks_of_the_first_rank() -> None:
    """Ulysses with the first rank's sinks on every rank."""
    from forge.parallel.context.ulysses import UlyssesAttention

    call = UlyssesAttention.__call__

    def first(self: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, sinks: Any = None) -> Tensor:
        own = sinks.unflatten(0, (self.split.ranks, -1))[0].repeat(self.split.ranks)
        return call(self, q, k, v, mask, own)

    UlyssesAttention.__call__ = first


def own_scales() -> None:
    """Eight-bit moments with per-rank scales for blocks cut by tp."""
    from forge.optim.moments import Int8Moments

    init = Int8Moments.__init__

    def apart(self: Any, *given: Any) -> None:
        init(self, *given)
        self._group = None

    Int8Moments.__init__ = apart


def noise_by_local_index() -> None:
    """Rounding noise of bfloat16 moments by local index."""
    from forge.optim.rounding import StochasticRounding

    init = StochasticRounding.__init__

    def local(self: Any, shards: list[Shard], slots: Any) -> None:
        def first(shard: Shard) -> Shard:
            boxes = tuple(Box((0,) * len(box.offsets), box.sizes) for box in shard.boxes)
            return replace(shard, boxes=boxes)

        init(self, [first(shard) for shard in shards], slots)

    StochasticRounding.__init__ = local


def counted_in_recomputation() -> None:
    """Expert tokens counted again in recomputation."""
    from forge.model.router import Router

    balance = Router._balance

    def again(self: Any, weights: Tensor, logits: Tensor, scores: Tensor, experts: Tensor, valid: Any) -> Any:
        if torch._C._current_graph_task_id() != -1:
            chosen = valid.unsqueeze(-1).expand_as(experts).flatten().double()
            self.sums.scatter_add_(0, experts.flatten(), chosen)
        return balance(self, weights, logits, scores, experts, valid)

    Router._balance = again


def loss_scale_by_microbatches() -> None:
    """A balancing loss divided by the pipeline's number of microbatches."""
    set_scale = Transformer.set_loss_scale
    Transformer.set_loss_scale = lambda self, scale: set_scale(self, scale / 4)


def held_out_tokens_of_own_part() -> None:
    """A held-out loss divided by a cp rank's own token count times cp."""
    from forge.parallel.step.model import ParallelModel

    evaluate = ParallelModel.evaluate

    def own(self: Any, batch: Any) -> Any:
        sums = evaluate(self, batch)
        mine = (self._split.part(batch.labels)[:, : self._split.rank + 8] >= 0).sum()
        sums.values[3] = mine.double() * self._split.ranks
        return sums

    ParallelModel.evaluate = own


def generated_from_0() -> None:
    """Generation with positions from 0 on every cp rank."""
    from forge.parallel.context import sequence

    without = sequence._without_labels
    sequence._without_labels = lambda tokens, positions=None: without(
        tokens, None if positions is None else torch.arange(tokens.shape[1]).expand_as(tokens)
    )


def rates_left_behind() -> None:
    """zero1 slices without width-dependent learning rates."""
    from forge.parallel import build

    describe = build.describe

    def plain(*given: Any) -> Any:
        starts, shards = describe(*given)
        return starts, [replace(shard, rates=Rates()) for shard in shards]

    build.describe = plain


def mix_queries_left_apart() -> None:
    """Queries of attention residuals without the gradient of other tp ranks' tokens."""
    _left_apart(["mix.query"])


def saved_streams_detached() -> None:
    """Saved residual streams detached at a pipeline stage's input."""
    from forge.model import Transformer

    forward = Transformer.forward

    def detached(self: Any, x: Tensor, *args: Any) -> Tensor:
        return forward(self, x if self.embeds else torch.cat([x[:1], x[1:].detach()]), *args)

    Transformer.forward = detached  # type: ignore[method-assign]


def residual_blocks_of_the_stage() -> None:
    """Residual blocks counted from the first layer of a pipeline stage."""
    from forge.model import Transformer

    init = Transformer.__init__

    def local(self: Any, config: Any, seq_len: int, layers: Any = None, *args: Any, **named: Any) -> None:
        init(self, config, seq_len, layers, *args, **named)
        for number, layer in enumerate(self.trunk):
            if layers is not None and layers.start:
                self.layers[layer].begins_block = number % config.residual_block_size == 1

    Transformer.__init__ = local  # type: ignore[method-assign]


def latents_of_experts_left_apart() -> None:
    """Projections to experts' latents without the gradient of other tp ranks' tokens."""
    _left_apart(["to_latent", "from_latent", "latent_norm"])


def quantiles_of_own_tokens() -> None:
    """Router biases solved from one rank's histograms."""
    from forge.parallel.step import routers

    reduce = routers.dist.all_reduce

    def own(values: Tensor, *args: Any, **named: Any) -> Any:
        return None if values.dtype == torch.int32 else reduce(values, *args, **named)

    routers.dist.all_reduce = own


def quantiles_of_the_last_microbatch() -> None:
    """Histograms reset by each microbatch."""
    from forge.model.router import Router

    forward = Router.forward

    def again(self: Any, x: Tensor, labels: Tensor | None = None) -> tuple[Tensor, Tensor]:
        if labels is not None and torch.is_grad_enabled() and labels.shape[0] < 8:
            self.required.zero_()
        return forward(self, x, labels)

    Router.forward = again  # type: ignore[method-assign]


def decays_without_bound() -> None:
    """Kimi Delta Attention without the decay bound under tp."""
    from forge.model import Decay
    from forge.parallel.tensor.local import LocalDecay

    def unbound(self: Any, a: Tensor) -> Tensor:
        bound, self.bound = self.bound, 0.0
        try:
            return Decay.forward(self, a)
        finally:
            self.bound = bound

    LocalDecay.forward = unbound  # type: ignore[method-assign]


def positions_in_position_free_latents() -> None:
    """Latent attention with RoPE on position-free keys under cp."""
    from forge.model import LatentAttention

    forward = LatentAttention.forward

    def rotating(self: Any, x: Tensor, shared: Any) -> Tensor:
        free, self.rotation = self.rotation, 0
        try:
            return forward(self, x, shared)
        finally:
            self.rotation = free

    LatentAttention.forward = rotating  # type: ignore[method-assign]
