"""Output of train.py before any run."""

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from forge.config import load_config
from forge.run.nodes import refuse_other_config
from forge.runtime.errors import UserError
from forge.runtime.world import read_world
from tests.support.harness import run_ranks
from tests.support.runs import BASE, Run

TRAIN = Path(__file__).parents[2] / "train.py"


def test_a_reader_closing_the_pipe_is_no_error() -> None:
    command = [sys.executable, str(TRAIN), "--help"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    output = process.stderr.read()
    assert process.wait() == 0 and "Traceback" not in output
    process.stderr.close()


def test_closed_standard_streams_are_no_error_and_no_file_takes_their_descriptor(tmp_path) -> None:
    options = [*BASE, "--train.steps=3", f"--run.output_dir={tmp_path}"]
    command = f"exec {shlex.join([sys.executable, str(TRAIN), *options])} <&- >&- 2>&-"
    assert subprocess.run(["bash", "-c", command], timeout=240).returncode == 0
    run = tmp_path / "run"
    assert json.loads((run / "status.json").read_text())["state"] == "finished"
    for name in ("metrics.jsonl", "events.jsonl"):
        for line in (run / name).read_text().splitlines():
            json.loads(line)


@pytest.mark.processes
def test_config_toml_keeps_the_layout_for_the_usual_number_of_processes(tmp_path) -> None:
    run = Run(
        tmp_path,
        "--train.steps=2",
        "--parallel.dp_shard=4",
        '--parallel.fallbacks=["parallel.dp_shard=2 parallel.data_parallel=zero1"]',
    )
    assert run(world=2) == 0
    kept = load_config(["--config", str(run.path / "config.toml")]).parallel
    assert (kept.dp_shard, kept.data_parallel) == (4, "fsdp2")
    [started] = run.events("started")
    assert (started["layout"]["dp_shard"], started["data_parallel"]) == (2, "zero1")


def compared(rank: int, world: int, *options: str) -> str:
    config = load_config(["--config=debug", *(options if rank == world - 1 else ())])
    try:
        refuse_other_config(config)
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.processes
@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--run.output_dir=elsewhere", ""),
        ('--data.validation=[{path="elsewhere",name="python"}]', ""),
        (
            "--model.rope_scaling={kind='yarn',factor=4.0,original_max_position=64}",
            "model.rope_scaling.beta_fast is not set on rank 0 and 32.0 on rank 2; start all ranks with the same "
            "configuration and options",
        ),
        (
            "--checkpoint.mirror=s3://user:word@bucket/run",
            'checkpoint.mirror is "" on rank 0 and "s3://REDACTED@bucket/run" on rank 2; start all ranks with the same '
            "configuration and options",
        ),
        (
            "--optimizer.lr=0.125",
            "optimizer.lr is 0.003 on rank 0 and 0.125 on rank 2; start all ranks with the same configuration and options",
        ),
    ],
)
def test_a_rank_with_another_configuration_is_refused(option: str, message: str) -> None:
    assert run_ranks(compared, 3, option) == [message] * 3


def other_rate_on_rank_1() -> None:
    """Give rank 1 another learning rate, as on a node whose command was typed again."""
    from forge.run import launch

    begin = launch.main

    if read_world().rank == 1:
        launch.main = lambda argv: begin([*argv, "--optimizer.lr=0.125"])


@pytest.mark.processes
def test_a_node_with_another_command_line_is_refused_before_the_run(tmp_path) -> None:
    run = Run(tmp_path, "--train.steps=2", "--optimizer.lr=0.25")
    assert run.start(world=2, patch=f"{__name__}:other_rate_on_rank_1").join() == [2, 2]
    assert "optimizer.lr is 0.25 on rank 0 and 0.125 on rank 1" in run.output()
    assert not run.path.exists()
