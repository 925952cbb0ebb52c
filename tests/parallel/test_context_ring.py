"""Parts of ring attention: merged blocks, rows without a visible key, and the flex kernel's formulas."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from forge.model.sdpa import block_part, dense_part
from forge.parallel.context import ring
from forge.parallel.context.ring import AttentionBlock, FlexKernel, PlainKernel, merge

CHUNK = 8


def tensors(rows: int = 4 * CHUNK, width: int = 6, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    """Return q of four heads, k and v of two, and the gradient of the output."""
    generator = torch.Generator().manual_seed(0)
    heads = (4, 2, 2, 4)
    return tuple(torch.randn(2, h, rows, width, generator=generator, dtype=dtype) for h in heads)


def documents(rows: int = 4 * CHUNK, length: int = 3) -> Tensor:
    return (torch.arange(rows) // length).expand(2, rows)


def chunk(index: int) -> Tensor:
    return torch.arange(index * CHUNK, (index + 1) * CHUNK)


def whole(q: Tensor, k: Tensor, v: Tensor, table: Tensor, soft_cap: float) -> Tensor:
    """Compute attention by definition, differentiably."""
    k, v = k.repeat_interleave(2, dim=1), v.repeat_interleave(2, dim=1)
    scores = q @ k.mT * q.shape[-1] ** -0.5
    if soft_cap:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    return scores.masked_fill(~table, -torch.inf).softmax(-1) @ v


def differentiable(q: Tensor, k: Tensor, v: Tensor, table: Tensor, soft_cap: float) -> tuple[Tensor, Tensor]:
    """Return flex_attention's results in a form with a backward, because flex_attention has none on a CPU."""
    return PlainKernel().forward(AttentionBlock(q, k, v, table, soft_cap))


MASKS = {
    "causal": (0, None),
    "window of 3": (3, None),
    "documents of 3": (0, documents()),
    "both": (2, documents()),
}


@pytest.mark.parametrize("soft_cap", [0.0, 2.0])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("kernel", [PlainKernel(), FlexKernel()], ids=["plain", "flex"])
def test_blocks_merged_are_the_whole(kernel, mask: str, soft_cap: float, monkeypatch) -> None:
    """Forward and backward over all pairs of chunks. Most pairs have rows without a visible key."""
    monkeypatch.setattr(ring, "flex_with_lse", differentiable)
    q, k, v, grad = tensors()
    window, docs = MASKS[mask]
    pairs = [(i, j, dense_part(window, docs, chunk(i), chunk(j))) for i in range(4) for j in range(4)]
    out, lse = torch.zeros_like(q), torch.full(q.shape[:-1], -torch.inf, dtype=q.dtype)
    for i, j, table in pairs:
        rows, keys = chunk(i), chunk(j)
        part_out, part_lse = out[:, :, i * CHUNK : (i + 1) * CHUNK], lse[:, :, i * CHUNK : (i + 1) * CHUNK]
        block = AttentionBlock(q[:, :, rows], k[:, :, keys], v[:, :, keys], table, soft_cap)
        merge(part_out, part_lse, *kernel.forward(block))

    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    everything = torch.arange(4 * CHUNK)
    expected = whole(*inputs, dense_part(window, docs, everything, everything), soft_cap)
    expected.backward(grad)
    assert_close(out, expected.detach(), rtol=0, atol=1e-12)

    grads = [torch.zeros_like(x) for x in (q, k, v)]
    delta = (grad * out).sum(-1)
    for i, j, table in pairs:
        rows, keys = chunk(i), chunk(j)
        if not table.any():
            continue
        block = AttentionBlock(q[:, :, rows], k[:, :, keys], v[:, :, keys], table, soft_cap)
        found = kernel.backward(block, grad[:, :, rows], delta[:, :, rows], lse[:, :, rows])
        for total, where, share in zip(grads, (rows, keys, keys), found, strict=True):
            total[:, :, where] += share
    for total, leaf in zip(grads, inputs, strict=True):
        assert leaf.grad is not None
        assert_close(total, leaf.grad, rtol=0, atol=1e-12)


def test_rows_without_a_visible_key_have_no_weight() -> None:
    q, k, v, _ = tensors(CHUNK)
    table = torch.ones(1, 1, CHUNK, CHUNK, dtype=torch.bool)
    table[:, :, 2:5] = False
    out, lse = PlainKernel().forward(AttentionBlock(q, k, v, table, 0.0))
    assert (out[:, :, 2:5] == 0).all() and (lse[:, :, 2:5] == -torch.inf).all()
    before = torch.full_like(lse, -torch.inf)
    total = torch.zeros_like(out)
    merge(total, before, out, lse)
    merge(total, before, out, lse)
    assert_close(total, out)
    assert torch.equal(before == -torch.inf, lse == -torch.inf)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("soft_cap", [0.0, 2.0])
def test_flex_attention_with_tiles_of_a_part_gives_the_same(soft_cap: float) -> None:
    """Queries of two chunks against the keys of a chunk between them, across tile boundaries."""
    q, k, v, _ = tensors(400, width=16)
    owners = documents(400, 90)
    queries, keys = torch.cat([torch.arange(100), torch.arange(300, 400)]), torch.arange(170, 330)
    inputs = q[:, :, queries], k[:, :, keys], v[:, :, keys]
    with torch.no_grad():
        out, lse = ring.flex_with_lse(*inputs, block_part(70, owners, queries, keys), soft_cap)
    dense = dense_part(70, owners, queries, keys)
    expected_out, expected_lse = PlainKernel().forward(AttentionBlock(*inputs, dense, soft_cap))
    assert (expected_lse == -torch.inf).any() and (expected_lse > -torch.inf).any()
    assert_close(out, expected_out)
    assert_close(lse, expected_lse)


@pytest.mark.gpu
def test_flex_kernel_on_cuda() -> None:
    q, k, v, grad = (x.cuda() for x in tensors(256, width=32, dtype=torch.float32))
    index = torch.arange(256, device="cuda")
    owners = documents(256, 90).cuda()
    results = []
    for kernel, make_table in ((FlexKernel(), block_part), (PlainKernel(), dense_part)):
        block = AttentionBlock(q, k, v, make_table(70, owners, index, index), 0.0)
        out, lse = kernel.forward(block)
        grads = kernel.backward(block, grad, (grad * out).sum(-1), lse)
        results.append((out, lse, *grads))
    for flex, plain in zip(*results, strict=True):
        assert_close(flex, plain, rtol=1e-2, atol=1e-2)
