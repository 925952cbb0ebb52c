"""Measure a trained model: its loss on held-out data, or its score on tasks of EleutherAI's lm-eval.

    python scripts/evaluate.py --checkpoint runs/debug --data data/python/validation
    python scripts/evaluate.py --checkpoint runs/debug --tasks lambada_openai,arc_easy

--data reports loss (nats per token), perplexity, and bits per byte of text. Only bits per byte are comparable between
tokenizers. The model predicts each token once, from the previous tokens in a window of --context tokens. The first
token is not predicted.

--tasks needs the extra forge[eval]. --include-path names a folder with your own tasks.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # works from a clone, installed or not

from forge.data.format import TokenDataset
from forge.data.permutation import key_of
from forge.data.raw import DTYPES
from forge.data.sources import SYNTHETIC, Source, open_source
from forge.observe.json_lines import encode
from forge.observe.progress import ProgressLine
from forge.runtime.errors import UserError
from forge.tools.inference.measure import Measured, measure
from forge.tools.inference.open import TrainedModel
from scripts.model import add_model_options, open_model
from scripts.options import Options, count, exit_code_of, positive


def main(arguments: list[str] | None = None) -> int:
    """Measure, print and return the exit code."""
    given = _parser().parse_args(arguments)
    return exit_code_of(lambda: _run(given))


def _run(given: argparse.Namespace) -> None:
    if not given.data and not given.tasks:
        raise UserError("nothing to measure: give --data DIR, or --tasks NAME,NAME")
    of_tasks, of_data = ("include_path", "num_fewshot", "limit"), ("sequences", "data_dtype", "eos_id")
    for needed, there, keys in ("--tasks", given.tasks, of_tasks), ("--data", given.data, of_data):
        for name in keys:
            if not there and getattr(given, name) is not None:
                raise UserError(f"--{name.replace('_', '-')}: only with {needed}")
    # Report a missing lm-eval, an unknown task and a model without a tokenizer before any work.
    tasks, names = _tasks() if given.tasks else None, (given.tasks or "").split(",")
    manager = tasks and tasks.find_tasks(names, given.include_path, "--tasks", "--include-path")
    opened = open_model(given)
    scorer = tasks and tasks.Scorer(opened, given.batch_size)
    # Open all sources before measuring the first source, to report all mistakes at the start.
    sources = [_open_source(path, given, opened) for path in given.data]
    for path, source in zip(given.data, sources, strict=True):
        sequences = given.sequences
        if path == SYNTHETIC and sequences is None:
            sequences = opened.config.evaluate.sequences
        tokens = source.tokens if sequences is None else sequences * opened.config.train.seq_len
        line = ProgressLine(path, min(tokens, source.tokens), "thousand tokens", 1e3)
        measured = measure(opened, source, sequences, given.batch_size, line.update)
        seconds = line.close()
        report(path, measured, given.json, opened)
        if not given.json:
            print(f"{measured.tokens / seconds:,.0f} tokens/s", file=sys.stderr)
    if tasks is not None:
        results = tasks.evaluate_tasks(
            scorer, names, manager, num_fewshot=given.num_fewshot, limit=given.limit
        )
        report_tasks(results, given.json, opened)


def _open_source(path: str, given: argparse.Namespace, opened: TrainedModel) -> Source:
    config, tokenizer = opened.config, opened.tokenizer
    if path.endswith(".bin") and given.data_dtype is None and not Path(path).with_suffix(".idx").exists():
        raise UserError(
            f"--data {path}: a .bin does not record the dtype of its ids; give --data-dtype {' or '.join(sorted(DTYPES))}"
        )
    seed = key_of(config.run.seed, "validation", 0)  # the seed of `synthetic` validation data in training
    source = open_source(path, seed, config.model.vocab_size, dtype=given.data_dtype, eos_id=given.eos_id)
    if isinstance(source, TokenDataset) and tokenizer is not None:
        if source.index.tokenizer != tokenizer.fingerprint:
            raise UserError(
                f"--data {path}: was prepared with another tokenizer (fingerprint {source.index.tokenizer[:12]}) than the "
                f"model's (fingerprint {tokenizer.fingerprint[:12]}); prepare it again with {opened.path / 'tokenizer'}"
            )
    elif tokenizer is None and path != SYNTHETIC:
        print(
            f"warning: {opened.path} holds no tokenizer to compare with the tokenizer of {path}",
            file=sys.stderr,
        )
    return source


def report(path: str, measured: Measured, as_json: bool, opened: TrainedModel) -> None:
    """Print the measurement on `path`. as_json: print a JSON object instead of a line of text."""
    if as_json:
        fields = ("loss", "perplexity", "bits_per_byte", "tokens", "sequences", "text_bytes")
        record = {"data": path} | {name: getattr(measured, name) for name in fields}
        record |= {
            "text_bytes_from": measured.bytes_from,
            "checkpoint": str(opened.path),
            "step": opened.step,
        }
        _print_object(record)
        return
    per_byte = "bits per byte unknown (no tokenizer)"
    if measured.bits_per_byte is not None:
        origin = "text" if measured.bytes_from == "dataset.json" else "decoded labels"
        per_byte = (
            f"bits per byte {measured.bits_per_byte:.4f} ({measured.text_bytes:,} bytes of the {origin})"
        )
    means = f"loss {measured.loss:.4f}, perplexity {measured.perplexity:.2f}"
    print(f"{path}: {means}, {per_byte}, {measured.tokens:,} tokens", flush=True)


def report_tasks(results: dict[str, dict[str, Any]], as_json: bool, opened: TrainedModel) -> None:
    """Print the metrics of lm-eval's tasks, a line for each. as_json: print one JSON object instead."""
    if as_json:
        _print_object({"tasks": results, "checkpoint": str(opened.path), "step": opened.step})
        return
    for task, metrics in results.items():
        for name, value in metrics.items():
            print(f"{task}: {name} {value:.4f}" if isinstance(value, float) else f"{task}: {name} {value}")


