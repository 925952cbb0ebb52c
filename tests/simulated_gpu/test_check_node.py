"""check_node.py rejects every result of simulated GPUs, because they compute nothing."""

from __future__ import annotations

import json
from pathlib import Path

from forge.runtime.errors import FAILED
from tests.simulated_gpu.needed import simulated_gpu
from tests.support.harness import start_ranks
from tests.support.runs import reserve_port
from tests.support.scripts import run_script
from tests.support.trained import ROOT

pytestmark = simulated_gpu


def test_gpus_without_computation_fail_every_check(tmp_path: Path) -> None:
    out, err = tmp_path / "out.txt", tmp_path / "err.txt"
    port, meeting = reserve_port()
    words = [str(ROOT / "scripts" / "check_node.py"), "--json", "--gpus=4"]
    ranks = start_ranks(run_script, 4, words, tmp_path, meeting, out, err)
    ranks.port = port
    assert ranks.join() == [FAILED] * 4, err.read_text()[-4000:]
    report = json.loads(out.read_text())
    assert [device["name"] for device in report["devices"]] == ["NVIDIA H200"] * 4
    assert len(report["checks"]) == 7 and {check["status"] for check in report["checks"]} == {"wrong"}
    assert all(check["planned"] > 0 for check in report["checks"])
    assert len(report["problems"]) == 4 * 7
