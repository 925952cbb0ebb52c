"""Two tables of one mask rule: the dense one, and flex_attention's, whose forward runs on the CPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.testing import assert_close

from forge.model.sdpa import (
    GRAPHS,
    AttentionMask,
    block_table,
    dense_table,
    flex_for,
    sdpa_attention,
    visible,
)

CPU = torch.device("cpu")
# A little over three tiles: some empty, some full, the last cut off.
SEQ = 400
SORTED = torch.tensor([[0] * 100 + [1] * 200 + [2] * 100, [3] * 399 + [4]])
JUMBLED = torch.tensor([([7] * 50 + [1] * 50) * 4, [2] * 130 + [0] * 130 + [2] * 140])

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
CASES = pytest.mark.parametrize("documents", [None, SORTED, JUMBLED], ids=["whole", "sorted", "jumbled"])
WINDOWS = pytest.mark.parametrize("window", [0, 1, 130, 300])


def test_the_dense_table_equals_the_rule_pair_by_pair() -> None:
    documents = torch.tensor([[0, 0, 1, 1, 1, 0], [2, 2, 2, 2, 2, 2]])
    table = dense_table(3, documents, 6, CPU)
    assert table.shape == (2, 1, 6, 6)
    for b in range(2):
        for i in range(6):
            for j in range(6):
                assert table[b, 0, i, j] == (0 <= i - j < 3 and documents[b, i] == documents[b, j])


@CASES
@WINDOWS
def test_the_block_table_skips_only_empty_tiles_and_calls_full_only_full_ones(
    documents: Tensor | None, window: int
) -> None:
    ours = block_table(window, documents, SEQ, CPU)
    batch = None if documents is None else 2
    exact = create_block_mask(visible(window, documents), batch, None, SEQ, SEQ, device="cpu")
    # `to_dense` marks every computed tile.
    assert (ours.to_dense() >= exact.to_dense()).all()
    if documents is not JUMBLED:
        assert_close(ours.to_dense(), exact.to_dense())
        assert_close(ours.full_kv_num_blocks, exact.full_kv_num_blocks)


@pytest.mark.long
@CASES
@WINDOWS
def test_flex_attention_equals_sdpa(documents: Tensor | None, window: int) -> None:
    q, k, v = _heads(2, SEQ, CPU, torch.float32)
    dense = F.scaled_dot_product_attention(q, k, v, dense_table(window, documents, SEQ, CPU), enable_gqa=True)
    flex = flex_attention(q, k, v, block_mask=block_table(window, documents, SEQ, CPU), enable_gqa=True)
    assert_close(flex, dense, rtol=1e-4, atol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("soft_cap", [0.0, 0.7])
def test_the_attention_function_follows_its_table(soft_cap: float) -> None:
    q, k, v = _heads(2, SEQ, CPU, torch.float32)
    rule = AttentionMask(130, SORTED, soft_cap)
    prepared = sdpa_attention.prepare(rule, torch.empty(2, SEQ, 8))
    assert isinstance(prepared.table, Tensor)
    blocks = AttentionMask(130, SORTED, soft_cap, block_table(130, SORTED, SEQ, CPU))
    assert_close(sdpa_attention(q, k, v, blocks), sdpa_attention(q, k, v, prepared), rtol=1e-4, atol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("width", [6, 15, 16])
def test_heads_of_any_width(width: int) -> None:
    """flex_attention's kernels for CUDA accept no heads narrower than 16."""
    q, k, v = _heads(1, 256, CPU, torch.float32)
    q, k, v = q[..., :width], k[..., :width], v[..., : width - 1]
    blocks = AttentionMask(100, None, 0.7, block_table(100, None, 256, CPU))
    dense = AttentionMask(100, None, 0.7, dense_table(100, None, 256, CPU))
    sinks = torch.linspace(-1, 1, q.shape[1])
    for more in (None, sinks):
        found = sdpa_attention(q, k, v, blocks, more)
        assert found.shape[-1] == width - 1
        assert_close(found, sdpa_attention(q, k, v, dense, more), rtol=1e-4, atol=1e-5)


@torch._dynamo.config.patch(recompile_limit=8)
def test_flex_attention_on_cuda_may_have_a_graph_for_each_kind_of_layer_and_batch() -> None:
    flex_for.cache_clear()
    flex_for("cpu")
    assert torch._dynamo.config.recompile_limit == 8
    flex_for("cuda")
    assert torch._dynamo.config.recompile_limit == GRAPHS
    flex_for.cache_clear()  # later tests must raise the limit again


def test_plain_causal_attention_needs_no_table() -> None:
    x = torch.empty(2, 16, 8)
    assert sdpa_attention.prepare(AttentionMask(), x).table is None
    assert sdpa_attention.prepare(AttentionMask(window=16), x).table is None
    assert sdpa_attention.prepare(AttentionMask(window=15), x).table is not None


@pytest.mark.gpu
@CASES
@WINDOWS
def test_on_cuda_flex_equals_the_dense_table_forward_and_backward(
    documents: Tensor | None, window: int
) -> None:
    cuda = torch.device("cuda")
    heads = [x.requires_grad_() for x in _heads(2, SEQ, cuda, torch.float32)]
    documents = None if documents is None else documents.to(cuda)
    rule = AttentionMask(window, documents, soft_cap=0.7)
    flex = sdpa_attention.prepare(rule, torch.empty(2, SEQ, 8, device=cuda))
    assert not isinstance(flex.table, Tensor)
    dense = AttentionMask(window, documents, 0.7, dense_table(window, documents, SEQ, cuda))
    ours, plain = sdpa_attention(*heads, flex), sdpa_attention(*heads, dense)
    assert_close(ours, plain, rtol=1e-2, atol=1e-3)
    direction = torch.randn_like(plain)
    for a, b in zip(
        torch.autograd.grad(ours, heads, direction), torch.autograd.grad(plain, heads, direction), strict=True
    ):
        assert_close(a, b, rtol=1e-2, atol=1e-2)


def _heads(batch: int, seq: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = ((batch, 4, seq, 16), (batch, 2, seq, 16), (batch, 2, seq, 16))
    q, k, v = (torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes)
    return q, k, v
