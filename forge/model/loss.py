"""Both ends of the model: the embedding, and the output head with the loss.

Head and loss are fused over chunks of tokens, so the logits of a whole batch never exist. The loss's forward computes the
gradients of head and hidden states chunk by chunk, while the chunk's logits exist; backward only scales them. All
operations of the loss except matrix products are in the wider of float32 and the compute dtype. No host sync.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from forge.model.norm import promoted

# Label of a position excluded from the loss; PyTorch's default.
IGNORE = -100


class Embedding(nn.Module):
    """One vector per token, times `scale`. In a model with tied embeddings it is also the output head."""

    def __init__(self, vocab_size: int, dim: int, scale: float = 1.0):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, dim))
        self.scale = scale

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens int64 `[batch, seq]` -> `[batch, seq, dim]`."""
        return self.scaled(F.embedding(tokens, self.weight))

    def scaled(self, x: Tensor) -> Tensor:
        """Return x * scale, with the scale rounded to the dtype of x, as in transformers."""
        return x if self.scale == 1.0 else x * torch.full((), self.scale, dtype=x.dtype, device=x.device)

    def flops_per_token(self, seq_len: int) -> float:
        """Return 0, because a look-up has no products. The model counts the product of a tied head."""
        return 0.0

    def output(self, hidden: Tensor, labels: Tensor | None, loss: nn.Module) -> Tensor:
        """Compute `Head.forward` with the embedding's weight.

        Module hooks do not run. Under FSDP the weight must therefore belong to the root's unit.
        """
        # Cast explicitly to the weight's compute dtype, because no hook does.
        return loss(hidden.to(self.weight.dtype), self.weight, labels)


class Head(nn.Module):
    """The output matrix.

    Its forward includes the loss, because data-parallel engines gather the weight only for the forward.
    """

    # Losses and logits are never rounded to the compute dtype.
    exact_output = True

    def __init__(self, vocab_size: int, dim: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, dim))

    def forward(self, hidden: Tensor, labels: Tensor | None, loss: nn.Module) -> Tensor:
        """hidden `[batch, seq, dim]` -> loss(hidden, weight, labels); logits if labels is None."""
        return loss(hidden, self.weight, labels)


class FusedLoss(nn.Module):
    """Sums of `[objective, cross_entropy, z_loss]` over the valid tokens (label != IGNORE).

    z_loss is logsumexp(logits)^2, unscaled; objective = cross_entropy + z_loss_coef * z_loss. Only the objective has a
    gradient. chunk_tokens: number of tokens whose logits exist at once. soft_cap: above 0, logits become soft_cap *
    tanh(logits / soft_cap) first. An extension point: loss parallelism replaces this module.
    """

    def __init__(self, z_loss_coef: float = 0.0, chunk_tokens: int = 1024, soft_cap: float = 0.0):
        super().__init__()
        self.z_loss_coef = z_loss_coef
        self.chunk_tokens = chunk_tokens
        self.soft_cap = soft_cap
        # An extension point: `compile.loss` replaces it with a compiled function.
        self.chunk = chunk_loss
        self.observer: Callable[[Tensor], None] | None = None
        """Called with each chunk's cross-entropies `[n]`, in the order of tokens."""

    def forward(self, hidden: Tensor, head_weight: Tensor, labels: Tensor | None) -> Tensor:
        """hidden `[batch, seq, dim]`, head_weight `[vocab, dim]`, labels int64 `[batch, seq]` -> `[3]`.

        Without labels: logits `[batch, seq, vocab]` in the wider of float32 and the compute dtype.
        """
        if labels is None:
            return head_logits(hidden, head_weight, self.soft_cap)
        return _ChunkedLoss.apply(
            hidden.flatten(0, -2),
            head_weight,
            labels.flatten(),
            self.z_loss_coef,
            self.chunk_tokens,
            self.soft_cap,
            # Passed explicitly, because needs_input_grad is true even under no_grad, and grad mode is always off inside
            # forward.
            torch.is_grad_enabled(),
            self.chunk if self.observer is None else self._observed_chunk,
        )

    def _observed_chunk(self, *arguments: Any) -> tuple[Tensor, Tensor | None]:
        losses, gradient = self.chunk(*arguments)
        assert self.observer is not None
        self.observer(losses[0].flatten())
        return losses, gradient


