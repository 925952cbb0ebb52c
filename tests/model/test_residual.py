"""The mix over depth: gradients against finite differences, initial values, and tensors kept for backward."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.testing import assert_close

from forge.model.residual import DepthMix
from tests.support.reference_residual import DepthStream
from tests.support.small_models import batch, small_config, small_model

DIM = 6


def streams(number: int, dtype: torch.dtype = torch.float64, seq: int = 3) -> list[Tensor]:
    generator = torch.Generator().manual_seed(number)
    return [
        torch.randn(2, seq, DIM, generator=generator, dtype=torch.float64).to(dtype) for _ in range(number)
    ]


def mix_of(query: Tensor) -> DepthMix:
    mix = DepthMix(DIM, 1e-5).to(query.dtype)
    mix.query.data.copy_(query)
    return mix


def test_gradients_of_query_and_streams_equal_finite_differences() -> None:
    query = torch.randn(DIM, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    mix = DepthMix(DIM, 1e-5).double()
    inputs = [stream.requires_grad_() for stream in streams(4)]

    def run(query: Tensor, *given: Tensor) -> Tensor:
        return torch.func.functional_call(mix, {"query": query}, (given[-1], given[:-1]))

    assert torch.autograd.gradcheck(run, (query.requires_grad_(), *inputs))


def test_a_mix_equals_the_plain_form_token_by_token() -> None:
    query = torch.randn(DIM, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    given = streams(3)
    found = mix_of(query)(given[-1], tuple(given[:-1]))
    for row in range(2):
        plain = DepthStream(given[0][row], 1e-5)
        plain.blocks, plain.partial = [stream[row] for stream in given[:-1]], given[-1][row]
        assert_close(found[row], plain.read(query), rtol=1e-12, atol=1e-12)


def test_at_first_a_mix_is_the_mean_and_its_query_has_a_gradient() -> None:
    mix = mix_of(torch.full((DIM,), DepthMix(DIM, 1e-5).initial_value("query"), dtype=torch.float64))
    given = streams(3)
    out = mix(given[-1], tuple(given[:-1]))
    assert_close(out, torch.stack(given).mean(0))
    out.square().sum().backward()
    assert mix.query.grad is not None and mix.query.grad.abs().min() > 0


def test_scores_do_not_depend_on_the_size_of_a_stream() -> None:
    """Otherwise a block that sums more layers would dominate. The mix itself keeps the streams' magnitudes."""
    query = torch.ones(DIM, dtype=torch.float64)
    one, two = streams(2)
    small = mix_of(query)(two, (one,))
    shares = torch.linalg.lstsq(
        torch.stack([one[0, 0], two[0, 0]], 1), small[0, 0][:, None]
    ).solution.squeeze()
    large = mix_of(query)(two, (1000 * one,))
    grown = torch.linalg.lstsq(
        torch.stack([one[0, 0], two[0, 0]], 1), large[0, 0][:, None]
    ).solution.squeeze()
    assert_close(grown, shares * torch.tensor([1000.0, 1.0], dtype=torch.float64), rtol=1e-4, atol=1e-6)


def test_backward_keeps_streams_by_reference_and_two_numbers_per_token_and_stream() -> None:
    given = [stream.requires_grad_() for stream in streams(5, torch.bfloat16, seq=50)]
    mix, kept = mix_of(torch.ones(DIM, dtype=torch.bfloat16)), []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        mix(given[-1], tuple(given[:-1]))
    own = {stream.data_ptr() for stream in given} | {mix.query.data_ptr()}
    new = [tensor for tensor in kept if tensor.data_ptr() not in own]
    assert sum(tensor.numel() for tensor in new) == 2 * 5 * 2 * 50
    assert len(kept) - len(new) == 6


def test_every_second_layer_begins_a_block_and_the_first_has_no_mix_before_attention() -> None:
    model = small_model(
        small_config(n_layers=5, residual="attention", residual_block_size=2, mtp={"depth": 1})
    )
    assert [block.begins_block for block in model.layers.values()] == [True, False, True, False, True, True]
    assert [block.attention_mix is None for block in model.layers.values()] == [True, *[False] * 4, True]
    model(*batch())[0].backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in model.parameters())


def test_a_layer_gets_one_stream_more_than_the_saved_blocks() -> None:
    config = small_config(n_layers=7, residual="attention", residual_block_size=3)
    assert [config.streams_into(layer) for layer in range(8)] == [1, 2, 2, 2, 3, 3, 3, 4]
    assert [small_config().streams_into(layer) for layer in range(3)] == [1, 1, 1]
