"""Run the tests marked `gpu` before a GPU benchmark, for the benchmark's results file."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
# Folders with tests marked `gpu`. tests/gpu, the GPU variants of tests/simulated_gpu, comes first.
FOLDERS = ("tests/gpu", "tests/model", "tests/parallel", "tests/train", "tests/data")
OUTCOMES = ("passed", "failed", "error", "skipped")
_WORDS = "|".join(OUTCOMES).upper()
# A line of pytest -v is "NAME PASSED [ 1%]"; a line of pytest-xdist is "[gw0] [ 1%] PASSED NAME".
_LINE = re.compile(rf"\[gw\d+\] .*?\b({_WORDS}) (\S+\.py::.*)|(\S+\.py::.*?) ({_WORDS})\b")


def run_tests(seconds: float, folders: tuple[str, ...] = FOLDERS) -> dict[str, Any]:
    """Run the tests marked `gpu` for at most `seconds`. Return counts by outcome, failed tests and the last output."""
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-v", "-p", "no:cacheprovider", *folders]
    command += ["-n", "4"] if find_spec("xdist") else []
    command += ["--reruns=0"] if find_spec("pytest_rerunfailures") else []
    began = time.monotonic()
    with tempfile.TemporaryFile("w+") as output:
        tests = subprocess.Popen(
            command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            ended = f"exit code {tests.wait(seconds)}"
        except subprocess.TimeoutExpired:
            ended = f"cut off after {seconds:.0f} s"
            os.killpg(tests.pid, signal.SIGKILL)
            tests.wait()
        output.seek(0)
        lines = output.read().splitlines()
    matches = [match for line in lines if (match := _LINE.match(line))]
    found = {(match[2] or match[3]).strip(): (match[1] or match[4]).lower() for match in matches}
    return {
        "ended": ended,
        "seconds": time.monotonic() - began,
        "counts": dict(Counter(found.values())),
        "failures": [name for name, word in found.items() if word in ("failed", "error")],
        "output": [] if ended == "exit code 0" else lines[-200:],
    }


def summary(tests: dict[str, Any]) -> str:
    """Return a line with counts, seconds and the end of the tests, then a line for each failure."""
    counts = ", ".join(f"{tests['counts'].get(word, 0)} {word}" for word in OUTCOMES)
    return "\n".join([f"tests: {counts} in {tests['seconds']:.0f} s, {tests['ended']}", *tests["failures"]])
