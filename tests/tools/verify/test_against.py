"""Two checkouts of forge on one layout."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import torch

from forge.runtime.errors import UserError
from forge.tools.verify import ranks
from forge.tools.verify.against import compare_records, require_checkout
from forge.tools.verify.pieces import TensorKey, whole
from forge.tools.verify.record import RankRecord, RankStep
from scripts.verify import main
from tests.support.pages import REPOSITORY


@pytest.mark.slow
@pytest.mark.processes
def test_a_changed_module_is_named_and_equal_checkouts_have_no_difference(
    tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    ignored = shutil.ignore_patterns("__pycache__", "verify")
    shutil.copytree(REPOSITORY / "forge", tmp_path / "forge", ignore=ignored)
    (tmp_path / "forge" / "tools" / "verify").mkdir()  # both sides record with this checkout's verify
    options = ["--config", "debug", "--model.n_layers=2", "--steps", "2", "--layouts", "dp_shard=2"]
    options += ["--against", str(tmp_path)]
    assert main([*options, '--train.hooks=["tests.tools.verify.defects:Clock"]']) == 0
    assert "1 layout, 1 equal" in capfd.readouterr().out

    file = tmp_path / "forge" / "model" / "norm.py"
    code = file.read_text()
    assert code.count("self.weight, self.eps)") == 1
    file.write_text(code.replace("self.weight, self.eps)", "self.weight, 1.001 * self.eps)"))
    assert main(options) == 1
    output = capfd.readouterr().out
    assert "layers.0.attention_norm: its output differs while its input agrees" in output
    assert re.search(r"step 1, rank \d, output layers\.0\.attention_norm\[", output)
    assert main([*options, "--bound", "0.1"]) == 0

    file.write_text(code.replace("self.weight, self.eps)", "self.weight, self.epsilon)"))
    assert main(options) == 2
    assert "the forge of that checkout fails on this configuration: " in capfd.readouterr().err


@pytest.mark.slow
@pytest.mark.processes
def test_hanging_ranks_of_the_other_checkout_are_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    shutil.copytree(REPOSITORY / "forge", tmp_path / "forge", ignore=shutil.ignore_patterns("__pycache__"))
    file, pids = tmp_path / "forge" / "model" / "norm.py", tmp_path / "pids"
    code = file.read_text()
    line = "        return self.normalize(x, "
    assert code.count(line) == 1
    hang = f"        __import__('os').system('echo $PPID >> {pids}'); __import__('time').sleep(600)\n"
    file.write_text(code.replace(line, hang + line))
    monkeypatch.setattr(ranks, "LIMIT_S", 10.0)
    options = ["--config", "debug", "--model.n_layers=2", "--steps", "1", "--layouts", "dp_shard=2"]
    assert main([*options, "--against", str(tmp_path)]) == 2
    assert (
        "the forge of that checkout fails on this configuration: rank 1: no result within 20 s"
        in capfd.readouterr().err
    )
    ended = [Path(f"/proc/{pid}") for pid in pids.read_text().split()]
    assert len(ended) == 2 and not any(path.exists() for path in ended)


def test_a_tensor_of_one_checkout_is_named_unless_it_must_exist() -> None:
    def recorded(*keys: TensorKey) -> list[RankRecord]:
        return [RankRecord([RankStep({key: [whole(torch.ones(2))] for key in keys})])]

    weight, state = ("parameter", "weight"), ("optimizer", "weight/moment")
    result, _ = compare_records(recorded(weight, state), recorded(weight), 0.0)
    assert result.compared == 1 and result.unplaced == {"optimizer weight/moment"}
    with pytest.raises(UserError, match=r"the parameter weight has shape None in that checkout, but \(2,\)"):
        compare_records(recorded(weight, state), recorded(state), 0.0)


def test_a_folder_without_forge_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not a checkout of forge"):
        require_checkout(tmp_path)
