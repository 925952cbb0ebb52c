"""Train the reference model on the reference corpus, and compare its held-out bits per byte with the published curve.

    make reference                                              builds the corpus, trains and compares
    python benchmarks/reference.py --seeds 0 1 2 --publish      makes the published curve

The model is `ladder.toml` at depth 3: 2.1 million parameters, 10 tokens for each. The published curve has three runs with
different seeds. A new run passes if its final bits per byte of each source are in the 99 % prediction interval of the
published runs. The same command continues an interrupted run. Other --section.key=value options override the config. Such
a run can only be compared with a curve published with the same options.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # works from a clone, installed or not

import torch

from benchmarks.measure import environment, markdown, parser, publish, require_publishable
from forge.config import Config, load_config
from forge.data.build import build_dataset, input_fingerprints
from forge.data.format import TokenDataset
from forge.runtime.errors import FAILED, UserError
from scripts.options import count, exit_code_of

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ("python", "code", "prose")
RECIPE = (
    "--config=ladder",
    "--ladder.depth=3",
    "--ladder.tokens_per_parameter=10",
    "--evaluate.sequences=256",
    "--metrics.tensorboard=false",
    "--checkpoint.interval=500",
)
EVALUATIONS = 10
# Sections of the configuration that determine the curve.
DETERMINING = ("model", "train", "optimizer", "schedule", "precision", "evaluate")
# Runs of a published curve. Their variance has two degrees of freedom for each of three sources.
RUNS = 3
# Two-sided 99 % quantile of Student's t distribution with six degrees of freedom.
STUDENT = 3.707
# Source -> step -> held-out bits per byte.
Curve = dict[str, dict[int, float]]


def main(arguments: list[str] | None = None) -> int:
    """Train, compare or publish, and return the exit code."""
    made = parser(__doc__, tiny=False)
    made.add_argument(
        "--corpus",
        type=Path,
        default=ROOT / "data" / "corpus-small",
        metavar="DIR",
        help="folder of the prepared data (%(default)s)",
    )
    made.add_argument(
        "--runs", type=Path, default=ROOT / "runs", metavar="DIR", help="run directories (%(default)s)"
    )
    made.add_argument(
        "--seeds",
        type=count,
        nargs="+",
        default=[3],
        metavar="N",
        help="seeds, with one run for each (%(default)s)",
    )
    made.add_argument(
        "--publish", action="store_true", help="write the curve to --output instead of comparing"
    )
    given, overrides = made.parse_known_args(arguments)
    return exit_code_of(lambda: reference(given, overrides))


def reference(given: argparse.Namespace, overrides: list[str]) -> None:
    """Train the missing runs. Publish their curve, or compare it with the published one.

    Raises UserError if a run fails, if there is no published curve with the same inputs (exit 2), or if the curves differ.
    """
    if given.publish and len(set(given.seeds)) != RUNS:
        raise UserError(
            f"--publish needs {RUNS} different --seeds, but has {' '.join(map(str, given.seeds))}"
        )
    options = [*RECIPE, *_data(given.corpus), *overrides]
    config = load_config(options)
    options.append(f"--evaluate.interval={max(1, config.train.steps // EVALUATIONS)}")
    inputs = _inputs(load_config(options))
    about = environment(torch.device("cpu"))
    about["settings"] = {"device": "cpu", "overrides": overrides, "seeds": given.seeds}
    published = None if given.publish else _find_published(given.output, inputs)
    if published is None:
        require_publishable(given.output, about, timed=False)
        from forge.tools.report import draw  # a missing matplotlib is an error before the training
    curves = {seed: _train(given, options, inputs, seed) for seed in given.seeds}
    if published is None:
        results = {"inputs": inputs, "bits_per_byte": {str(seed): curve for seed, curve in curves.items()}}
        path = publish("reference", given.output, about, results, _curve_table(curves), timed=False)
        path.with_suffix(".svg").write_text(_drawing(draw, curves))
        return
    found = [compare(curve, seed, published) for seed, curve in curves.items()]
    rows = [row for one in found for row in one]
    print(markdown(["seed", "source", "bits per byte", "published, 99 % interval", ""], rows))
    if different := [f"{row[1]} with seed {row[0]}" for row in rows if row[-1] != "equal"]:
        raise UserError(f"the bits per byte differ from the published curve: {', '.join(different)}", FAILED)


def compare(curve: Curve, seed: int, published: list[Curve]) -> list[list[str]]:
    """Return one row of texts for each source: seed, source, final bits per byte, published interval, "equal" or "differs".

    The interval is the prediction interval for one further run. Its width comes from the variance of the published runs,
    pooled over the sources.
    """
    last = max(curve[SOURCES[0]])
    values = {source: [one[source][last] for one in published] for source in SOURCES}
    spread = math.sqrt(statistics.mean(statistics.variance(one) for one in values.values()))
    half = STUDENT * spread * math.sqrt(1 + 1 / RUNS)
    rows = []
    for source, of in values.items():
        mean = statistics.mean(of)
        verdict = "equal" if abs(curve[source][last] - mean) <= half else "differs"
        rows.append([str(seed), source, f"{curve[source][last]:.4f}", f"{mean:.4f} ± {half:.4f}", verdict])
    return rows


def _data(corpus: Path) -> list[str]:
    """Return the options for the data of `corpus`. Raises UserError (exit 2) if the corpus is missing."""
    if not (corpus / SOURCES[-1] / "validation" / "dataset.json").exists():
        raise UserError(f"{corpus}: no corpus; first run make corpus SIZE=small")
    sources = ", ".join(f'{{path = "{corpus / name / "train"}"}}' for name in SOURCES)
    held_out = ", ".join(f'{{name = "{name}", path = "{corpus / name / "validation"}"}}' for name in SOURCES)
    return [
        f"--data.tokenizer={corpus / 'tokenizer'}",
        f"--data.sources=[{sources}]",
        f"--data.validation=[{held_out}]",
    ]


def _inputs(config: Config) -> dict[str, Any]:
    """Return everything that determines the curve, except the seed and the machine, in the types of JSON."""
    sections = config.model_dump(mode="json", include=set(DETERMINING))
    data = input_fingerprints(build_dataset(config), None)
    for one in config.data.validation:
        data[f"validation.{one.name}"] = TokenDataset(one.path).fingerprint
    found: dict[str, Any] = json.loads(json.dumps(sections | {"data": data}))
    return found


def _find_published(folder: Path, inputs: dict[str, Any]) -> list[Curve]:
    """Return the curves of the newest results file. Raises UserError (exit 2) if there is none, or its inputs differ.

    Keys of the configuration that are newer than the file are not compared.
    """
    files = sorted(folder.glob("*-cpu-reference.json"))
    if not files:
        raise UserError(f"{folder}: no published curve *-cpu-reference.json; make one with --publish")
    results = json.loads(files[-1].read_text())["results"]
    for section, keys in results["inputs"].items():
        for key, value in keys.items():
            if (now := inputs[section].get(key)) != value:
                raise UserError(
                    f"{files[-1].name} was made with {section}.{key} = {value}, but now it is {now}"
                )
    return [
        {source: {int(step): value for step, value in of.items()} for source, of in curve.items()}
        for curve in results["bits_per_byte"].values()
    ]


def _train(given: argparse.Namespace, options: list[str], inputs: dict[str, Any], seed: int) -> Curve:
    """Return the curve of the run with `seed`. Train the missing part; the name of the run has a hash of its inputs."""
    digest = hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()[:8]
    name = f"reference-{digest}-{seed}"
    own = [f"--run.name={name}", f"--run.output_dir={given.runs}", f"--run.seed={seed}"]
    code = subprocess.run([sys.executable, str(ROOT / "train.py"), *options, *own]).returncode
    if code:
        raise UserError(f"seed {seed}: train.py ended with exit code {code}", FAILED)
    curve: Curve = {source: {} for source in SOURCES}
    for line in (given.runs / name / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        for source, loss in row.get("eval", {}).items():
            dataset = json.loads((given.corpus / source / "validation" / "dataset.json").read_text())
            tokens_per_byte = dataset["tokens"] / dataset["text_bytes"]
            curve[source][row["step"]] = math.nan if loss is None else loss / math.log(2) * tokens_per_byte
    return curve


def _curve_table(curves: dict[int, Curve]) -> str:
    """Return a table with a row for each evaluation and a column for each source: mean and range over the seeds."""
    steps = sorted(next(iter(curves.values()))[SOURCES[0]])
    rows = []
    for step in steps:
        of = {source: [curve[source][step] for curve in curves.values()] for source in SOURCES}
        rows.append(
            [str(step)]
            + [f"{statistics.mean(one):.4f} ({min(one):.4f} to {max(one):.4f})" for one in of.values()]
        )
    return markdown(["step", *(f"{source}, bits per byte" for source in SOURCES)], rows)


def _drawing(draw: Any, curves: dict[int, Curve]) -> str:
    """Return an SVG of the held-out bits per byte of each source by step, with a line for each seed.

    draw: the module forge.tools.report.draw.
    """
    lines = []
    for color, source in enumerate(SOURCES):
        for run, (seed, curve) in enumerate(curves.items()):
            steps = sorted(curve[source])
            points = [float(step) for step in steps], [curve[source][step] for step in steps]
            lines.append(draw.Curve(f"{source}, seed {seed}", points, color, run))
    drawing: str = draw.curves("reference", lines, "held-out bits per byte", size=(7.2, 3.0))
    return drawing


if __name__ == "__main__":
    raise SystemExit(main())
