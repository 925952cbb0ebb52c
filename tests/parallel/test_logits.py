"""Maximum logits: over visible pairs, in training forwards only, a chunk of queries at a time."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from forge.config import parse_toml_text
from forge.model import AttentionMask, build_model, sdpa_attention
from forge.model.sdpa import dense_table
from forge.parallel import logits
from forge.runtime.errors import BAD_CONFIG, UserError
from forge.shard import Shard
from tests.support.equivalence import tiny_config

HYBRID = """layer_pattern = ["linear", "linear", "full"]
[model.linear_attention]
n_key_heads = 2
key_head_dim = 8
"""
ONE: Any = SimpleNamespace(rank=lambda: 0, size=lambda: 1)
TP: Any = SimpleNamespace(device_type="cpu")
LAYOUT: Any = SimpleNamespace(
    meshes=SimpleNamespace(tp=TP, cp=ONE, stage=ONE),
    model=SimpleNamespace(n_heads=4, n_kv_heads=2),
)


def tensors() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, heads, 10, 6, generator=generator, dtype=torch.float64) for heads in (4, 2, 2)]


@pytest.mark.parametrize("rows", [1, 3, 10, 256])
def test_logits_of_visible_pairs_count_for_any_chunk_size(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logits, "ROWS", rows)
    largest = torch.full((4,), -torch.inf, dtype=torch.float64)
    attend = logits.ObservedAttention(sdpa_attention, largest, LAYOUT, logits.SequenceSplit(ONE))
    q, k, v = tensors()
    documents = torch.tensor([[0] * 4 + [1] * 6, [0] * 7 + [1] * 3])
    mask = attend.prepare(AttentionMask(3, documents), q.transpose(1, 2).flatten(2))
    out = attend(q, k, v, mask)
    assert torch.equal(out, sdpa_attention(q, k, v, mask))
    scores = q @ k.repeat_interleave(2, dim=1).mT / 6**0.5
    expected = scores.masked_fill(~dense_table(3, documents, 10, q.device), -torch.inf).amax((0, 2, 3))
    torch.testing.assert_close(largest, expected, rtol=0, atol=1e-14)
    # The maximum over forwards. Forwards without a gradient do not count.
    with torch.no_grad():
        attend(3 * q, k, v, mask)
    torch.testing.assert_close(largest, expected, rtol=0, atol=1e-14)
    attend(q / 2, k, v, mask)
    torch.testing.assert_close(largest, expected, rtol=0, atol=1e-14)
    attend(2 * q, k, v, mask)
    torch.testing.assert_close(largest, 2 * expected.clamp(min=0) + expected.clamp(max=0), rtol=0, atol=1e-14)


def test_linear_layers_have_no_logits_and_the_others_are_observed() -> None:
    config = parse_toml_text(tiny_config(model=HYBRID)).model
    with torch.device("meta"):
        model = build_model(config, 80)
    shards = [Shard.whole(name, nn.Parameter(torch.zeros(4, 4))) for name, _ in model.named_parameters()]
    observed = logits.LargestLogits([model], shards, LAYOUT)
    assert set(observed.by_parameter) == {"layers.2.attention.wq.weight"}
    attends = [block.attention.attend for block in model.layers.values()]
    assert [isinstance(attend, logits.ObservedAttention) for attend in attends] == [False, False, True]


def test_attention_of_another_kind_is_refused_by_its_name_and_layer() -> None:
    class Latent(nn.Module):
        pass

    block = SimpleNamespace(attention=Latent())
    parts: Any = [SimpleNamespace(layers={"7": block})]
    shards = [Shard.whole("layers.7.attention.wq.weight", nn.Parameter(torch.zeros(4, 4)))]
    with pytest.raises(
        UserError,
        match=r"qk_clip .* the logits of Latent in layer 7 are not products of such projections; set .*qk_clip = 0",
    ) as caught:
        logits.LargestLogits(parts, shards, LAYOUT)
    assert caught.value.exit_code == BAD_CONFIG
