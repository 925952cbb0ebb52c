"""User hooks: the order of calls, allowed requests, saved state and errors."""

import json
import os
import re
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from forge.checkpoint import read_state
from forge.config import Phases, parse_toml_text
from forge.hook import EVENTS, Hook, Hooks, StepResult
from forge.observe.report import RunPhases
from forge.run.hooks import StopBeforeTimeLimit, load_hooks
from forge.runtime.errors import UserError
from forge.train.trainer import Trainer
from tests.support.configs import tiny
from tests.support.equivalence import tiny_config
from tests.support.pages import REPOSITORY, blocks
from tests.support.runs import FLOAT64, Run

PAGE = REPOSITORY / "docs" / "internals" / "extending" / "hook.md"
HERE = "tests.run.test_hooks"


def hooks(*names: str) -> str:
    paths = ", ".join(f'"{name if ":" in name else f"{HERE}:{name}"}"' for name in names)
    return f"--train.hooks=[{paths}]"


class Recording(Hook):
    """Record every call on rank 1. A hook called only on rank 0 would leave no record."""

    def __init__(self, trainer: Trainer) -> None:
        self._write = trainer.reporter.world.rank == 1
        self._path = trainer.reporter.directory.root / "calls.txt"

    def record(self, event: str, *arguments: object) -> None:
        if self._write:
            step = next((at.step if isinstance(at, StepResult) else at for at in arguments), "")
            with open(self._path, "a") as file:
                file.write(f"{event} {step}".rstrip() + "\n")


for _event in EVENTS:
    setattr(Recording, _event, lambda self, *arguments, event=_event: self.record(event, *arguments))


class Failing(Hook):
    def __init__(self, trainer: Trainer) -> None:
        self._rank = trainer.reporter.world.rank

    def after_gradients(self, step: int) -> None:
        if step == 3 and self._rank == 1:
            raise ValueError("three is too many")


class Stopping(Hook):
    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def after_step(self, step: int) -> None:
        if step == 3 and self._trainer.reporter.world.rank == 1:
            self._trainer.request_stop("rank 1 has seen enough")


class Saving(Hook):
    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def after_result(self, result: StepResult) -> None:
        """On rank 1, request a save after the gradients of step 4 are reported."""
        if result.step == 3 and self._trainer.reporter.world.rank == 1:
            self._trainer.request_save()


