"""The gated delta rule: each token decays, corrects and reads a state matrix. Computed token by token or in chunks.

Yang et al. 2024, "Gated Delta Networks", arXiv:2412.06464:

    S_t = exp(g_t) S_{t-1};  S_t += beta_t k_t (v_t - S_t^T k_t)^T;  o_t = S_t^T q_t

The paper writes the transpose of S. The decay exp(g_t) is one number, or one per row of S (Kimi Team 2025, "Kimi
Linear", arXiv:2510.26692). In a chunk beginning with state S, the corrected values of all tokens solve one triangular
system (the UT transform, section 3.3). Its right-hand side is linear in S:

    corrected = u - w S;  outputs = reads S + scores corrected;  S' = transition S + addition

A chunk is therefore one affine map of the state. All chunks are prepared at once, in large products. Only the composition
of these maps (`affine_scan`) is sequential.

Sizes: batch, seq, heads, chunks, size (tokens per chunk), key_dim and value_dim (rows and columns of the state), decays
(1 or key_dim).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F


class Chunks(NamedTuple):
    """The quantities of each chunk that do not depend on S, the state at the chunk's start.

    All tensors are `[chunks, batch, heads, ...]`; the last chunk is padded. reads `[size, key_dim]`: queries, decayed
    from the chunk's beginning. scores `[size, size]`: products of queries with visible keys. u `[size, value_dim]`, w
    `[size, key_dim]`: corrected values are u - w S. transition `[key_dim, key_dim]`, addition `[key_dim, value_dim]`:
    the state after the chunk is transition S + addition.
    """

    reads: Tensor
    scores: Tensor
    u: Tensor
    w: Tensor
    transition: Tensor
    addition: Tensor


def _running_sum(values: Tensor) -> Tensor:
    """Return the sums over `values` up to each index of the dimension before the last."""
    if not (values.is_cuda and torch.are_deterministic_algorithms_enabled()):
        return values.cumsum(-2)
    # By its documentation, PyTorch 2.13 refuses `cumsum` on CUDA here. PyTorch 2.14.1 does not.
    size = values.shape[-2]
    return torch.ones(size, size, dtype=values.dtype, device=values.device).tril() @ values


def divide(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, resets: Tensor | None, size: int
) -> Chunks:
    """Divide the sequence into chunks of `size` tokens, and prepare every chunk for the recurrence.

    q, k `[batch, seq, heads, key_dim]`, v `[batch, seq, heads, value_dim]`, log_decay (<= 0) `[batch, seq, heads,
    decays]`, beta `[batch, seq, heads]`. resets: bool `[batch, seq]`, true for tokens that start from an empty state;
    None: no resets.
    """
    q, k, v = (_chunked(x, size) for x in (q, k, v))
    beta = _chunked(beta, size)  # [chunks, batch, heads, size]
    total = _running_sum(_chunked(log_decay, size))  # [chunks, batch, heads, size, decays]
    index = torch.arange(size, device=q.device)
    seen, carried = index[:, None] >= index, total.exp()
    if resets is not None:
        begun = _chunked(resets.to(torch.int32).unsqueeze(-1), size).cumsum(-1)  # [chunks, batch, 1, size]
        seen = seen & (begun.unsqueeze(-1) == begun.unsqueeze(-2))
        carried = carried.masked_fill(begun.unsqueeze(-1) > 0, 0.0)
    weighted = k * beta.unsqueeze(-1)
    right = torch.cat([v * beta.unsqueeze(-1), weighted * carried], dim=-1)
    system, scores = decayed_products((weighted, q), k, total, seen)
    # Only elements below the diagonal are read.
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    u, w = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    to_end = (total[..., -1:, :] - total).masked_fill(~seen[..., -1, :, None], -torch.inf).exp()
    left = (k * to_end).mT
    kept = carried[..., -1, :, None] * torch.eye(k.shape[-1], dtype=k.dtype, device=k.device)
    return Chunks(q * carried, scores, u, w, kept - left @ w, left @ u)


def decayed_products(several: Sequence[Tensor], columns: Tensor, total: Tensor, seen: Tensor) -> list[Tensor]:
    """Return the decayed products of each matrix in `several` with `columns`: one tensor `[..., size, size]` per matrix.

    Element [i, j] for a matrix `rows` is the sum over d of rows[i, d] * columns[j, d] * exp(total[i, d] - total[j, d]).
    It is 0 where `seen` does not allow i to read j. With decays = 1, total[i, 0] applies to every d.

    rows, columns `[..., size, key_dim]`; total `[..., size, decays]`, non-increasing along the tokens; seen bool, false
    for all j > i. No exponent is above 0, so no exponential overflows.
    """
    if total.shape[-1] == 1:
        between = (total - total.mT).masked_fill(~seen, -torch.inf).exp()
        return [rows @ columns.mT * between for rows in several]
    size = total.shape[-2]
    missing = (1 << (size - 1).bit_length()) - size
    *several, columns = (F.pad(x, (0, 0, 0, missing)) for x in (*several, columns))
    total = torch.cat([total, total[..., -1:, :].expand(*total.shape[:-2], missing, -1)], dim=-2)
    # Diagonal blocks of doubling size. In the lower left quarter of a block, the decay is the product of two factors:
    # the decay up to the first token of the second half, and the decay after it. Neither can overflow.
    diagonals = [(rows * columns).sum(-1) for rows in several]
    quarters: list[list[Tensor]] = [[] for _ in several]
    half = 1
    while half < total.shape[-2]:
        first, second = total.unflatten(-2, (-1, 2, half)).unbind(-3)
        middle = second[..., :1, :]
        early = (columns.unflatten(-2, (-1, 2, half))[..., 0, :, :] * (middle - first).exp()).mT
        late = (second - middle).exp()
        for of_rows, rows in zip(quarters, several, strict=True):
            of_rows.append(rows.unflatten(-2, (-1, 2, half))[..., 1, :, :] * late @ early)
        half *= 2
    found = map(lower_triangle, diagonals, quarters)
    return [matrix[..., :size, :size].masked_fill(~seen, 0.0) for matrix in found]


@torch.library.custom_op("forge::lower_triangle", mutates_args=())
def lower_triangle(diagonal: Tensor, quarters: Sequence[Tensor]) -> Tensor:
    """Return matrices `[..., size, size]` with `diagonal` `[..., size]`, `quarters` below it, and zeros above it.

    quarters[n] `[..., size / 2^(n + 1), 2^n, 2^n]`: the lower left quarters of the diagonal blocks of size 2^(n + 1).
    This is a custom operator. A compiler would turn the function's code into a kernel whose length is exponential in the
    number of quarters.
    """
    matrix = diagonal.new_zeros(*diagonal.shape, diagonal.shape[-1])
    matrix.diagonal(dim1=-2, dim2=-1).copy_(diagonal)
    for n, quarter in enumerate(quarters):
        _quarters(matrix, 1 << n).copy_(quarter)
    return matrix


def _quarters(matrix: Tensor, half: int) -> Tensor:
    """Return a view of the lower left quarters of the diagonal blocks: `[..., blocks, half, half]`."""
    rows = matrix.unflatten(-2, (-1, 2, half))[..., 1, :, :]
    return rows.unflatten(-1, (-1, 2, half))[..., 0, :].diagonal(dim1=-4, dim2=-2).movedim(-1, -3)


@lower_triangle.register_fake
def _(diagonal: Tensor, quarters: Sequence[Tensor]) -> Tensor:
    return diagonal.new_empty(*diagonal.shape, diagonal.shape[-1])


def _keep_number(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.number = len(inputs[1])


def _triangle_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, list[Tensor]]:
    return grad.diagonal(dim1=-2, dim2=-1), [_quarters(grad, 1 << n) for n in range(ctx.number)]


lower_triangle.register_autograd(_triangle_backward, setup_context=_keep_number)


def outputs(chunks: Chunks, states: Tensor, seq: int) -> Tensor:
    """Return the outputs of all tokens, `[batch, seq, heads, value_dim]`.

    states: the state at the start of each chunk, `[chunks, batch, heads, key_dim, value_dim]`.
    """
    corrected = chunks.u - chunks.w @ states
    out = chunks.reads @ states + chunks.scores @ corrected  # [chunks, batch, heads, size, value_dim]
    return out.permute(1, 0, 3, 2, 4).flatten(1, 2)[:, :seq]


def chunked_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, resets: Tensor | None, size: int
) -> tuple[Tensor, Tensor]:
    """Run the gated delta rule in chunks of `size` tokens. Arguments as for `divide`.

    Return the outputs `[batch, seq, heads, value_dim]`, and the last state `[batch, heads, key_dim, value_dim]`.
    """
    chunks = divide(q, k, v, log_decay, beta, resets, size)
    empty = torch.zeros_like(chunks.addition[0])
    states = affine_scan(chunks.transition, chunks.addition, empty)
    return outputs(chunks, states[:-1], q.shape[1]), states[-1]


def recurrent_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    resets: Tensor | None = None,
    state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Run the gated delta rule token by token. Arguments as for `divide`.

    Return the outputs and the last state. state: the initial state `[batch, heads, key_dim, value_dim]`; None: zeros.
    """
    if state is None:
        state = q.new_zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3])
    outs = []
    for t in range(q.shape[1]):
        decay = log_decay[:, t].exp()
        if resets is not None:
            decay = decay.masked_fill(resets[:, t, None, None], 0.0)
        state = state * decay.unsqueeze(-1)
        read = (state * k[:, t].unsqueeze(-1)).sum(-2)
        correction = beta[:, t].unsqueeze(-1) * (v[:, t] - read)
        state = state + k[:, t].unsqueeze(-1) * correction.unsqueeze(-2)
        outs.append((state * q[:, t].unsqueeze(-1)).sum(-2))
    return torch.stack(outs, dim=1), state


