"""Modules loaded before the first step, while the user waits."""

import json
import subprocess
import sys
from pathlib import Path

import torch

from tests.support.runs import BASE

# Since 2.14 PyTorch itself imports its compiler when a DeviceMesh is sliced.
COMPILER = ["torch._dynamo", "torch._inductor"] if torch.__version__ >= (2, 14) else []

CODE = """
import json, sys
from forge.run.launch import main
code = main(json.loads(sys.argv[1]))
print(json.dumps([code, [name for name in ("torch._dynamo", "torch._inductor", "torchao") if name in sys.modules]]))
"""


def test_a_run_without_compilation_recomputation_and_float8_loads_neither_a_compiler_nor_torchao(
    tmp_path: Path,
) -> None:
    options = [*BASE, f"--run.output_dir={tmp_path}", "--train.steps=1"]
    command = [sys.executable, "-c", CODE, json.dumps(options)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert json.loads(done.stdout.splitlines()[-1]) == [0, COMPILER], done.stdout + done.stderr