def _print_object(fields: dict[str, Any]) -> None:
    """Print one line of JSON, with null for non-finite numbers, as in metrics.jsonl."""
    print(encode(fields).decode(), end="", flush=True)


def _tasks() -> Any:
    """Return the module `forge.tools.inference.tasks`. Raises UserError if lm-eval is not installed."""
    try:
        from forge.tools.inference import tasks
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("lm_eval"):
            raise
        raise UserError("--tasks: needs the package lm-eval: pip install 'forge[eval]'") from None
    return tasks


def _parser() -> Options:
    parser = Options(description=__doc__)
    add = parser.add_argument
    add_model_options(add)
    add(
        "--data",
        action="append",
        default=[],
        metavar="DIR",
        help="a folder written by prepare_data.py, a raw .bin, a Megatron .idx, or synthetic; may be repeated",
    )
    add(
        "--sequences",
        type=positive,
        metavar="N",
        help="evaluate only the N windows of --data that training evaluates (default: all windows)",
    )
    add(
        "--data-dtype",
        choices=sorted(DTYPES),
        help="type of the ids in a .bin file; required for these files",
    )
    add("--eos-id", type=count, metavar="ID", help="token id that ends a document in a .bin file")
    add(
        "--batch-size", type=positive, default=8, metavar="N", help="sequences per forward pass (%(default)s)"
    )
    add("--tasks", metavar="A,B", help="names of lm-eval tasks")
    add("--include-path", metavar="DIR", help="a folder with more tasks for lm-eval")
    add("--num-fewshot", type=count, metavar="N", help="examples before each question (the task's default)")
    add("--limit", type=positive, metavar="N", help="ask only the first N questions of each task (all)")
    add("--json", action="store_true", help="print one JSON object for each --data and one for --tasks")
    return parser


if __name__ == "__main__":
    sys.exit(main())
