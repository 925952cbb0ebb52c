import logging
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from forge.config import Phases, load_config
from forge.data.build import build_dataset
from forge.data.dataset import PackedDataset
from forge.data.epochs import check_caps, epochs, log_left_out
from forge.data.loader import mixtures_ahead
from forge.data.order import Order, SkippedRange
from forge.runtime.errors import UserError
from forge.tools.prepare.inspect import mixture_of_steps
from tests.support.streams import Numbers


def data(weights: dict[str, float], sizes: dict[str, int], caps: dict[str, float]) -> PackedDataset:
    sources = [Numbers(name, sizes[name]) for name in weights]
    most = [caps.get(name, 0) for name in weights]
    return PackedDataset(sources, list(weights.values()), 1, seed=3, block=16, max_epochs=most)


def read(dataset: PackedDataset, first: int, count: int) -> list[tuple[str, int, int]]:
    return [dataset.locate(sample) for sample in range(first, first + count)]


SIZES = {"a": 40, "b": 1000, "c": 50}


def test_a_source_is_left_out_after_max_epochs() -> None:
    dataset = data({"a": 1, "b": 1, "c": 2}, SIZES, {"a": 2.5, "c": 1})
    counts = Counter(name for name, _, _ in read(dataset, 0, 900))
    assert counts == {"a": 100, "c": 50, "b": 750}
    assert Counter((name, epoch) for name, epoch, _ in read(dataset, 0, 900))["a", 2] == 20
    ends = [segment.start for segment in dataset.order.segments[1:]]
    assert len(ends) == 2 and [name for name, _, _ in read(dataset, ends[0] - 1, 1)] == ["c"]
    free = data({"a": 1, "b": 1, "c": 2}, SIZES, {})
    assert read(free, 0, ends[0]) == read(dataset, 0, ends[0])


def test_a_resume_at_any_step_reads_the_samples_of_an_undisturbed_run() -> None:
    dataset = data({"a": 1, "b": 1, "c": 2}, SIZES, {"a": 2.5, "c": 1})
    expected = read(dataset, 0, 700)
    for stop in (0, 1, 99, 100, 101, 250, 400, 500):
        saved = dataset.order.state()
        again = data({"a": 1, "b": 1, "c": 2}, SIZES, {"a": 2.5, "c": 1})
        order = again.continuing(Order.restored(saved, seed=3), stop)
        assert read(again.following(order), 0, 700) == expected
        assert len(order.segments) == 3, "a resume adds no segment"


def test_a_raised_cap_continues_a_source_at_its_old_position() -> None:
    before = data({"a": 1, "b": 1}, SIZES, {"a": 1})
    after = data({"a": 1, "b": 1}, SIZES, {"a": 2})
    order = after.continuing(before.order, 300)
    found = read(after.following(order), 0, 600)
    seen = [(epoch, window) for name, epoch, window in found if name == "a"]
    assert len(seen) == len(set(seen)) == 80
    assert not [name for name, _, _ in found[80:300] if name == "a"]


def test_a_source_is_capped_inside_a_skipped_range() -> None:
    """A roll-back skips the planned end of source a. Later samples of b are not skipped with it."""
    dataset = data({"a": 1, "b": 1}, SIZES, {"a": 1})
    [_, second] = dataset.order.segments
    span = SkippedRange(second.start - 4, second.start + 4, {})
    span = replace(span, drawn=dataset.order.between(span.first_sample, span.end_sample))
    order = dataset.order.passing_over([span])
    left = [i for i in range(200) if not span.first_sample <= i < span.end_sample]
    assert [order.locate(i) for i in left] == [dataset.order.locate(i) for i in left]


@pytest.mark.parametrize("stop", [0, 70, 80, 90, 200])
def test_a_source_is_read_to_its_cap_without_the_skipped_samples(stop: int) -> None:
    """A process that rolls back and one that starts later read the same samples."""
    dataset = data({"a": 1, "b": 1}, SIZES, {"a": 1})
    span = SkippedRange(8, 16, dataset.order.between(8, 16))
    rolled_back = dataset.continuing(dataset.order.passing_over([span]), 8)
    kept = [i for i in range(400) if not 8 <= i < 16]
    sources = [rolled_back.locate(i)[0] for i in kept]
    assert sources.count(0) == 40
    restored = Order.restored(rolled_back.state(), seed=3).passing_over([span])
    again = dataset.continuing(restored, stop)
    assert [again.locate(i) for i in kept] == [rolled_back.locate(i) for i in kept]


