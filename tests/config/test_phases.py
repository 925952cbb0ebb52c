"""A step's settings as a function of the tokens before it: phases, ramps, and the number of steps."""

from __future__ import annotations

from itertools import pairwise

import pytest

from forge.config import Config, Phases, check_world, load_config, parse_toml_text, to_toml
from forge.optim import planned_rate
from forge.runtime.errors import UserError

SMALL = [
    *("--config=debug", "--model.vocab_size=64", "--train.seq_len=64", "--train.global_batch_size=16"),
    "--data.sources=[{path='synthetic',weight=1.0},{path='synthetic',weight=3.0}]",
    *("--data.validation=[]", "--train.micro_batch_size=1", "--optimizer.lr=1e-3"),
]
RAMPED = (
    "--phase=[{until_tokens=3000,global_batch_size=4,seq_len=32},"
    "{until_tokens=10000,ramp='linear',global_batch_size=16,weights=[3.0,1.0],lr=3e-3,weight_decay=0.0}]"
)


def config_of(*options: str) -> Config:
    return load_config([*SMALL, *options])


def by_steps(phases: Phases, total: int) -> list[int]:
    """Return the tokens before each step until `total` is reached."""
    tokens = [0]
    while tokens[-1] < total:
        tokens.append(tokens[-1] + phases.at(tokens[-1]).tokens)
    return tokens


def test_steps_are_counted_through_phases_and_ramps() -> None:
    config = config_of(RAMPED, "--train.steps=20")
    phases = Phases(config)
    tokens = by_steps(phases, 20_000)
    for step, before in enumerate(tokens):
        assert phases.tokens_after(step) == before
        assert phases.steps_to(before) == step
        assert phases.tokens_after(len(tokens) - 1 - step, before) == tokens[-1]
        if step:
            for began in (None, tokens[step - 1]):
                assert phases.ended_at(step, before, began) == phases.at(tokens[step - 1])
    assert parse_toml_text(to_toml(config)) == config


def test_a_ramp_goes_from_the_values_before_it_to_its_own() -> None:
    phases = Phases(config_of(RAMPED, "--train.steps=20"))
    plans = [phases.at(tokens) for tokens in by_steps(phases, 20_000)]
    assert [plans[0].global_batch_size, plans[0].seq_len, plans[0].windows] == [4, 32, 2]
    ramp = [plan for plan in plans if plan.lr > 1e-3]
    assert {plan.global_batch_size for plan in ramp} == {4, 8, 12}
    assert all(a.lr < b.lr and a.weights[0] <= b.weights[0] for a, b in pairwise(ramp))
    assert all(a.optimizer.weight_decay > b.optimizer.weight_decay for a, b in pairwise(ramp))
    assert phases.at(9_999).lr == pytest.approx(3e-3, rel=1e-3)
    last = plans[-1]
    assert (last.global_batch_size, last.seq_len, last.lr, last.weights) == (16, 64, 1e-3, (1.0, 3.0))
    assert phases.at(10_000) is phases.at(10**12)


def test_a_ramp_of_the_batch_size_has_all_its_stages() -> None:
    """22 increments: 15 / 22 * 22 is below 15 in floating point."""
    phases = Phases(
        config_of(
            "--phase=[{until_tokens=22,global_batch_size=1},"
            "{until_tokens=2222,ramp='linear',global_batch_size=23}]",
            "--train.steps=9",
        )
    )
    sizes = [phases.at(22 + 100 * stage).global_batch_size for stage in range(22)]
    assert sizes == list(range(1, 23))


def test_without_phases_every_step_has_the_same_plan() -> None:
    config = config_of("--train.steps=7")
    phases = Phases(config)
    assert phases.at(0) is phases.at(10**12)
    assert phases.tokens_after(7) == 7 * 16 * 64
    for step in range(1, 8):
        by_step = planned_rate(config, phases, step, (step - 1) * 16 * 64)
        counted = config_of("--train.steps=7", "--schedule.unit=tokens")
        assert planned_rate(counted, phases, step, (step - 1) * 16 * 64) == pytest.approx(by_step, rel=1e-12)


