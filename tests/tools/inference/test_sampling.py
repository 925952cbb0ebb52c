"""Sampling without a real model: logits are a known function of the tokens."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from forge.tools.inference import Sampling, choose_token, generate, recomputed

VOCAB = 10
GREEDY = Sampling()


def counting_model(tokens: Tensor) -> Tensor:
    """Bets on the last token plus one."""
    return torch.nn.functional.one_hot((tokens + 1) % VOCAB, VOCAB).float()


def flat_model(tokens: Tensor) -> Tensor:
    """Any token is as likely as any other."""
    return torch.zeros(*tokens.shape, VOCAB)


def write(
    model: Callable[[Tensor], Tensor],
    prompt: list[int],
    max_tokens: int,
    sampling: Sampling = GREEDY,
    seq_len: int = 8,
) -> list[int]:
    steps = generate(recomputed(model, seq_len), [prompt], max_tokens, sampling)
    return [token for (token,) in steps if token is not None]


def test_temperature_zero_takes_the_likeliest() -> None:
    assert write(counting_model, [3, 7], 4) == [8, 9, 0, 1]


def test_of_equal_scores_greedy_takes_the_lowest_token() -> None:
    assert write(flat_model, [3], 3) == [0, 0, 0]


def test_each_text_ends_with_its_own_end_token() -> None:
    asked = []

    def stop(row: int, new: list[int]) -> bool:
        asked.append((row, list(new)))
        return new[-1] == 6

    steps = list(generate(recomputed(counting_model, 8), [[3], [4], [9]], 4, Sampling(), stop))
    assert steps == [[4, 5, 0], [5, 6, 1], [6, None, 2], [None, None, 3]]
    assert (1, [5, 6]) in asked and (1, [5, 6, 7]) not in asked


def test_the_model_is_not_called_again_when_all_texts_have_ended() -> None:
    steps = list(generate(recomputed(counting_model, 8), [[3]], 9, Sampling(), lambda _, new: new[-1] == 5))
    assert steps == [[4], [5]]


def test_the_same_seed_writes_the_same_text_and_another_seed_another() -> None:
    texts = [write(flat_model, [1], 30, Sampling(1.0, seed=seed)) for seed in (5, 5, 6)]
    assert texts[0] == texts[1] != texts[2]


def test_a_draw_depends_on_its_position_in_the_text_alone() -> None:
    drawn = Sampling(1.0, seed=5)
    whole = write(flat_model, [1], 20, drawn)
    assert write(flat_model, [1, *whole[:12]], 8, drawn) == whole[12:]


def test_the_global_generator_is_neither_read_nor_moved() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    write(flat_model, [1], 5, Sampling(1.0, seed=5))
    assert torch.equal(torch.get_rng_state(), before)


def test_the_model_sees_at_most_the_last_seq_len_tokens() -> None:
    seen: list[list[int]] = []

    def watching(tokens: Tensor) -> Tensor:
        seen.append(tokens[0].tolist())
        return counting_model(tokens)

    write(watching, [0, 1, 2], 3, seq_len=4)
    assert seen == [[0, 1, 2], [0, 1, 2, 3], [1, 2, 3, 4]]


LOGITS = torch.tensor([2.0, 0.0, 1.0, 1.0, -torch.inf], dtype=torch.float64)


@pytest.mark.long
@pytest.mark.parametrize(
    ("sampling", "left"),
    [
        (Sampling(2.0), [0, 1, 2, 3]),
        (Sampling(2.0, top_k=3), [0, 2, 3]),
        (Sampling(2.0, top_k=2), [0, 2]),  # of equal scores the lower token stays
        (Sampling(2.0, top_k=99), [0, 1, 2, 3]),
        (Sampling(1.0, top_p=0.5), [0]),
        (Sampling(1.0, top_p=0.6), [0, 2]),  # shares 0.54, 0.20, 0.20, 0.07
        (Sampling(1.0, top_p=0.8), [0, 2, 3]),
        (Sampling(1.0, top_p=1e-9), [0]),
        (Sampling(1.0, top_k=2, top_p=0.7), [0]),  # of the remaining two, the first has 0.73
    ],
)
def test_draws_follow_the_softmax_of_the_kept_tokens(sampling: Sampling, left: list[int]) -> None:
    draws = torch.tensor([choose_token(LOGITS, sampling, position=n) for n in range(4000)])
    shares = torch.bincount(draws, minlength=len(LOGITS)) / len(draws)
    expected = torch.zeros(len(LOGITS), dtype=torch.float64)
    expected[left] = (LOGITS[left] / sampling.temperature).softmax(-1)
    assert torch.allclose(shares.double(), expected, atol=0.03)
    assert set(draws.tolist()) == set(left)


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="no tokens"):
        write(flat_model, [], 5)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_non_finite_scores_are_refused(bad: float) -> None:
    scores = LOGITS.clone()
    scores[3] = bad
    for sampling in (Sampling(), Sampling(1.0, top_k=3)):
        with pytest.raises(ValueError, match="not finite"):
            choose_token(scores, sampling, position=0)