def _chunked(x: Tensor, size: int) -> Tensor:
    """x `[batch, seq, heads, ...]` -> `[chunks, batch, heads, size, ...]`, padded with zeros, which change no state."""
    padding = (0, 0) * (x.ndim - 2) + (0, -x.shape[1] % size)
    parts = F.pad(x, padding).unflatten(1, (-1, size))
    return parts.movedim(1, 0).transpose(2, 3).contiguous()


@torch.library.custom_op("forge::affine_scan", mutates_args=())
def affine_scan(transition: Tensor, addition: Tensor, initial: Tensor) -> Tensor:
    """Return all states of S_{n+1} = transition_n S_n + addition_n: `[steps + 1, ..., rows, columns]`, S_0 = initial.

    transition `[steps, ..., rows, rows]`, addition `[steps, ..., rows, columns]`, initial `[..., rows, columns]`. The
    scan is a custom operator, so a compiler sees one node for any number of steps.
    """
    states = initial.new_empty(len(transition) + 1, *initial.shape)
    states[0] = initial
    flat, maps, added = (x.reshape(len(x), -1, *x.shape[-2:]) for x in (states, transition, addition))
    for step in range(len(transition)):
        torch.baddbmm(added[step], maps[step], flat[step], out=flat[step + 1])
    return states


@affine_scan.register_fake
def _(transition: Tensor, addition: Tensor, initial: Tensor) -> Tensor:
    return initial.new_empty(transition.shape[0] + 1, *initial.shape)


def _keep(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0], output)


def _scan_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of transition, addition and initial. grad: gradient of the states.

    The states' total gradients are a reverse `affine_scan`: G_n = transition_n^T G_{n+1} + grad_n.
    """
    transition, states = ctx.saved_tensors
    back = affine_scan(transition.mT.flip(0), grad[:-1].flip(0), grad[-1]).flip(0)
    return back[1:] @ states[:-1].mT, back[1:], back[0]


affine_scan.register_autograd(_scan_backward, setup_context=_keep)
