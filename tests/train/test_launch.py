"""What train.py says before any run."""

import subprocess
import sys
from pathlib import Path

TRAIN = Path(__file__).parents[2] / "train.py"


def test_a_reader_who_has_seen_enough_is_no_error() -> None:
    command = [sys.executable, str(TRAIN), "--help"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    output = process.stderr.read()
    assert process.wait() == 0 and "Traceback" not in output
    process.stderr.close()
