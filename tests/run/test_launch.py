"""Output of train.py before any run."""

import json
import shlex
import subprocess
import sys
from pathlib import Path

from tests.support.runs import BASE

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
