"""FSDP2 sends weights as codes and scales: half the bytes of bfloat16, with the values of whole-weight quantisation."""

from __future__ import annotations

import pytest
import torch

from benchmarks.collectives import collectives_of
from forge.parallel.float8.formats import FORMATS
from forge.parallel.float8.gathering import GatheredWeight, ShardedWeight
from forge.parallel.float8.products import quantised_weight
from forge.runtime.errors import UserError
from forge.tools.verify.ranks import RankFailed
from tests.support.building import built
from tests.support.equivalence import tiny_config
from tests.support.harness import run_ranks


def text(section: str, extra: str = "", parallel: str = "") -> str:
    whole = tiny_config(parallel=parallel).replace("[precision]", f"[precision]\n{section}")
    whole = whole.replace("dim = 32", "dim = 256").replace("ffn_dim = 48", "ffn_dim = 256")
    whole = whole.replace("n_kv_heads = 2", "n_kv_heads = 4").replace("seq_len = 80", "seq_len = 128")
    return (
        whole.replace('"float64"', '"float32"').replace('compute = "float32"', 'compute = "bfloat16"') + extra
    )


def sent_on_rank(rank: int, world: int, keys: str) -> list[int]:
    """Return the bytes of a microbatch's gathers, forward and backward."""
    one = built(keys, world)
    batch = next(one.batches())
    found = collectives_of(lambda: one.model.forward_backward(batch, torch.tensor(100.0)))
    return found.sizes("all_gather")


@pytest.mark.parametrize("kind", FORMATS)
def test_a_gather_in_codes_sends_half_the_bytes(kind: str) -> None:
    bfloat16, codes = (
        run_ranks(sent_on_rank, 2, text(f'float8 = "{kind}"\nfloat8_all_gather = {choice}'))[0]
        for choice in ("false", "true")
    )
    assert len(bfloat16) == len(codes)
    # A block has 7 matrices of 256 x 256, and norms. The last of three blocks stays gathered; mxfp8 sends it in bfloat16.
    matrices = 7 * 256 * 256
    smaller = [one for one in codes if matrices < one < 1.04 * matrices]
    microbatches = 4
    assert len(smaller) == microbatches * (5 if kind == "blockwise" else 4), (codes, bfloat16)
    assert sum(2 * matrices <= one < 2.01 * matrices for one in bfloat16) == microbatches * 5
    assert sum(codes) < sum(bfloat16)


MXFP8 = 'float8 = "mxfp8"\nfloat8_all_gather = true'


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            text(MXFP8, '[activation_checkpoint]\nmode = "full"\n'),
            "cannot be true with activation_checkpoint.mode",
        ),
        (
            text(MXFP8, parallel='reshard_after_forward = "never"'),
            "cannot be true with parallel.reshard_after_forward",
        ),
        (text(MXFP8, parallel="pp = 2"), "cannot be true with parallel.pp = 2"),
        (
            text('float8 = "blockwise"\nfloat8_all_gather = true').replace("= 256", "= 192"),
            "no weight can be .* The gather needs fsdp2 over several ranks",
        ),
    ],
)
def test_an_impossible_gather_in_codes_is_refused(keys: str, message: str) -> None:
    with pytest.raises((RankFailed, UserError), match=f"float8_all_gather = true.*: {message}"):
        run_ranks(sent_on_rank, 2, keys)


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_shards_have_the_codes_of_the_whole_weight(form) -> None:
    weight = torch.randn(4 * form.block, 2 * form.block)

    class Policy:
        param_dtype = torch.bfloat16

    sent = [
        ShardedWeight(part, form).fsdp_pre_all_gather(None, weight.shape, weight.stride(), None, Policy)
        for part in weight.chunk(4)
    ]
    outputs = tuple(torch.cat(parts) for parts in zip(*(inputs for inputs, _ in sent), strict=True))
    gathered, inner = ShardedWeight(weight[:1], form).fsdp_post_all_gather(outputs, (-1,), torch.bfloat16)
    assert isinstance(gathered, GatheredWeight) and inner == outputs
    assert gathered.shape == weight.shape and gathered.dtype == torch.bfloat16
    found, expected = (
        quantised_weight(gathered, form, -1),
        form.quantise(weight.bfloat16(), form.of_weight(-1)),
    )
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one.view(torch.uint8), other.contiguous().view(torch.uint8))
    # PyTorch's split backward finds a parameter's gradient accumulator by this view.
    parameter = torch.nn.Parameter(gathered)
    assert parameter.view_as(parameter).grad_fn.next_functions[0][0].variable is parameter
    for impossible in (lambda: gathered + 1, lambda: gathered.view(-1)):
        with pytest.raises(NotImplementedError):
            impossible()
