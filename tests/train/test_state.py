"""Random histories: every sample is read once, and skipped samples stay skipped."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forge.data.build import input_fingerprints
from forge.data.dataset import PackedDataset
from forge.train.state import Progress, Rollback
from tests.support.streams import Numbers

SIZES = {"a": 5, "b": 37, "c": 400, "d": 90}
WEIGHTS = st.dictionaries(st.sampled_from("abcd"), st.sampled_from([0.1, 0.5, 1.0, 3.0]), min_size=1)
MIXTURES = st.tuples(WEIGHTS, st.sampled_from([1, 7, 16]))
STEPS = st.tuples(
    st.integers(1, 40),  # samples to read
    st.booleans(),  # whether to save then
    st.integers(0, 40),  # samples to read
    st.one_of(
        st.tuples(st.just("change"), MIXTURES),
        st.tuples(st.just("roll_back"), st.tuples(st.integers(0, 3), st.booleans())),
        st.tuples(st.just("restart"), st.tuples(st.integers(0, 3), MIXTURES)),
    ),
)


class History:
    """A run without a model. Like the trainer it reads, saves, stops, continues with other data and rolls back."""

    def __init__(self, mixture: tuple[dict[str, float], int]):
        self.configure(mixture)
        self.progress = Progress(self.dataset.order)
        self.kept: list[tuple[dict[str, Any], int]] = []  # checkpoints, and the number of samples read
        self.file: list[Rollback] = []  # rollbacks.json
        self.read: list[tuple[str, int]] = []  # (source, m), without undone reads
        self.bad: set[tuple[str, int]] = set()
        self.keys: dict[tuple[str, int], int] = {}

    def configure(self, mixture: tuple[dict[str, float], int]) -> None:
        weights, block = mixture
        sources = [Numbers(name, SIZES[name]) for name in weights]
        self.dataset = PackedDataset(sources, list(weights.values()), 1, seed=0, block=block)

    def go_on(self, count: int) -> None:
        for _ in range(count):
            order = self.progress.order
            number, m = order.locate(self.progress.next_sample)
            name = order.sources[number]
            self.read.append((name, m))
            epoch = m // SIZES[name]
            assert self.keys.setdefault((name, epoch), order.key(number, epoch)) == order.key(number, epoch)
            self.progress.advance(SimpleNamespace(windows=1, tokens=1, kind=[]))

    def save(self) -> None:
        saved = {"progress": self.progress.state(), "inputs": input_fingerprints(self.dataset, None)}
        self.kept.append((json.loads(json.dumps(saved)), len(self.read)))

    def change(self, mixture: tuple[dict[str, float], int]) -> None:
        """Stop, and continue with other data."""
        self.save()
        self.configure(mixture)
        self.load(len(self.kept) - 1)

    def restart(self, choice: tuple[int, Any]) -> None:
        """Return to a checkpoint, as if later ones were damaged, and continue with other data."""
        self.configure(choice[1])
        self.load(choice[0] % len(self.kept))

    def roll_back(self, choice: tuple[int, bool]) -> None:
        number, pass_over = choice[0] % len(self.kept), choice[1]
        saved, read = self.kept[number]
        self.file.append(self.progress.rollback_to(saved, pass_over))
        if pass_over:
            self.bad.update(self.read[read:])
        self.load(number)

    def load(self, number: int) -> None:
        del self.kept[number + 1 :]
        saved, read = self.kept[number]
        del self.read[read:]
        self.progress = Progress(self.dataset.order)
        self.progress.load(saved)
        self.progress.pass_over(self.file)
        self.progress.order = self.dataset.continuing(self.progress.order, self.progress.next_sample)

    def check(self) -> None:
        assert len(set(self.read)) == len(self.read)
        assert not self.bad & set(self.read)
        for name in SIZES:
            read = {m for source, m in self.read if source == name}
            bad = {m for source, m in self.bad if source == name}
            assert read == set(range(max(read, default=-1) + 1)) - bad


@pytest.mark.long
@settings(max_examples=100, deadline=None)
@given(MIXTURES, st.lists(STEPS, min_size=2, max_size=8))
def test_every_sample_is_read_once_in_any_history(mixture, steps) -> None:
    history = History(mixture)
    history.go_on(20)
    history.save()
    for some, save, more, (kind, argument) in steps:
        history.go_on(some)
        if save:
            history.save()
        history.go_on(more)
        getattr(history, kind)(argument)
        history.check()
    history.go_on(100)
    history.check()
    assert len(history.progress.order.segments) <= 1 + len(steps)


def test_a_checkpoint_names_the_tokens_before_its_last_step() -> None:
    """Phases find the settings of the last step by them, also if earlier steps had other batch sizes."""
    dataset = PackedDataset([Numbers("a", 5)], [1.0], 1, seed=0, block=16)
    progress, restored = Progress(dataset.order), Progress(dataset.order)
    for tokens in (70, 30):
        progress.advance(SimpleNamespace(windows=1, tokens=tokens, kind=[tokens]))
    saved = {"progress": progress.state(), "inputs": input_fingerprints(dataset, None)}
    restored.load(saved)
    assert (restored.last_step_at, restored.last_kind) == (70, [30])
    del saved["progress"]["last_step_at"]  # a checkpoint of an older version
    restored.load(saved)
    assert restored.last_step_at is None