class Remembering(Hook):
    """Keep losses and a counter as state, and write both at the end of the run."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer, self.losses, self.began = trainer, [], []

    def before_run(self, step: int) -> None:
        self.began.append([step, len(self.losses)])

    def after_rollback(self, step: int) -> None:
        self.began.append([step, len(self.losses)])

    def after_result(self, result: StepResult) -> None:
        self.losses.append(result.loss)

    def after_run(self) -> None:
        if self.trainer.reporter.world.rank == 0:
            state = {"losses": self.losses, "began": self.began}
            (self.trainer.reporter.directory.root / "remembered.json").write_text(json.dumps(state))

    def state_dict(self) -> dict:
        return {"losses": list(self.losses), "began": list(self.began)}

    def load_state_dict(self, state: dict) -> None:
        self.losses, self.began = state["losses"], state["began"]


class NotJson(Hook):
    def __init__(self, trainer: Trainer) -> None: ...

    def state_dict(self) -> dict:
        return {"set": {1, 2}}


class OwnGroup(Hook):
    """Make a process group, and write its timeout in seconds before the first step."""

    def __init__(self, trainer: Trainer) -> None:
        self._path = trainer.reporter.directory.root / "timeout.txt"

    def before_run(self, step: int) -> None:
        self._group = dist.new_group(backend="gloo")

    def before_step(self, step: int) -> None:
        backend: Any = self._group._get_backend(torch.device("cpu"))
        self._path.write_text(str(backend.options._timeout.total_seconds()))


class NoHook:
    pass


def calls(run: Run) -> list[str]:
    return (run.path / "calls.txt").read_text().splitlines()


def test_the_calls_of_a_run_come_in_the_order_of_the_page(tmp_path) -> None:
    """A step's result arrives before the next step's update, or earlier if an evaluation waits for it."""
    validation = '--data.validation=[{path="synthetic",name="held"}]'
    run = Run(tmp_path, hooks("Recording"), "--train.steps=2", "--checkpoint.interval=0", validation)
    assert run("--evaluate.interval=2", "--evaluate.sequences=2", world=2) == 0
    begin = ("before_step", "before_data", "after_data", "before_gradients")
    update = ("after_gradients", "before_optimizer", "after_optimizer")
    assert calls(run) == [
        "before_run 0",
        *(f"{event} 1" for event in (*begin, *update, "after_step")),
        *(f"{event} 2" for event in begin),
        "after_result 1",
        *(f"{event} 2" for event in (*update, "after_result", "after_evaluation", "after_step")),
        "before_save 2",
        "after_save 2",
        "after_run",
    ]
    documented = re.findall(r"`((?:before|after)_\w+)\(", PAGE.read_text())
    assert set(documented) == set(EVENTS)


def test_a_hook_is_told_of_a_rollback(tmp_path) -> None:
    run = Run(tmp_path, hooks("Recording"), "--resilience.max_skipped_steps=3")
    patch = "tests.support.spoil:samples_32_to_55"
    assert run.start(world=2, patch=patch).join() == [0, 0]
    recorded = calls(run)
    at = recorded.index("after_rollback 4")
    assert "after_result 7" in recorded[:at] and recorded[at + 1] == "before_step 5"


def test_the_state_of_a_hook_is_saved_and_restored_after_a_kill_and_under_other_layouts(tmp_path) -> None:
    names = hooks("Remembering", "Remembering")
    run = Run(tmp_path / "killed", names, *FLOAT64)
    assert set(run.start(world=2, fault="step:6:*:kill").join()) == {-signal.SIGKILL}
    assert run("--parallel.tp=2", world=2, fault="step:7:*:signal") == 75, run.output()
    assert run() == 0, run.output()
    found = json.loads((run.path / "remembered.json").read_text())
    assert found["losses"] == pytest.approx(run.losses(), rel=0, abs=0) and len(found["losses"]) == 10
    # Each start restored the state of its checkpoint, with one loss per step.
    starts = [step for step, _ in found["began"]]
    assert [count for _, count in found["began"]] == starts and 0 == starts[0] < starts[1] < starts[2]
    saved = read_state(run.path / "checkpoints" / "step-00000010")["hooks"]
    assert list(saved) == [f"{HERE}:Remembering", f"{HERE}:Remembering (2)"]
    assert saved[f"{HERE}:Remembering"]["losses"] == found["losses"]


def test_the_state_of_a_hook_goes_back_with_a_rollback(tmp_path) -> None:
    run = Run(tmp_path, hooks("Remembering"), "--resilience.max_skipped_steps=3")
    assert run.start(world=2, patch="tests.support.spoil:samples_32_to_55").join() == [0, 0]
    found = json.loads((run.path / "remembered.json").read_text())
    assert found["began"] == [[0, 0], [4, 4]] and len(found["losses"]) == 10


def test_a_rollback_to_a_checkpoint_without_a_hooks_state_says_that_the_hook_keeps_its_own(caplog) -> None:
    hook = Remembering(None)  # type: ignore[arg-type]
    hook.name, hook.losses = "mine:Hook", [1.5]
    Hooks([hook]).load_state({}, rolls_back=True)
    assert hook.losses == [1.5]
    assert caplog.messages == [
        "the checkpoint has no state of hook mine:Hook: the hook keeps its present state"
    ]


def test_a_hook_without_a_saved_state_starts_afresh_and_a_removed_hook_is_named(tmp_path) -> None:
    run = Run(tmp_path)
    assert run("--train.steps=4") == 0
    assert run(hooks("Remembering"), "--train.steps=6") == 0
    assert f"no state of hook {HERE}:Remembering: the hook starts from its initial state" in run.output()
    assert json.loads((run.path / "remembered.json").read_text())["began"] == [[4, 0]]
    assert run("--train.hooks=[]", "--train.steps=8") == 0
    assert f"state of hook {HERE}:Remembering is ignored" in run.output()


def test_a_non_json_state_ends_the_run_with_the_hooks_name(tmp_path) -> None:
    run = Run(tmp_path, hooks("NotJson"))
    assert run() == 1
    assert f"hook {HERE}:NotJson: state_dict returned a value that is not JSON" in run.status()["reason"]


@pytest.mark.parametrize("interval", ["0", pytest.param("100", marks=pytest.mark.slow)])
def test_a_hooks_request_for_a_checkpoint_on_one_rank_causes_one_save(tmp_path, interval: str) -> None:
    run = Run(tmp_path, hooks("Saving"), "--train.steps=10", f"--checkpoint.interval={interval}")
    assert run(world=2) == 0, run.output()
    assert run.checkpoints() == ["step-00000006", "step-00000010"]


def test_the_group_of_a_hook_waits_as_long_as_the_longest_phase(tmp_path) -> None:
    run = Run(tmp_path, hooks("OwnGroup"), "--train.steps=1", "--resilience.evaluate_timeout_s=7200")
    assert run() == 0, run.output()
    assert float((run.path / "timeout.txt").read_text()) > 7200


def test_an_empty_hook_is_never_called() -> None:
    assert not any(Hooks([Hook()])._overriding.values())


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("no_such_module:Class", "no_such_module cannot be imported"),
        (f"{HERE}:Recordin", 'no class Recordin; did you mean "Recording"?'),
        (f"{HERE}:NoHook", "is not a hook; needed: a subclass of forge.hook.Hook"),
        ("no colon", "an import path package.module:Name"),
    ],
)
def test_a_wrong_path_is_one_sentence_before_anything_is_written(tmp_path, path: str, message: str) -> None:
    run = Run(tmp_path, hooks(path) if ":" in path else f'--train.hooks=["{path}"]')
    assert run() == 2
    assert message in run.output() and "train.hooks" in run.output() and "Traceback" not in run.output()
    assert not run.path.exists()


def test_a_raising_hook_ends_the_run_with_its_name(tmp_path) -> None:
    run = Run(tmp_path, hooks("Recording", "Failing"))
    assert run.start(world=2).join() == [1, 1]
    assert (
        f"hook {HERE}:Failing failed in after_gradients: ValueError: three is too many"
        in run.status()["reason"]
    )
    assert calls(run)[-2:] == ["after_gradients 3", "after_run"]


def test_a_hook_of_any_rank_can_end_the_run(tmp_path) -> None:
    run = Run(tmp_path, hooks("Stopping"))
    assert run(world=2) == 75
    assert run.status()["state"] == "stopped" and run.checkpoints()[-1] == "step-00000004"
    assert run.status()["final"]  # job scripts do not start the run again


def put_examples_on_the_path() -> None:
    sys.path.insert(0, str(Path(os.environ["RUN_UNDER_TEST"]).parent / "examples"))


def test_the_examples_of_the_page_write_their_numbers(tmp_path) -> None:
    names = re.findall(r"\*\*(\w+)\.py\*\*", PAGE.read_text())
    sources = [block.text for block in blocks(PAGE) if block.language == "python"]
    (tmp_path / "examples").mkdir()
    for name, source in zip(names, sources, strict=True):
        (tmp_path / "examples" / f"{name}.py").write_text(source)
    run = Run(
        tmp_path,
        hooks("smoothed_loss:SmoothedLoss", "embedding_norm:EmbeddingNorm"),
        "--metrics.tensorboard=true",
    )
    assert run.start(world=2, patch=f"{HERE}:put_examples_on_the_path").join() == [0, 0]
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    curves = EventAccumulator(str(run.path / "tensorboard"))
    curves.Reload()
    smoothed, lines = curves.Scalars("my/smoothed_loss"), (run.path / "smoothed_loss.txt").read_text().split()
    assert [point.step for point in smoothed] == list(range(1, 11)) == [int(step) for step in lines[::2]]
    assert smoothed[0].value == pytest.approx(run.losses()[0])
    norms = curves.Scalars("my/embedding_norm")
    assert [point.step for point in norms] == list(range(1, 10))
    for point, line in zip(norms, run.metrics(), strict=False):
        assert 0 < point.value < line["grad_norm"]


class Expecting:
    """A time limit that is never near. It records what each step expects of the next one."""

    evaluations_s = 0.0

    def __init__(self, *_: float) -> None:
        self.expected: list[tuple[float, bool]] = []

    def enter(self, phase: str, step: int) -> None:
        pass

    def expect(self, growth: float, compiles: bool) -> None:
        self.expected.append((growth, compiles))

    def near(self, save_s: float) -> bool:
        return False


def test_the_time_limit_knows_the_settings_of_the_next_step(monkeypatch) -> None:
    """The second phase has longer sequences, and the third one a larger batch."""
    monkeypatch.setattr("forge.run.hooks.TimeLimit", Expecting)
    monkeypatch.setattr("forge.run.hooks._slowest_evaluation_s", lambda trainer: 0.0)
    config = parse_toml_text(
        tiny_config() + "[[phase]]\nuntil_tokens = 640\nseq_len = 40\n[[phase]]\nuntil_tokens = 1920\n"
        "[[phase]]\nglobal_batch_size = 12\n"
    )
    reporter = SimpleNamespace(phases=RunPhases(), world=SimpleNamespace(first_process=os.getpid()))
    trainer = SimpleNamespace(config=config, phases=Phases(config), reporter=reporter)
    hook = StopBeforeTimeLimit(trainer, SimpleNamespace(slowest_s=0.0), 100.0)  # type: ignore[arg-type]
    for step, tokens in enumerate((0, 320, 640, 1280, 1920), 1):
        trainer.plan, trainer.progress = trainer.phases.at(tokens), SimpleNamespace(tokens=tokens)
        hook.after_data(step)
    assert hook._limit.expected == [
        (1.0, False),
        (2.0, True),
        (1.0, False),
        (1.5, False),
        (1.0, False),
    ]


@pytest.mark.parametrize(
    ("package", "message"),
    [
        (None, "evaluate.tasks: needs the package lm-eval"),
        ("there", "evaluate.tasks_path = absent: is not a folder"),
    ],
)
def test_tasks_without_their_package_or_folder_are_refused_at_the_start(
    package, message, monkeypatch
) -> None:
    monkeypatch.setattr("forge.run.hooks.find_spec", lambda name: package)
    evaluate = tiny().evaluate.model_copy(update={"tasks": ("arc",), "tasks_path": "absent"})
    with pytest.raises(UserError, match=message):
        load_hooks(tiny().model_copy(update={"evaluate": evaluate}))