def test_tokens_replace_steps() -> None:
    text = to_toml(config_of(RAMPED, "--train.steps=20"))
    tokens = text.replace("steps = 20\n", "").replace("tokens = 0\n", "tokens = 20000\n")
    assert tokens != text
    config = parse_toml_text(tokens)
    assert config.train.steps == len(by_steps(Phases(config), 20_000)) - 1
    assert parse_toml_text(to_toml(config)) == config
    with pytest.raises(UserError, match=r"train\.tokens = 20000 gives 51 steps"):
        parse_toml_text(tokens.replace("tokens = 20000", "tokens = 20000\nsteps = 3"))


def test_on_the_command_line_tokens_replace_the_steps_of_the_file_and_steps_its_tokens(tmp_path) -> None:
    debug = load_config(["--config=debug"]).train
    per_step = debug.global_batch_size * debug.seq_len
    assert load_config(["--config=debug", f"--train.tokens={7 * per_step}"]).train.steps == 7 != debug.steps
    by_tokens = tmp_path / "by_tokens.toml"
    text = to_toml(load_config(["--config=debug"]))
    by_tokens.write_text(
        text.replace(f"\nsteps = {debug.steps}\n", "\n").replace(
            "\ntokens = 0\n", f"\ntokens = {9 * per_step}\n"
        )
    )
    train = load_config(["--config", str(by_tokens)]).train
    assert (train.steps, train.tokens) == (9, 9 * per_step)
    replaced = load_config(["--config", str(by_tokens), "--train.steps=5"]).train
    assert (replaced.steps, replaced.tokens) == (5, 0)
    # 0 tokens means unset. If steps and tokens are both set, they must agree.
    assert load_config(["--config=debug", "--train.tokens=0"]).train.steps == debug.steps
    with pytest.raises(UserError, match=r"train\.tokens = .* gives 7 steps"):
        load_config(["--config=debug", "--train.steps=5", f"--train.tokens={7 * per_step}"])


@pytest.mark.parametrize(("rule", "factor"), [("none", 1.0), ("sqrt", 0.5), ("linear", 0.25)])
def test_the_learning_rate_follows_the_batch_by_rule(rule: str, factor: float) -> None:
    phases = Phases(config_of(RAMPED, "--train.steps=20", f"--schedule.lr_rule={rule}"))
    assert phases.at(0).lr == pytest.approx(1e-3 * factor)
    assert phases.at(50_000).lr == 1e-3


def test_a_schedule_of_tokens_warms_up_by_tokens() -> None:
    config = config_of(RAMPED, "--train.steps=40", "--schedule.unit=tokens", "--schedule.warmup_steps=2")
    phases = Phases(config)
    assert planned_rate(config, phases, 1, 0) == pytest.approx(1e-3 * 128 / 2048)
    assert planned_rate(config, phases, 17, 2048) == pytest.approx(1e-3)


