"""scripts/verify.py: exit codes, text and JSON."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from scripts.verify import main
from tests.support.launchers import TORCHRUN, start
from tests.support.pages import REPOSITORY
from tests.tools.verify.combinations import COMBINATIONS
from tests.tools.verify.defects import DEFECTS

OWN = '''
import torch
from torch import nn
from torch.nn import functional as F

from forge.model import FeedForward, Transformer


class HiddenNorm(nn.Module):
    def forward(self, x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)


class NormedFeedForward(FeedForward):
    def __init__(self, dim, hidden_dim):
        super().__init__(dim, hidden_dim)
        self.hidden_norm = HiddenNorm()

    def forward(self, x):
        return self.w2(self.hidden_norm(F.silu(self.w1(x)) * self.w3(x)))


class Model(Transformer):
    def __init__(self, config, seq_len, **part):
        super().__init__(config, seq_len, **part)
        for block in self.layers.values():
            block.feed_forward = NormedFeedForward(config.dim, config.ffn_dim)


class Broken(Transformer):
    def forward(self, *args):
        raise ValueError("a mistake of one's own")


class Short(Transformer):
    """Fails where it trains on a part of a sequence."""

    def forward(self, x, *args):
        if torch.is_grad_enabled() and x.shape[1] < self.seq_len:
            raise ValueError("no part of a sequence, please")
        return super().forward(x, *args)
'''
pytestmark = pytest.mark.processes

SMALL = ("--config", "debug", "--model.n_layers=2")


@dataclass
class Printed:
    code: int
    out: str
    err: str


@pytest.fixture
def run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> Callable[..., Printed]:
    """Run the script's `main` in this process, with a warm fork server, in a folder with a custom module."""
    (tmp_path / "mine.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))

    def run(*options: str) -> Printed:
        code = main([*SMALL, *options])
        return Printed(code, *capfd.readouterr())

    return run


def test_a_custom_model_with_a_defect_is_named_by_its_module(run) -> None:
    output = run("--model.kind=mine:Model", "--layouts", "dp_shard=2; tp=2")
    assert output.code == 1, output.out + output.err
    lines = [line.strip() for line in output.out.splitlines()]
    assert "layers.0.feed_forward.hidden_norm: its output differs while its input agrees" in lines
    assert "tp=2 alone shows the difference" in lines
    assert any("instead of" in line and "rank" in line for line in lines)
    assert "1 equal, 1 different" in output.out


def test_equal_layouts_end_with_0_and_json_has_everything(run) -> None:
    output = run("--layouts", "dp_shard=2", "--json")
    assert output.code == 0, output.err
    found = json.loads(output.out)
    assert (
        found["equal"]
        and found["compared"] == 1
        and [one["layout"] for one in found["layouts"]] == ["dp_shard=2"]
    )
    (one,) = found["layouts"]
    kinds = {
        "initial", "input", "output", "loss", "norm", "gradient", "parameter", "optimizer", "held-out", "generation",
        "saved", "loaded", "continued",
    }  # fmt: skip
    assert set(one["largest"]) == kinds and max(one["largest"].values()) < 1e-9
    assert one["not_compared"] == [] and one["loaded_from"] == "one process"
    assert one["equal"] and one["worst"] < 1e-9 and one["where"] is None


def test_a_named_layout_that_is_not_allowed_exits_2(run) -> None:
    output = run("--layouts", "one process; tp=3", "--json")
    assert output.code == 2 and "not every layout was compared: tp=3 is not allowed" in output.err
    found = json.loads(output.out)
    assert found["compared"] == 1 and not found["equal"] and found["not_allowed"][0]["layout"] == "tp=3"


def test_a_number_of_processes_that_is_no_power_of_2_is_compared(run) -> None:
    output = run("--world-sizes", "3", "--random", "0", "--json", "--model.n_layers=4")
    assert output.code == 0, output.err
    assert 3 in {one["processes"] for one in json.loads(output.out)["layouts"]}


def test_a_verification_without_a_comparison_exits_2(run) -> None:
    output = run("--layouts", "dp_shard=2", "--minutes", "0.0001", "--json")
    assert output.code == 2
    assert "no layout was compared: the time was too short for 1 of them; increase --minutes" in output.err
    found = json.loads(output.out)
    assert found["compared"] == 0 and not found["equal"]


@pytest.mark.slow
def test_a_failing_layout_is_reported_and_ends_no_other(run) -> None:
    output = run("--model.kind=mine:Short", "--layouts", "cp=2; dp_replicate=2")
    assert output.code == 1
    assert "no part of a sequence, please" in output.out and "1 equal, 1 failed" in output.out


@pytest.mark.slow
def test_rounding_stands_beside_the_mathematics(run) -> None:
    output = run("--precision.compute=bfloat16", "--precision", "--layouts", "dp_shard=2")
    assert output.code == 0, output.out + output.err
    (row,) = [
        line.split()
        for line in output.out.splitlines()
        if line.startswith("dp_shard=2") and "equal" not in line
    ]
    exact, rounded = [float(cell) for cell in row[1:5]], [float(cell) for cell in row[5:]]
    assert max(exact) < 1e-9 and all(1e-5 < size < 0.5 for size in rounded), row


@pytest.mark.slow
def test_the_layout_of_a_config_on_the_processes_of_a_launcher(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(OWN)

    def launch(*options: str) -> subprocess.Popen:
        script = [*TORCHRUN, "--nproc-per-node", "2", str(REPOSITORY / "scripts" / "verify.py")]
        return start([*script, *SMALL, "--in-place", *options], tmp_path, PYTHONPATH=str(tmp_path))

    hook = '--train.hooks=["tests.tools.verify.defects:Clock"]'
    good, bad = launch("--parallel.cp=2", hook), launch("--parallel.tp=2", "--model.kind=mine:Model")
    out, err = good.communicate(timeout=200)
    assert good.returncode == 0 and out.count("equal") == 2, out + err
    out, err = bad.communicate(timeout=200)
    assert bad.returncode == 1, out + err
    assert "layers.0.feed_forward.hidden_norm: its output differs while its input agrees" in out


@pytest.mark.slow
def test_a_checkout_verifies_itself_and_not_the_installed_forge(tmp_path: Path) -> None:
    for name in ("forge", "scripts", "configs"):
        shutil.copytree(REPOSITORY / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    file = tmp_path / "forge" / "parallel" / "step" / "gradients.py"
    code = file.read_text()
    assert code.count("norm = entries[0].sqrt()") == 1
    file.write_text(code.replace("norm = entries[0].sqrt()", "norm = 2 * entries[0].sqrt()"))
    command = [sys.executable, str(tmp_path / "scripts" / "verify.py"), *SMALL, "--layouts", "dp_shard=2"]
    (tmp_path / "elsewhere").mkdir()
    out, err = start(command, tmp_path / "elsewhere", PYTHONPATH="").communicate(timeout=200)
    assert "norm: all gradients agree, but not their global norm" in out, out + err


@pytest.mark.slow
def test_a_layout_on_the_processes_of_a_launcher_has_the_digests_of_a_small_run(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(OWN)
    script = str(REPOSITORY / "scripts" / "verify.py")

    def ended(*options: str, launcher: Sequence[str]) -> tuple[int, str]:
        process = start(
            [*launcher, script, *SMALL, "--digests", "own", *options], tmp_path, PYTHONPATH=str(tmp_path)
        )
        out, err = process.communicate(timeout=200)
        return process.returncode, out + err

    two = [*TORCHRUN, "--nproc-per-node", "2"]
    own = "--model.kind=mine:Model"
    code, out = ended(own, "--world-sizes=2", launcher=[sys.executable])
    assert code == 0 and "own: written" in out, out
    code, out = ended(own, "--in-place", "--parallel.cp=2", launcher=two)
    assert code == 0 and "1 equal" in out, out
    code, out = ended(own, "--in-place", "--parallel.tp=2", launcher=two)
    assert code == 1, out
    assert "layers.0.feed_forward.hidden_norm: its output differs while its input agrees" in out
    assert "step 1, digest of the output layers.0.feed_forward.hidden_norm" in out
    code, out = ended(own, "--in-place", "--run.seed=5", launcher=two)
    assert code != 0 and "run.seed is 0 in the file and 5 in this run" in out, (
        out
    )  # torchrun ends with its own code


def test_bad_input_ends_with_2(run) -> None:
    for options, message in (
        (["--layouts", "tq=2"], "tq=2 is not KEY=VALUE"),
        (["--layouts", "tp=0"], "tp=0: needs a whole number"),
        (["--layouts", "tp=3"], "must divide model.ffn_dim"),
        (["--model.dim=no"], "model.dim"),
        (["--model.kind=mine:Broken", "--layouts", "tp=2"], "a mistake of one's own"),
        (["--against", "nowhere", "--layouts", "dp_shard=2", "--steps=1"], "is not a checkout of forge"),
        (["--digests", "file"], "needs --world-sizes N"),
        (["--digests", "file", "--world-sizes=2", "--random=3"], "cannot be combined with --random"),
        (["--layouts", "tp=2", "--random=3"], "--layouts cannot be combined with --random"),
        (["--layouts", "tp=2", "--world-sizes=4"], "--layouts cannot be combined with --world-sizes"),
        (["--against", ".", "--random=3"], "--against cannot be combined with --random"),
        (["--in-place", "--random=3"], "--in-place cannot be combined with --random"),
        (
            ["--digests", "file", "--world-sizes=2", "--model.kind=mine:Broken"],
            "the run in one process fails: ValueError: a mistake of one's own",
        ),
        (["--steps=1", "--layouts", "tp=2"], "--steps 1: needs 2 or more"),
        (["--bound=1", "--layouts", "tp=2"], "--bound: only with --against or --in-place"),
        (["--train.hooks=['mine:Nothing']", "--layouts", "tp=2"], "mine has no class Nothing"),
    ):
        output = run(*options)
        assert output.code == 2 and message in output.err, output.err


def test_a_closed_pipe_is_no_success() -> None:
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "scripts/verify.py", "--config=debug", "--layouts=dp_shard=2"]
    try:
        done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, cwd=REPOSITORY)
    finally:
        os.close(write)
    assert done.returncode == 1 and "Traceback" not in done.stderr


def test_an_optimizer_without_a_module_is_refused(run, capfd) -> None:
    with pytest.raises(SystemExit, match="2"):
        run("--make-optimizer=mine:make")
    assert "--make-optimizer: only with --module" in capfd.readouterr().err


def test_the_page_lists_every_planted_defect() -> None:
    page = (REPOSITORY / "docs" / "reference" / "verify-defects.md").read_text("utf-8")
    missing = [defect.text for defect in DEFECTS + COMBINATIONS if f"| {defect.text} |" not in page]
    assert not missing