def test_skipped_samples_count_as_unread_epochs() -> None:
    dataset = data({"a": 1}, SIZES, {})
    dataset.most_epochs = {"a": 1.0}
    check_caps(dataset, 40)
    order = dataset.order.passing_over([SkippedRange(8, 16, dataset.order.between(8, 16))])
    dataset = dataset.following(order)
    assert epochs(dataset, 40) == {"a": 32 / 40}
    check_caps(dataset, 48)
    with pytest.raises(UserError, match="more than its max_epochs"):
        check_caps(dataset, 49)


def test_the_start_reports_when_sources_end_and_refuses_a_run_without_any(caplog) -> None:
    caplog.set_level(logging.INFO)
    dataset = data({"a": 1, "b": 1}, SIZES, {"a": 1})
    log_left_out(dataset, 0, 500)
    assert "sources that have reached max_epochs are not read" in caplog.text
    capped = data({"a": 1, "c": 1}, SIZES, {"a": 1, "c": 2})
    log_left_out(capped, 0, 139)
    with pytest.raises(
        UserError, match="every source reaches its max_epochs at sample 140, but the run needs 141"
    ):
        log_left_out(capped, 0, 141)


def test_a_run_beyond_the_cap_may_be_refused_instead(tmp_path) -> None:
    """Each of two sources of one name has its own limit."""
    for name, tokens in (("large", 4001), ("small", 401)):
        np.arange(tokens, dtype=np.uint16).tofile(tmp_path / f"{name}.bin")
    sources = ",".join(
        f'{{path="{tmp_path / name}.bin",dtype="uint16",name="web",max_epochs=4.0}}'
        for name in ("large", "small")
    )
    given = [f"--data.sources=[{sources}]", "--train.seq_len=40", "--model.vocab_size=4096"]
    config = load_config(
        ["--config", "debug.toml", *given, "--data.on_max_epochs=refuse", "--data.validation=[]"]
    )
    dataset = build_dataset(config)
    # The small source has 10 samples and half of the weight.
    check_caps(dataset, 60)
    with pytest.raises(UserError, match=r"web would be read .* times by .*, more than its max_epochs = 4;"):
        check_caps(dataset, 120)


@pytest.mark.parametrize(
    ("weights", "refused"),
    [
        ([[1, 0], [0, 1]], ""),
        ([[0, 1], [1, 0]], ""),
        ([[1, 0], [1, 0]], "reaches its max_epochs at sample 100, but the run needs 160"),
        ([[0, 1], [1, 0], [1, 0]], "reaches its max_epochs at sample 180, but the run needs 240"),
    ],
)
@pytest.mark.parametrize("policy", ["leave_out", "refuse"])
def test_limits_hold_over_the_mixtures_of_all_phases(
    tmp_path, caplog, weights: list[list[int]], refused: str, policy: str
) -> None:
    """Each phase has 80 samples; source a has 100, and b has 1,000."""
    caplog.set_level(logging.INFO)
    for name, samples in (("a", 100), ("b", 1000)):
        np.arange(samples * 40 + 1, dtype=np.uint16).tofile(tmp_path / f"{name}.bin")
    sources = ",".join(
        f'{{path="{tmp_path / name}.bin",dtype="uint16",weight={float(name == "b")},max_epochs=1.0}}'
        for name in "ab"
    )
    ends = [80 * 40 * number for number in range(1, len(weights) + 1)]
    phases = ",".join(f"{{until_tokens={end},weights={of}}}" for end, of in zip(ends, weights, strict=True))
    config = load_config(
        [
            *("--config=debug", f"--data.sources=[{sources}]", f"--phase=[{phases}]", "--data.validation=[]"),
            *("--train.seq_len=40", "--train.global_batch_size=8", f"--train.steps={10 * len(weights)}"),
            *("--model.vocab_size=4096", f"--data.on_max_epochs={policy}", "--schedule.warmup_steps=1"),
        ]
    )
    dataset = build_dataset(config)
    ranges = Phases(config).ranges(config.train.steps)

    def check() -> None:
        for of, first, last in mixtures_ahead(dataset, ranges, 0):
            log_left_out(of, first, last)
        check_caps(of, last)

    if not refused:
        check()
        assert "are not read" not in caplog.text
    else:
        with pytest.raises(UserError, match="1.6 times" if policy == "refuse" else refused):
            check()


def test_the_mixture_of_a_range_of_steps_is_counted_without_reading() -> None:
    dataset = data({"a": 1, "b": 1, "c": 2}, SIZES, {"a": 2.5, "c": 1})
    readings = mixture_of_steps(dataset, 11, 40, 8)
    counts = Counter(name for name, _, _ in read(dataset, 80, 240))
    assert {one.source: one.samples for one in readings} == dict(counts)
    assert sum(one.share for one in readings) == pytest.approx(1)
    assert readings[2].epochs_after == 1 and "2.000" not in readings[2].describe()
