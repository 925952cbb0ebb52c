"""An optimizer given by import path trains, resumes and changes its layout. A faulty one is refused."""

import pytest
import torch

from forge.checkpoint import read_config, read_state
from forge.checkpoint.folders import step_name
from forge.config import help_text, load_config, parse_toml_text, to_toml
from forge.config.keys import keys, literals
from forge.config.section import Positive, Section, Share
from forge.optim.optimizer import SHIPPED, gradient, weight_decay, wide_dtype, write_unless
from forge.runtime.errors import BAD_CONFIG, UserError
from forge.runtime.imports import load_class
from forge.tools.inference.open import open_checkpoint
from tests.support.runs import Run, assert_same_history

HERE = "tests.optim.test_own_optimizer"
FLOAT64 = ["--precision.storage=float64", "--precision.compute=float64", "--precision.reduce=float64"]
SGD = [f"--optimizer.name={HERE}:Momentum", "--optimizer.lr=0.1"]


class Momentum:
    """SGD with momentum. Its section is not named after the class."""

    class Keys(Section):
        """Keys of the momentum."""

        momentum: Share = 0.9
        """Share of the last direction that is kept."""
        nesterov: bool = False
        """Look ahead."""

    section = "sgd"

    def __init__(self, shards, config, group):
        self._keys, self._shards = config.table(self.Keys), shards
        self._decay = {shard.name: weight_decay(shard.name, config) for shard in shards}
        self._momentum = {s.name: torch.zeros_like(s.data, dtype=wide_dtype(s)) for s in shards}
        self._updates = torch.zeros((), dtype=torch.float64)

    def step(self, lr, skip):
        for shard in self._shards:
            momentum = self._momentum[shard.name]
            weight = shard.data.to(momentum.dtype)
            direction = self._keys.momentum * momentum + gradient(shard)
            update = gradient(shard) + self._keys.momentum * direction if self._keys.nesterov else direction
            write_unless(skip, shard.data, weight - lr * (update + self._decay[shard.name] * weight))
            write_unless(skip, momentum, direction)
        write_unless(skip, self._updates, self._updates + 1)

    def tensors(self):
        for shard in self._shards:
            yield "momentum", shard, self._momentum[shard.name]

    def state(self):
        return {"updates": int(self._updates)}

    def load_state(self, state):
        self._updates.fill_(state["updates"])


class Required(Momentum):
    """An optimizer with a required key."""

    class Keys(Section):
        """Keys."""

        rank: Positive
        """A number."""

    section = "required"


class Unfinished:
    def __init__(self, shards, config, group): ...

    def step(self, lr, skip): ...


class OtherArguments(Momentum):
    def __init__(self, parameters): ...


class LikeAKey(Momentum):
    section = "lr"


def test_it_trains_on_one_process_and_on_two_with_equal_losses_and_resumes_bit_for_bit(tmp_path) -> None:
    options = [*FLOAT64, *SGD, "--optimizer.sgd.nesterov=true"]
    alone, two, zero1, halves = (
        Run(tmp_path / name, *options) for name in ("alone", "two", "zero1", "halves")
    )
    assert alone() == two(world=2) == 0
    assert zero1("--parallel.data_parallel=zero1", world=2) == 0
    for other in (two, zero1):
        for a, b in zip(alone.metrics(), other.metrics(), strict=True):
            assert a["loss"] == pytest.approx(b["loss"], rel=0, abs=1e-9)
    assert alone.metrics()[-1]["loss"] < alone.metrics()[0]["loss"]
    assert halves(fault="step:5:*:signal") == 75
    assert halves() == 0
    assert_same_history(halves, alone)
    last = alone.path / "checkpoints" / step_name(10)
    assert read_state(last)["optimizer"] == {"updates": 10}
    assert "[optimizer.sgd]\nmomentum = 0.9\nnesterov = true" in read_config(last)
    # Reading the checkpoint imports no code, in this process and in one that cannot import this module.
    assert open_checkpoint(last, torch.device("cpu")).config.optimizer.name.endswith(":Momentum")


def test_its_printed_keys_load_again_with_or_without_its_class(tmp_path) -> None:
    config = load_config(["--config=debug", *SGD, "--optimizer.sgd.momentum=0.5"])
    text = to_toml(config)
    assert parse_toml_text(text) == config
    assert config.optimizer.table(Momentum.Keys).momentum == 0.5
    without = text.replace(HERE, "no.such.module")
    read = parse_toml_text(without, stored=True, import_classes=False)
    assert to_toml(read) == without.replace("# Keys of the momentum.\n", "")
    with pytest.raises(UserError, match=r"no\.such\.module cannot be imported"):
        parse_toml_text(without)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            ["--optimizer.name=adamv"],
            'allowed: adamw, lion, muon, or an import path package.module:Name; did you mean "adamw"',
        ),
        (["--optimizer.name=no.such:Thing"], "no.such cannot be imported"),
        ([f"--optimizer.name={HERE}:Momentun"], 'has no class Momentun; did you mean "Momentum"?'),
        (
            [f"--optimizer.name={HERE}:Unfinished"],
            "Unfinished has no method tensors(), state(), load_state()",
        ),
        ([f"--optimizer.name={HERE}:OtherArguments"], "OtherArguments(shards, config, group) fails"),
        ([f"--optimizer.name={HERE}:LikeAKey"], "set LikeAKey.section to another name"),
        ([f"--optimizer.name={HERE}:Required"], "[optimizer.required]: missing from"),
        ([*SGD, "--optimizer.sgd.momentun=0.5"], "did you mean optimizer.sgd.momentum?"),
        ([*SGD, "--optimizer.sgd.momentum=1.5"], "allowed: number >= 0 and <= 1"),
        ([*SGD, "--optimizer.other.x=1"], "no such section in [optimizer]"),
    ],
)
def test_its_errors_are_reported_together_with_all_others(options, expected: str) -> None:
    with pytest.raises(UserError) as caught:
        load_config(["--config=debug", *options, "--train.steps=0", "--train.z_loss=1"])
    assert expected in str(caught.value) and caught.value.exit_code == BAD_CONFIG
    assert "train.steps" in str(caught.value) and "train.z_loss_coef" in str(caught.value)


def test_the_help_and_the_keys_of_other_runs_are_unchanged() -> None:
    before = help_text()
    load_config(["--config=debug", *SGD])
    assert help_text() == before and not any("sgd" in key for key in keys())
    assert "--optimizer.name  adamw, lion, muon, or an import path package.module:Name; default" in before


def test_every_name_in_the_schema_has_a_class() -> None:
    assert tuple(literals(keys()["optimizer.name"].annotation)) == tuple(SHIPPED)
    assert [load_class(path).__name__ for path in SHIPPED.values()] == ["AdamW", "Lion", "Muon"]
