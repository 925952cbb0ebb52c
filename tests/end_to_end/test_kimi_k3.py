"""k3_debug on eight ranks, killed and moved to expert parallelism, has the one-process loss curve on real text."""

from pathlib import Path

import numpy as np
import pytest

from tests.support.runs import FLOAT64, Run

REPOSITORY = Path(__file__).parents[2]
MUON = ["--optimizer.name=muon", "--optimizer.muon.qk_clip=100"]
AXES = ["--parallel.pp=2", "--parallel.cp=2", "--parallel.tp=2"]
SIZES = [
    "--train.steps=4",
    "--train.seq_len=64",
    "--train.global_batch_size=4",
    "--checkpoint.interval=2",
    "--checkpoint.mode=sync",
    "--metrics.log_interval=1",
]
QUIET = ["--data.validation=[]", "--evaluate.interval=0", "--evaluate.sample_interval=0"]


def write_text(folder: Path) -> str:
    """Write forge's own source as a byte-level dataset, one document per file; return its train.py option."""
    files = sorted((REPOSITORY / "forge" / "model").glob("*.py"))
    text = b"\0".join(path.read_bytes() for path in files) + b"\0"
    np.frombuffer(text, np.uint8).astype(np.uint16).tofile(folder / "text.bin")
    return f'--data.sources=[{{path="{folder}/text.bin",dtype="uint16",eos_id=0,weight=1.0}}]'


@pytest.mark.slow
def test_k3_debug_on_three_axes_killed_and_resumed_under_ep_has_one_curve(tmp_path) -> None:
    base = ["--config=k3_debug.toml", "--run.name=run", '--data.tokenizer="none"', write_text(tmp_path)]
    base += [*MUON, *SIZES, *QUIET, *FLOAT64]
    whole, moved = Run(tmp_path / "whole", base=base), Run(tmp_path / "moved", base=base)
    assert whole() == 0
    codes = moved.start(*AXES, world=8, fault="step:3:3:kill").join()
    assert -9 in codes and moved.checkpoints()[-1] == "step-00000002"
    assert moved(*AXES, "--parallel.ep=4", world=8) == 0
    assert "step-00000002" in moved.output()
    lines = moved.metrics()
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    for one, other in zip(whole.metrics(), lines, strict=True):
        assert other["loss"] == pytest.approx(one["loss"], rel=0, abs=1e-9)
        assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=0, abs=1e-9)
    assert whole.losses()[-1] < whole.losses()[0]
