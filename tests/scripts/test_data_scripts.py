"""The two data scripts, run like a user's commands."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from forge.data.format import TokenDataset
from forge.runtime.errors import BAD_CONFIG, FINISHED, STOPPED
from tests.support.runs import wait_for
from tests.support.trained import call

ROOT = Path(__file__).parents[2]


def command(name, *arguments):
    return [sys.executable, str(ROOT / "scripts" / f"{name}.py"), *map(str, arguments)]


def run(name, *arguments):
    return subprocess.run(command(name, *arguments), capture_output=True, text=True, timeout=240)


@pytest.mark.parametrize("name", ["prepare_data", "train_tokenizer", "make_corpus"])
def test_a_script_and_its_workers_start_without_torch(name):
    # torch's import takes seconds, and each worker imports the script.
    code = f"import sys, scripts.{name}; raise SystemExit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_from_text_to_datasets_and_again(tmp_path):
    text = ROOT / "forge"
    trained = run("train_tokenizer", "--input", text, "--output", tmp_path / "tokenizer", "--vocab-size", 500)
    assert trained.returncode == FINISHED, trained.stderr
    lines = trained.stderr.splitlines()
    assert len(lines) == 3 and ".toml" in lines[0], "SentencePiece is quiet"
    arguments = ["--input", text, "--tokenizer", tmp_path / "tokenizer", "--output", tmp_path / "data"]
    arguments += ["--holdout", "0.2", "--extensions", ".py"]
    prepared = run("prepare_data", *arguments, "--workers", 2)
    assert prepared.returncode == FINISHED, prepared.stderr
    train, validation = (TokenDataset(tmp_path / "data" / split, 500) for split in ("train", "validation"))
    assert train.tokens > validation.tokens > 100 and train.index.vocab_size == 500
    again = run("prepare_data", *arguments)
    assert again.returncode == FINISHED and again.stdout.count("already prepared") == 2


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("prepare_data", ["--input", "absent", "--tokenizer", "bytes", "--output", "out"]),
        ("prepare_data", ["--input", "empty", "--tokenizer", "bytes", "--output", "out"]),
        ("prepare_data", ["--input", "text", "--tokenizer", "absent", "--output", "out"]),
        ("prepare_data", ["--input", "text", "--tokenizer", "bytes", "--output", "text/a.txt"]),
        ("prepare_data", ["--input", "text", "--tokenizer", "bytes", "--output", "out", "--workers", "0"]),
        ("prepare_data", ["--input", "text", "--tokenizer", "bytes", "--output", "out", "--holdout", "1.5"]),
        ("train_tokenizer", ["--input", "absent", "--output", "out", "--vocab-size", "300"]),
        ("train_tokenizer", ["--input", "empty", "--output", "out", "--vocab-size", "300"]),
        ("train_tokenizer", ["--input", "text", "--output", "out", "--vocab-size", "9"]),
        ("train_tokenizer", ["--input", "text", "--output", "text/a.txt", "--vocab-size", "300"]),
        (
            "train_tokenizer",
            ["--input", "text", "--output", "out", "--vocab-size", "300", "--max-bytes", "0"],
        ),
    ],
)
def test_an_error_is_one_sentence_and_exit_code_2(tmp_path, name, arguments):
    (tmp_path / "empty").mkdir()
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("some text\n" * 50)
    names = {"absent", "empty", "text", "out", "text/a.txt"}
    result = call(tmp_path, name, *[tmp_path / part if part in names else part for part in arguments])
    assert result.code == BAD_CONFIG
    assert "Traceback" not in result.err and "forge: " in result.err.splitlines()[-1]
    assert not (tmp_path / "out").exists()


# prepare_data.py, with a main process that stops at its first progress and reports it through a file.
HELD = """
import pathlib, runpy, sys, time
from forge.observe.progress import ProgressLine

def hold(line, done):
    held.touch()
    time.sleep(3600)

held, ProgressLine.update = pathlib.Path(sys.argv[1]), hold
del sys.argv[:2]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_ctrl_c_stops_all_processes_and_the_same_command_continues(tmp_path):
    (tmp_path / "text").mkdir()
    for i in range(12):
        (tmp_path / "text" / f"{i}.txt").write_text(f"{i} some words of text\n" * 45_000)
    arguments = ["--input", tmp_path / "text", "--output", tmp_path / "out"]
    arguments += ["--tokenizer", "bytes", "--workers", 2]
    python, *script = command("prepare_data", *arguments)
    process = subprocess.Popen(
        [python, "-c", HELD, str(tmp_path / "held"), *script],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # A shell starts background processes with this signal ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    wait_for((tmp_path / "held").exists)
    os.killpg(process.pid, signal.SIGINT)  # like a terminal: to the workers too
    _, output = process.communicate(timeout=240)
    assert process.returncode == STOPPED and "interrupted" in output and "Traceback" not in output
    result = run("prepare_data", *arguments)
    assert result.returncode == FINISHED and "continuing an interrupted run" in result.stderr
    assert TokenDataset(tmp_path / "out").documents == 12
