from itertools import pairwise

import pytest

from forge.config.schema import ScheduleConfig
from forge.optim.schedule import learning_rate, warmup_steps

LR = 3e-3
SHAPES = ["linear", "cosine", "sqrt"]


def rates(steps=100, **fields):
    """Return the learning rates of steps 1 to `steps`, relative to the peak."""
    schedule = ScheduleConfig(**({"warmup_steps": 0} | fields))
    return [learning_rate(schedule, lr=LR, step=step, steps=steps) / LR for step in range(1, steps + 1)]


@pytest.mark.parametrize("name", ["wsd", "cosine", "linear", "constant"])
def test_warmup_is_linear_from_a_first_step_above_zero_to_the_peak(name):
    assert rates(name=name, warmup_steps=10)[:10] == pytest.approx([step / 10 for step in range(1, 11)])


@pytest.mark.parametrize("name", ["wsd", "cosine", "linear", "constant"])
def test_without_warmup_the_first_step_is_at_or_next_to_the_peak(name):
    assert 0.98 < rates(name=name)[0] <= 1.0


def test_constant_stays():
    assert rates(name="constant") == [1.0] * 100


@pytest.mark.parametrize("shape", SHAPES)
def test_wsd_is_flat_until_the_last_share_of_the_steps(shape):
    values = rates(warmup_steps=10, decay_shape=shape, decay_fraction=0.3)
    assert values[9:70] == [1.0] * 61
    assert values[70] < 1.0


@pytest.mark.parametrize(
    "fields", [{"decay_shape": shape} for shape in SHAPES] + [{"name": "cosine"}, {"name": "linear"}]
)
@pytest.mark.parametrize("low", [0.0, 0.1, 1.0])
def test_the_last_step_has_the_lowest_rate(fields, low):
    assert rates(min_lr_ratio=low, warmup_steps=10, **fields)[-1] == pytest.approx(low, abs=1e-15)


def test_half_way_down_the_shapes_have_their_known_values():
    middle = {shape: rates(decay_shape=shape, decay_fraction=0.2, min_lr_ratio=0.0)[89] for shape in SHAPES}
    assert middle == pytest.approx({"linear": 0.5, "cosine": 0.5, "sqrt": 1 - 0.5**0.5})
    assert rates(name="cosine", min_lr_ratio=0.0)[49] == pytest.approx(0.5)
    assert rates(name="linear", min_lr_ratio=0.2, warmup_steps=20)[59] == pytest.approx(0.6)


@pytest.mark.parametrize(
    "fields", [{"decay_shape": shape} for shape in SHAPES] + [{"name": "cosine"}, {"name": "linear"}]
)
def test_the_decay_never_rises_and_has_no_jump(fields):
    values = rates(steps=1000, warmup_steps=100, decay_fraction=0.5, **fields)[99:]
    drops = [before - after for before, after in pairwise(values)]
    assert min(drops) >= 0.0
    # 1 - sqrt(p) has an infinite slope at p = 0: the first of n steps drops by 1 / sqrt(n).
    assert max(drops) < (0.05 if fields.get("decay_shape") == "sqrt" else 0.004)


def test_decay_fraction_zero_never_decays():
    assert rates(decay_fraction=0.0, warmup_steps=10)[9:] == [1.0] * 91


def test_decay_fraction_one_decays_from_the_end_of_the_warmup():
    assert rates(decay_fraction=1.0, warmup_steps=10) == rates(name="linear", warmup_steps=10)


@pytest.mark.parametrize("name", ["wsd", "cosine", "linear", "constant"])
def test_a_run_of_warmup_only_ends_at_the_peak(name):
    assert rates(steps=10, name=name, warmup_steps=10)[-1] == 1.0
    assert rates(steps=1, name=name, warmup_steps=1) == [1.0]
    assert rates(steps=5, name=name, warmup_steps=10)[-1] == 0.5


def test_a_run_of_one_step_without_warmup_has_a_rate():
    assert rates(steps=1, name="constant") == [1.0]
    assert rates(steps=1, name="linear") == pytest.approx([0.1])


@pytest.mark.parametrize(
    ("name", "last"), [("wsd", 0.1), ("cosine", 0.1), ("linear", 0.1), ("constant", 1.0)]
)
def test_beyond_the_last_step_the_rate_stays(name, last):
    assert learning_rate(ScheduleConfig(name=name), lr=LR, step=150, steps=100) == pytest.approx(last * LR)


def test_extending_a_wsd_run_changes_no_rate_before_the_former_decay():
    schedule = ScheduleConfig(warmup_steps=10)
    for step in range(1, 81):
        short, long = (learning_rate(schedule, lr=LR, step=step, steps=steps) for steps in (100, 200))
        assert short == long


@pytest.mark.parametrize(("steps", "warmup"), [(50, 0), (1000, 10), (200_000, 2000), (1_000_000, 2000)])
def test_the_default_warmup_is_one_step_in_a_hundred(steps: int, warmup: int) -> None:
    assert warmup_steps(ScheduleConfig(), steps) == warmup
    assert warmup_steps(ScheduleConfig(warmup_steps=0), steps) == 0
    rate = learning_rate(ScheduleConfig(), lr=LR, step=1, steps=steps)
    assert rate == pytest.approx(LR / max(warmup, 1))