def head_logits(hidden: Tensor, head_weight: Tensor, soft_cap: float) -> Tensor:
    """hidden `[..., dim]`, head_weight `[vocab, dim]` -> logits `[..., vocab]` in the wider of float32 and hidden's dtype."""
    logits = F.linear(hidden, head_weight).to(promoted(hidden.dtype))
    return soft_cap * torch.tanh(logits / soft_cap) if soft_cap else logits


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        z_loss_coef: float,
        chunk_tokens: int,
        soft_cap: float,
        grad_enabled: bool,
        chunk: Callable[..., tuple[Tensor, Tensor | None]],
    ) -> Tensor:
        exact = promoted(hidden.dtype)
        wants_hidden, wants_weight = (needed and grad_enabled for needed in ctx.needs_input_grad[:2])
        grad_hidden = torch.empty_like(hidden) if wants_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=exact) if wants_weight else None
        sums = torch.zeros(2, dtype=exact, device=hidden.device)
        for start in range(0, hidden.shape[0], chunk_tokens):
            rows = slice(start, start + chunk_tokens)
            valid = labels[rows, None] != IGNORE  # [chunk, 1]
            # Filled, not multiplied by 0, so an ignored position contributes exactly 0 even if its hidden state is
            # infinite.
            x = hidden[rows].masked_fill(~valid, 0.0)
            target = labels[rows, None].masked_fill(~valid, 0)
            losses, grad = chunk(
                x, weight, target, valid, z_loss_coef, soft_cap, wants_hidden or wants_weight
            )
            sums += torch.stack([loss.sum() for loss in losses.unbind()])
            if grad is not None and grad_hidden is not None:
                torch.mm(grad, weight, out=grad_hidden[rows])
                grad_hidden[rows].masked_fill_(~valid, 0.0)
            if grad is not None and grad_weight is not None:
                # Ignored positions contribute 0, because their rows of x are 0.
                if exact == grad.dtype:
                    grad_weight.addmm_(grad.T, x)
                elif grad.is_cuda:  # only CUDA multiplies bfloat16 matrices with a float32 result
                    torch.addmm(grad_weight, grad.T, x, out_dtype=exact, out=grad_weight)
                else:
                    grad_weight += grad.T @ x
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.dtypes = hidden.dtype, weight.dtype
        return torch.stack([sums[0] + z_loss_coef * sums[1], sums[0], sums[1]])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        scale = grad[0]
        # The scale (often 1 / tokens) is not rounded to the compute dtype, because rounding would bias all gradients.
        scaled = (
            None if saved is None else (saved.to(scale.dtype) * scale).to(dtype)
            for saved, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        )
        return (*scaled, None, None, None, None, None, None)


class Vocabulary:
    """The columns of the logits on this process; in this class, the whole vocabulary.

    An extension point: loss parallelism replaces this class.
    """

    def locate(self, target: Tensor, columns: int) -> tuple[Tensor, Tensor | None]:
        """target int64 `[chunk, 1]` -> (column of the target on this rank, mask of the targets on this rank).

        columns: number of columns on this rank. A mask of None: all targets are on this rank.
        """
        return target, None

    def combine(self, lse: Tensor, target_logit: Tensor) -> tuple[Tensor, Tensor]:
        """Combine logsumexp and target's logit, both `[chunk, 1]`, over all shards of the vocabulary.

        The target's logit must be 0 on shards without the target.
        """
        return lse, target_logit


WHOLE = Vocabulary()


def chunk_loss(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    valid: Tensor,
    z_loss_coef: float,
    soft_cap: float,
    wants_grad: bool,
    vocabulary: Vocabulary = WHOLE,
) -> tuple[Tensor, Tensor | None]:
    """Compute the loss of one chunk.

    hidden `[chunk, dim]`, weight `[vocab, dim]`, target int64 and valid bool `[chunk, 1]`.

    Return `[cross_entropy, z_loss]` of the chunk's tokens, `[2, chunk, 1]` in the wider of float32 and the compute
    dtype. Also return the gradient of the objective with respect to the logits before the cap, `[chunk, vocab]` in
    hidden's dtype (None unless `wants_grad`). In rows of ignored positions the gradient is finite but meaningless.
    """
    logits = head_logits(hidden, weight, soft_cap)  # [chunk, vocab]
    column, here = vocabulary.locate(target, logits.shape[-1])
    target_logit = logits.gather(-1, column)
    if here is not None:
        target_logit = target_logit.masked_fill(~here, 0.0)
    largest = logits.amax(-1, keepdim=True)
    # In place, because allocating another tensor of this size costs as much as a pass over it. Only the soft cap's
    # derivative needs the logits again.
    exps = (logits - largest if soft_cap else logits.sub_(largest)).exp_()
    lse, target_logit = vocabulary.combine(largest + exps.sum(-1, keepdim=True).log(), target_logit)
    cross_entropy = (lse - target_logit).masked_fill(~valid, 0.0)
    z_loss = lse.square().masked_fill(~valid, 0.0)
    losses = torch.stack([cross_entropy, z_loss])
    if not wants_grad:
        return losses, None
    # d objective / d logit = softmax * (1 + 2 z_loss_coef lse), less 1 for the target.
    grad = exps.mul_((largest - lse).exp() * (1.0 + 2.0 * z_loss_coef * lse))
    one = 1.0 if here is None else here.to(grad.dtype)
    if torch.compiler.is_compiling():
        # A compiler fuses this form into one pass over the probabilities. With scatter_, it would need several passes.
        grad = grad - one * (torch.arange(grad.shape[-1], device=grad.device) == column)
    else:
        grad.scatter_(-1, column, grad.gather(-1, column) - one)
    if soft_cap:
        grad *= 1.0 - (logits / soft_cap).square()
    return losses, grad.to(hidden.dtype)
