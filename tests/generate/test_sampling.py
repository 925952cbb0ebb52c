"""Sampling without a real model: logits are a known function of the tokens."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from forge.generate import choose, generate

VOCAB = 10


def counting_model(tokens: Tensor) -> Tensor:
    """Bets on the last token plus one."""
    return torch.nn.functional.one_hot((tokens + 1) % VOCAB, VOCAB).float()


def flat_model(tokens: Tensor) -> Tensor:
    """Any token is as likely as any other."""
    return torch.zeros(*tokens.shape, VOCAB)


def test_temperature_zero_takes_the_likeliest() -> None:
    new = generate(counting_model, [3, 7], max_tokens=4, temperature=0.0, seed=0, seq_len=8, eos=None)
    assert new == [8, 9, 0, 1]


def test_of_equal_scores_greedy_takes_the_lowest_token() -> None:
    assert generate(flat_model, [3], max_tokens=3, temperature=0.0, seed=0, seq_len=8) == [0, 0, 0]


def test_generation_ends_after_the_end_token() -> None:
    assert generate(counting_model, [3], max_tokens=9, temperature=0.0, seed=0, seq_len=8, eos=6) == [4, 5, 6]


def test_the_same_seed_writes_the_same_text_and_another_seed_another() -> None:
    texts = [generate(flat_model, [1], 30, temperature=1.0, seed=seed, seq_len=8) for seed in (5, 5, 6)]
    assert texts[0] == texts[1] != texts[2]


def test_a_draw_depends_on_its_position_in_the_text_alone() -> None:
    whole = generate(flat_model, [1], 20, temperature=1.0, seed=5, seq_len=8)
    rest = generate(flat_model, [1, *whole[:12]], 8, temperature=1.0, seed=5, seq_len=8)
    assert rest == whole[12:]


def test_the_global_generator_is_neither_read_nor_moved() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    generate(flat_model, [1], 5, temperature=1.0, seed=5, seq_len=8)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_model_sees_at_most_the_last_seq_len_tokens() -> None:
    seen: list[list[int]] = []

    def watching(tokens: Tensor) -> Tensor:
        seen.append(tokens[0].tolist())
        return counting_model(tokens)

    generate(watching, [0, 1, 2], max_tokens=3, temperature=0.0, seed=0, seq_len=4)
    assert seen == [[0, 1, 2], [0, 1, 2, 3], [1, 2, 3, 4]]


def test_draws_follow_the_softmax_at_the_temperature() -> None:
    logits = torch.tensor([2.0, 0.0, 1.0])
    draws = torch.tensor([choose(logits, 2.0, seed=1, position=n) for n in range(4000)])
    shares = torch.bincount(draws, minlength=3) / len(draws)
    assert torch.allclose(shares, (logits / 2.0).softmax(-1), atol=0.03)


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="no tokens"):
        generate(flat_model, [], 5, temperature=0.0, seed=0, seq_len=8)
