"""Run scripts in forked processes, and train a small model for them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forge.runtime.errors import FINISHED
from forge.tools.prepare.prepare import Request, prepare
from tests.support.harness import start_ranks
from tests.support.runs import Run
from tests.support.scripts import run_script

ROOT = Path(__file__).parents[2]
BYTES_VOCAB = 258


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str


def call(folder: Path, script: str, *arguments: object, environment: dict[str, str] | None = None) -> Result:
    """Run `python scripts/SCRIPT.py ARGUMENTS` in `folder`, in a forked process, without the interpreter's start.

    environment: variables added to those of the fork server, which do not include a test's own changes.
    """
    out, err = folder / "out.txt", folder / "err.txt"
    words = [str(ROOT / "scripts" / f"{script}.py"), *map(str, arguments)]
    out.unlink(missing_ok=True)
    err.unlink(missing_ok=True)
    (code,) = start_ranks(run_script, 1, words, folder, environment or {}, out, err).join()
    return Result(code, out.read_text(), err.read_text())


def objects(result: Result) -> list[dict[str, Any]]:
    """Return the objects printed by --json."""
    assert result.code == FINISHED, result.err
    return [json.loads(line) for line in result.out.splitlines()]


def refusal(result: Result) -> str:
    """Return the one-sentence error of a user's mistake."""
    assert "Traceback" not in result.err
    errors = [line for line in result.err.splitlines() if "forge: " in line]
    assert len(errors) == 1 and result.err.splitlines()[-1] == errors[0], result.err
    return errors[0]


def prepared(folder: Path, tokenizer: str = "bytes") -> Path:
    """Write documents of consecutive letters up to "h", from any first letter, to FOLDER/data/{train,validation}."""
    documents = ["abcdefgh"[begin:] for begin in range(8)]
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in documents * 150))
    prepare(Request((str(folder / "text.jsonl"),), tokenizer, folder / "data", holdout=0.4))
    return folder / "data"


def prepare_bytes(text: Path, output: Path) -> None:
    prepare(Request(inputs=(str(text),), tokenizer="bytes", output=output))


def trained(folder: Path, *options: str, world: int = 1, tokenizer: str = "bytes", steps: int = 6) -> Run:
    """Return a finished run in FOLDER/run on the data of `prepared(folder)`, evaluated at its end."""
    run = on_prepared(
        folder, f"--train.steps={steps}", f"--evaluate.interval={steps}", *options, tokenizer=tokenizer
    )
    assert run(world=world) == 0, run.output()
    return run


def on_prepared(folder: Path, *options: str, tokenizer: str = "bytes") -> Run:
    """Return a run in FOLDER/run on the data of `prepared(folder)`. The run is not started."""
    data = folder / "data"
    return Run(
        folder,
        f'--data.sources=[{{path="{data / "train"}",weight=1.0}}]',
        f'--data.validation=[{{name="held",path="{data / "validation"}"}}]',
        f"--data.tokenizer={tokenizer}",
        f"--model.vocab_size={BYTES_VOCAB if tokenizer == 'bytes' else 512}",
        "--evaluate.sequences=5",
        "--optimizer.lr=0.02",
        *options,
    )
