import logging
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from forge.config import load_config
from forge.hook import StepResult
from forge.observe.collector import Collector
from forge.observe.json_lines import read_lines
from forge.observe.metrics import MetricsWriter, history
from forge.observe.progress import StepTimes, format_count, format_duration, format_line
from forge.observe.run_directory import RunDirectory

FIELDS = {
    "step": 120,
    "loss": 4.3123,
    "grad_norm": 1.234,
    "lr": 3e-3,
    "tokens_per_second": 8123.4,
    "step_time_s": 0.5,
    "data_time_s": 0.001,
    "memory_gib": 1.31,
    "mfu": 0.412,
}


def test_the_line_shows_everything_in_order():
    assert format_line(FIELDS, total_steps=4000, eta_s=192) == (
        "step  120/4000  loss 4.312  grad 1.23  lr 3.0e-03  8,123 tok/s  mfu 41.2%  mem 1.3 GiB  "
        "data 0.2%  eta 3m12s"
    )


def test_absent_values_are_left_out():
    assert (
        format_line({"step": 1, "loss": 2.0, "mfu": None}, total_steps=9, eta_s=None)
        == "step 1/9  loss 2.000"
    )


def test_a_skipped_step_is_marked_and_shows_non_finite_numbers():
    line = format_line({"step": 3, "skipped": True, "loss": math.nan, "grad_norm": math.inf}, 9, None)
    assert line == "step 3/9  SKIPPED  loss nan  grad inf"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"),
        (59.4, "59s"),
        (59.6, "1m00s"),
        (192, "3m12s"),
        (7500, "2h05m"),
        (86400 * 3 + 3600 * 4, "3d04h"),
        (-1, "0s"),
        (math.inf, "?"),
        (math.nan, "?"),
    ],
)
def test_durations(seconds, text):
    assert format_duration(seconds) == text


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0"),
        (8123.4, "8,123"),
        (999_999, "999,999"),
        (1_239_000, "1.24M"),
        (12_390_000, "12.4M"),
        (999_600_000, "1.00B"),
        (70e9, "70.0B"),
        (15e12, "15.0T"),
        (15e15, "15,000T"),
        (math.nan, "?"),
    ],
)
def test_counts(number, text):
    assert format_count(number) == text


def test_the_eta_forgets_the_first_step_and_those_long_ago():
    times = StepTimes(window=4)
    assert times.eta(10) is None
    times.add(60.0)
    assert times.eta(10) == 600.0
    times.add(1.0)
    assert times.eta(10) == 10.0
    for _ in range(4):
        times.add(2.0)
    assert times.eta(10) == 20.0
    assert times.eta(-1) == 0.0


def test_the_eta_includes_work_between_steps():
    times = StepTimes()
    for step in range(1, 41):
        times.add(1.0)
        # Every tenth step an evaluation of 5 s, every twentieth also a save of 10 s.
        times.pause(15.0 if step % 20 == 0 else 5.0 if step % 10 == 0 else 0.0)
        if 20 <= step < 30:
            assert times.eta(100 - step) == (1.0 + 1.0) * (100 - step)
    assert times.eta(60) == 60.0 + 6 * 5.0 + 3 * 10.0
    assert times.eta(0) == 0.0


def test_garbage_collection_is_shown_if_it_matters():
    assert "gc" not in format_line(FIELDS | {"gc_time_s": 0.004}, 4000, None)
    assert "gc 2.0%" in format_line(FIELDS | {"gc_time_s": 0.01}, 4000, None)


def metrics_writer(folder: Path, *options: str) -> MetricsWriter:
    config = load_config(["--config=debug", "--train.steps=100", *options])
    world = SimpleNamespace(rank=0, size=1, device=torch.device("cpu"))
    (folder / "run").mkdir()
    return MetricsWriter(
        config, world, RunDirectory(folder / "run"), 0.0, "float32", Collector(0), lambda step: None
    )


def result_of(step: int) -> StepResult:
    numbers = {
        "loss": 1.0,
        "objective": 1.0,
        "z_loss": 0.0,
        "grad_norm": 1.0,
        "valid_tokens": 1.0,
        "skipped": False,
        "waited_s": 0.0,
    }
    return StepResult(step, step * 8 * 256, 1e-3, 8, **numbers, router_layers=(), routers=[])


def test_the_rate_counts_the_tokens_and_flops_of_each_step(tmp_path, monkeypatch):
    """A phase changes the step's size between steps 3 and 4. The result of step n is read during step n + 1."""
    now = 0.0
    monkeypatch.setattr("forge.observe.metrics.time.perf_counter", lambda: now)
    writer = metrics_writer(tmp_path, "--metrics.log_interval=2", "--metrics.peak_tflops=1e-9")
    for step in range(1, 8):
        writer.set_step(*((1000, 0.1) if step < 4 else (3000, 0.2)))
        writer.before_data(step)
        writer.after_data(step)
        if step > 1:
            writer.after_result(result_of(step - 1))
        now += 2.0
        writer.after_step(step)
    lines = list(read_lines(tmp_path / "run" / "metrics.jsonl", "step"))
    found = [(line["step"], line["tokens_per_second"], round(line["mfu"], 9)) for line in lines]
    # Step 4's line has steps 3 and 4; its half of the FLOPs: (1000 * 0.1 + 3000 * 0.2) / 4 s of 1000 FLOP/s.
    assert found == [(1, 500, 0.05), (2, 500, 0.05), (4, 1000, 0.175), (6, 1500, 0.3)]


def test_every_nested_number_of_a_line_is_a_curve(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 3, "loss": 2.0, "mfu": null, "sources": {"a": 1.5}, "mtp_sources": {"a": 2.5}, "positions": [1.0], '
        '"text": {"a": "b"}, "mine": {"deep": {"x": 1, "names": ["y"]}, "word": "z"}}\n'
    )
    curves = {"train/loss": 2.0, "train/mfu": None, "sources/a": 1.5, "mtp_sources/a": 2.5, "mine/deep/x": 1}
    assert list(history(tmp_path / "metrics.jsonl")) == [(3, curves)]


def test_an_evaluation_between_two_steps_is_in_the_eta_of_the_log(tmp_path, monkeypatch, caplog):
    now = 0.0
    monkeypatch.setattr("forge.observe.metrics.time.perf_counter", lambda: now)
    caplog.set_level(logging.INFO, "forge")
    writer = metrics_writer(tmp_path, "--metrics.log_interval=1")
    for step in (1, 2):
        writer.before_data(step)
        writer.after_data(step)
        now += 1.0
        writer.after_step(step)
        writer.after_result(result_of(step))
        now += 5.0  # an evaluation
    assert caplog.messages[0].endswith("eta 1m39s")  # 99 steps of one second
    assert caplog.messages[1].endswith("eta 9m48s")  # 98 of six
