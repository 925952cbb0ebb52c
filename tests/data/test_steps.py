"""The samples of a step of any size, on any number of ranks."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from forge.config import Phases, load_config
from forge.data.build import build_dataset
from forge.data.dataset import PackedDataset
from forge.data.loader import Loader, StepRows, mixtures_ahead, part_of, steps_from
from forge.data.order import SkippedRange

CONFIG = load_config(
    [
        *("--config=debug", "--model.vocab_size=64", "--train.seq_len=32", "--train.global_batch_size=8"),
        "--data.sources=[{path='synthetic',weight=1.0},{path='synthetic',weight=0.0}]",
        *("--data.validation=[]", "--train.micro_batch_size=1", "--train.steps=12"),
        "--phase=[{until_tokens=500,global_batch_size=8,seq_len=8,document_mask=true},"
        "{until_tokens=2000,ramp='linear',global_batch_size=16,weights=[1.0,3.0]}]",
    ]
)
STEPS = 12


def steps(dataset: PackedDataset, rank: int = 0, ranks: int = 1, **start: int) -> list[StepRows]:
    made = steps_from(dataset, Phases(CONFIG).at, global_batch_size=8, **start)
    return [next(made).rows(rank, ranks) for _ in range(STEPS)]


def rows(of_steps: list[StepRows]) -> list[list[tuple[int, int]]]:
    return [list(zip(step.samples, step.parts, strict=True)) for step in of_steps]


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_step_has_the_same_rows_on_any_number_of_ranks(ranks: int) -> None:
    dataset = build_dataset(CONFIG)
    alone = rows(steps(dataset))
    parts = [rows(steps(dataset, rank, ranks)) for rank in range(ranks)]
    for number, whole in enumerate(alone):
        assert [row for part in parts for row in part[number]] == whole


def test_every_part_of_every_sample_is_read_once_in_order() -> None:
    found = steps(build_dataset(CONFIG))
    seen = Counter(sample for step in found for sample in step.samples)
    assert list(seen) == list(range(len(seen)))
    for step in found:
        parts = 32 // step.seq_len
        assert all(seen[sample] == parts for sample in step.samples)
        assert [part for part in step.parts] == [row % parts for row in range(len(step.parts))]
    assert {len(step.samples) * step.seq_len for step in found} == {64, 256, 8 * 32}


def test_parts_are_the_tokens_and_labels_of_the_sample() -> None:
    window = np.arange(33), np.arange(33) // 5
    parts = [part_of(window, part, 8) for part in range(4)]
    assert np.array_equal(np.concatenate([tokens[:-1] for tokens, _ in parts]), window[0][:-1])
    assert np.array_equal(np.concatenate([tokens[1:] for tokens, _ in parts]), window[0][1:])
    assert all(owners is not None and len(owners) == len(tokens) for tokens, owners in parts)
    short = np.arange(12), None
    assert [len(part_of(short, part, 8)[0]) for part in range(4)] == [9, 4, 1, 1]


def test_a_step_continues_after_the_previous_one_also_across_a_gap() -> None:
    dataset = build_dataset(CONFIG)
    dataset = dataset.following(dataset.order.passing_over([SkippedRange(5, 9)]))
    whole, phases = steps(dataset), Phases(CONFIG)
    order, sample = dataset.order, 0
    for number, step in enumerate(whole[:9]):
        tokens = phases.tokens_after(number)
        plan = phases.at(tokens)
        order = dataset.continuing(order, sample, plan.weights)
        later = steps(dataset.following(order), sample=sample, tokens=tokens)
        assert rows(later)[: STEPS - number] == rows(whole)[number:][: len(later)]
        assert order == step.dataset.order or order.segments == step.dataset.order.segments
        sample = order.nth(sample, plan.windows)


@pytest.mark.parametrize("gaps", [[], [SkippedRange(5, 9), SkippedRange(70, 90)]])
def test_the_mixtures_ahead_are_those_of_the_steps(gaps: list[SkippedRange]) -> None:
    dataset, phases = build_dataset(CONFIG), Phases(CONFIG)
    dataset = dataset.following(dataset.order.passing_over(gaps))
    made = steps_from(dataset, phases.at, global_batch_size=8)
    single = [next(made) for _ in range(STEPS + 1)]
    for first in (0, 2, 5):
        tokens = phases.tokens_after(first)
        ranges = list(phases.ranges(STEPS - first, tokens))
        before = single[max(0, first - 1)].dataset
        ahead = list(mixtures_ahead(before, ranges, single[first].sample))
        assert ahead[-1][0].order.segments == single[STEPS - 1].dataset.order.segments
        assert ahead[-1][2] == single[STEPS].sample
        plans = [plan for steps, plan in ranges for _ in range(steps)]
        for step, plan in zip(single[first:], plans, strict=False):
            assert (step.batch, step.windows) == (plan.global_batch_size, plan.windows)
            [(found, begin, _)] = [one for one in ahead if one[1] <= step.sample < one[2]]
            assert step.dataset.order.segments == found.order.segments
            assert step.dataset.weights == found.weights and begin <= step.sample
        assert [one[1] for one in ahead[1:]] == [one[2] for one in ahead[:-1]]


def test_weights_and_masks_of_a_phase_reach_the_batches() -> None:
    loader = Loader(build_dataset(CONFIG), global_batch_size=8, rank=0, ranks=1, plan_at=Phases(CONFIG).at)
    batches = [next(loader) for _ in range(STEPS)]
    loader.close()
    plans = [Phases(CONFIG).at(Phases(CONFIG).tokens_after(step)) for step in range(STEPS)]
    assert [tuple(batch.tokens.shape) for batch in batches] == [
        (plan.global_batch_size, plan.seq_len) for plan in plans
    ]
    assert [batch.documents is not None for batch in batches] == [plan.document_mask for plan in plans]
    shares = [float((batch.sources == 1).double().mean()) for batch in batches if batch.sources is not None]
    assert len(shares) == STEPS
    assert max(share for share, plan in zip(shares, plans, strict=True) if plan.weights[1] == 0) == 0
    assert max(shares) > 0