@pytest.mark.parametrize(
    ("phases", "sentence"),
    [
        (
            "{until_tokens=0},{until_tokens=9}",
            "phase[0].until_tokens = 0 (command line): may be 0 in the last phase only",
        ),
        ("{until_tokens=9},{until_tokens=9}", "phase[1].until_tokens = 9 (command line): must be above 9"),
        ("{seq_len=48}", "phase[0].seq_len = 48 (command line): must divide train.seq_len = 64"),
        ("{seq_len=16,global_batch_size=6}", "has global_batch_size = 6, which must be a multiple of"),
        ("{weights=[1.0]}", "phase[0].weights = [1.0] (command line): has 1 weights for 2 data.sources"),
        (
            "{weights=[0.0,0.0]}",
            "phase[0].weights = [0.0, 0.0] (command line): has no weight above 0; set at least one",
        ),
        ("{weights=[1.0,1e-7]}", "gives a source a share of 1.0e-07"),
        (
            "{until_tokens=9,weights=[1.0,0.0]},{until_tokens=99,weights=[1.0,1e-5],ramp='linear'}",
            "phase[1].weights = [1.0, 1e-05] (command line): gives a source a share of 6.2e-07, perhaps during the ramp",
        ),
        ("{ramp='linear',lr=1.0}", 'phase[0].ramp = "linear" (command line): needs until_tokens'),
        (
            "{sliding_window=8}",
            "phase[0].sliding_window = 8 (command line): needs a layer with a sliding window",
        ),
        ("{momentum=0.5}", "phase[0].momentum = 0.5 (command line): is a key of Muon"),
        (
            "{ema=0.5}",
            "phase[0].ema = 0.5 (command line): needs a run that keeps a mean of the weights; set optimizer.ema, too",
        ),
        ("{until_token=8}", "did you mean phase[0].until_tokens"),
        ("{until_tokens=-8}", "phase[0].until_tokens = -8 (command line): allowed: integer >= 0"),
    ],
)
def test_a_wrong_phase_is_explained(phases: str, sentence: str) -> None:
    with pytest.raises(UserError) as error:
        config_of("--train.steps=20", f"--phase=[{phases}]")
    assert sentence in str(error.value)


def test_every_size_of_a_ramp_must_fit_the_schedule() -> None:
    ramp = "--phase=[{until_tokens=3000,global_batch_size=24,ramp='linear'}]"
    options = ["--train.global_batch_size=6", "--model.n_layers=8", "--parallel.pp=4"]
    check_world(config_of("--train.steps=20", ramp, *options), 4)
    rounds = config_of("--train.steps=20", ramp, *options, "--pipeline.schedule=Interleaved1F1B")
    with pytest.raises(
        UserError, match=r"18 microbatches per step do not divide into .* rounds.*\(in phase 1\)"
    ):
        check_world(rounds, 4)


def test_a_schedule_from_a_file_has_one_number_of_microbatches() -> None:
    options = ["--train.steps=20", "--parallel.pp=2", "--pipeline.schedule=a.csv"]
    larger = "until_tokens=3000,global_batch_size=32,micro_batch_size=2"
    config_of(*options, f"--phase=[{{{larger}}}]")
    config_of(*options, "--phase=[{until_tokens=3000,ramp='linear',global_batch_size=16}]")
    for keys, key in (
        ("global_batch_size=32", "global_batch_size = 32"),
        (f"{larger},ramp='linear'", 'ramp = "linear"'),
    ):
        with pytest.raises(UserError) as error:
            config_of(*options, f"--phase=[{{{keys}}}]")
        assert f"phase[0].{key} (command line): changes the number of microbatches" in str(error.value)


def test_every_size_of_a_ramp_must_fit_the_layout() -> None:
    """A divisor of both ends divides all batch sizes between them, so the messages name the ends only."""
    config = config_of("--train.steps=20", "--phase=[{until_tokens=3000,global_batch_size=6,ramp='linear'}]")
    check_world(config, 2)
    with pytest.raises(UserError, match=r"train\.global_batch_size = 6: must be a multiple.*\(in phase 1\)"):
        check_world(config, 4)


def test_the_increment_of_a_ramp_is_not_a_batch_size() -> None:
    ramp = "--phase=[{until_tokens=100000,ramp='linear',global_batch_size=8}]"
    options = ["--train.steps=20", "--train.global_batch_size=6", "--model.n_layers=4", "--parallel.pp=4"]
    config = config_of(*options, ramp)
    assert [sizes[0] for number, sizes in Phases(config).sizes() if number == 1] == [6, 8]
    check_world(config, 4)
    with pytest.raises(UserError, match=r"a step has 2;.*\(in phase 1\)"):
        check_world(config_of(*options, ramp.replace("=8", "=2")), 4)
