#!/usr/bin/env python
"""Fit scaling laws to finished runs: loss by parameters and tokens, best learning rate and best batch by size.

    python scripts/fit.py runs/ladder --metric eval.python --budget 1e18 --predict 27e6 540e6

RUN is a run directory, or a folder of runs, e.g. of a sweep. If several runs have the same numbers of parameters and tokens,
the law of the loss uses only the run with the lowest loss. --output writes a page with figures (needs the extra
forge[report]).
"""

from __future__ import annotations

import argparse
import math
import sys
from collections import defaultdict
from operator import attrgetter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # works from a clone, installed or not

from forge.observe.json_lines import encode
from forge.runtime.errors import MissingExtra
from forge.runtime.files import replace_atomically
from forge.tools.report.read import read_runs
from forge.tools.sweep.law import OPERATIONS, Fit, fit_law
from forge.tools.sweep.measured import MeasuredRun, best_of_each, find_runs, measure
from forge.tools.sweep.optima import PowerLaw, fit_power_law, least_at
from scripts.options import Options, add_trust_option, count, exit_code_of, local_path, number

above_zero = number(float, lambda value: 0 < value < math.inf, "above 0 and finite")


def main(arguments: list[str] | None = None) -> int:
    """Fit the laws, print them and return the exit code."""
    parser = Options(description=__doc__)
    add = parser.add_argument
    add("runs", type=Path, nargs="+", metavar="RUN", help="run directories, or folders of run directories")
    add(
        "--metric",
        default="loss",
        help="loss: training loss over the last tenth of the lines; eval.NAME: held-out loss (%(default)s)",
    )
    add(
        "--budget",
        type=above_zero,
        action="append",
        default=[],
        metavar="OPS",
        help="FLOPs of a training run: print the best N and D",
    )
    add(
        "--predict",
        type=above_zero,
        nargs=2,
        action="append",
        default=[],
        metavar=("N", "D"),
        help="parameters and tokens of a run: print its loss by the law",
    )
    add(
        "--without-embeddings",
        action="store_true",
        help="N does not count the embedding and the output head (Kaplan et al., 2020); default: all that a token uses "
        "(Hoffmann et al., 2022)",
    )
    add(
        "--resamples",
        type=count,
        default=100,
        help="number of bootstrap samples for the intervals (%(default)s)",
    )
    add("--output", type=local_path, help="page to write")
    add_trust_option(add)
    add("--json", action="store_true", help="print one JSON object")
    given = parser.parse_args(arguments)
    return exit_code_of(lambda: _run(given))


def _run(given: argparse.Namespace) -> None:
    runs = [
        measure(path, given.metric, given.trust, embeddings=not given.without_embeddings)
        for path in find_runs(given.runs)
    ]
    best = best_of_each(runs)
    fit = fit_law(
        *([getattr(run, key) for run in best] for key in ("parameters", "tokens", "loss")),
        resamples=max(2, given.resamples),
    )
    found: dict[str, Any] = {
        "runs": len(runs),
        "embeddings": not given.without_embeddings,
        "points": len(best),
        "law": vars(fit.law),
        "intervals": {name: fit.interval(attrgetter(name)) for name in vars(fit.law)},
        "worst_error": max(map(abs, fit.errors)),
        "without_effect": fit.without_effect([run.parameters for run in best], [run.tokens for run in best]),
        "budgets": [_budget(fit, best, operations) for operations in given.budget],
        "predictions": [_prediction(fit, best, n, d) for n, d in given.predict],
        "learning_rate": _law_as_json(best_learning_rates(runs)),
        "batch": _law_as_json(best_batches(runs)),
    }
    if given.json:
        print(encode(found).decode(), end="")
    else:
        print(_text(found))
    if given.output:
        _page(given.output, given.metric, best, fit, found)


def best_learning_rates(runs: list[MeasuredRun]) -> tuple[list[dict[str, float]], PowerLaw | None]:
    """Return the best learning rate of each group of runs, and the power law of these rates (None: too few groups).

    A group has the runs with equal parameters, tokens and batch.
    """
    groups: dict[tuple[float, float, float], list[MeasuredRun]] = defaultdict(list)
    for run in runs:
        groups[run.parameters, run.tokens, run.batch].append(run)
    rows = []
    for (n, d, batch), members in sorted(groups.items()):
        lr = least_at([run.lr for run in members], [run.loss for run in members])
        if lr is not None:
            rows.append({"parameters": n, "tokens": d, "batch": batch, "best": lr})
    return rows, fit_power_law(rows, "best", ("parameters", "tokens", "batch"))


def best_batches(runs: list[MeasuredRun]) -> tuple[list[dict[str, float]], PowerLaw | None]:
    """Return the best batch, in tokens, for each pair (parameters, tokens), and the power law of these batches.

    For each batch size, only the run at the best learning rate counts. The law is None if there are too few pairs.
    """
    groups: dict[tuple[float, float], list[MeasuredRun]] = defaultdict(list)
    for run in runs:
        groups[run.parameters, run.tokens].append(run)
    rows = []
    for (n, d), members in sorted(groups.items()):
        batch = least_at([run.batch for run in members], [run.loss for run in members])
        if batch is not None:
            rows.append({"parameters": n, "tokens": d, "best": batch})
    return rows, fit_power_law(rows, "best", ("tokens", "parameters"))


def _law_as_json(found: tuple[list[dict[str, float]], PowerLaw | None]) -> dict[str, Any]:
    rows, law = found
    powers = None if law is None else {"factor": law.factor, "powers": dict(law.powers), "spread": law.spread}
    return {"optima": rows, "law": powers}


def _budget(fit: Fit, runs: list[MeasuredRun], operations: float) -> dict[str, Any]:
    n, d = fit.law.optimum(operations)
    return {
        "operations": operations,
        "parameters": n,
        "parameters_interval": fit.interval(lambda law: law.optimum(operations)[0]),
        **_prediction(fit, runs, n, d),
    }


def _prediction(fit: Fit, runs: list[MeasuredRun], n: float, d: float) -> dict[str, Any]:
    largest = max(OPERATIONS * run.parameters * run.tokens for run in runs)
    return {
        "parameters": n,
        "tokens": d,
        "loss": fit.law.loss(n, d),
        "loss_interval": fit.interval(lambda law: law.loss(n, d)),
        "run_interval": fit.interval_of_run(n, d),
        "extrapolates": OPERATIONS * n * d / largest,
    }


def _text(found: dict[str, Any]) -> str:
    law = found["law"]
    lines = [
        f"{found['points']} points of {found['runs']} runs; the law is off by {found['worst_error']:.2%} at most",
        f"loss = {law['E']:.4g} + {law['A']:.4g} / N^{law['a']:.3f} + {law['B']:.4g} / D^{law['b']:.3f}, N "
        f"{'with' if found['embeddings'] else 'without'} embeddings",
        "90 % of resampled fits: "
        + ", ".join(f"{name} {low:.3g} to {high:.3g}" for name, (low, high) in found["intervals"].items()),
    ]
    if found["without_effect"]:
        names = " and ".join(found["without_effect"])
        lines.append(
            f"over these runs {names} changes the loss by less than the error of the law, so no budget has an "
            "optimum; take sizes and tokens further apart, and learning rates near the best"
        )
    for one in found["budgets"] if not found["without_effect"] else ():
        low, high = one["parameters_interval"]
        lines.append(
            f"budget {one['operations']:.3g}: N = {one['parameters']:.3g} ({low:.3g} to {high:.3g}), "
            f"D = {one['tokens']:.3g}, {_loss(one)}"
        )
    for one in found["predictions"]:
        lines.append(f"N = {one['parameters']:.3g}, D = {one['tokens']:.3g}: {_loss(one)}")
    for name, what in (("learning_rate", "best learning rate"), ("batch", "best batch, tokens")):
        for row in found[name]["optima"]:
            sizes = ", ".join(f"{key} {value:.3g}" for key, value in row.items() if key != "best")
            lines.append(f"{what} at {sizes}: {row['best']:.3g}")
        if (power := found[name]["law"]) is not None:
            terms = "".join(f" * {key}^{value:.3f}" for key, value in power["powers"].items())
            lines.append(
                f"{what} = {power['factor']:.3g}{terms} (up or down by a factor of {power['spread']:.2f})"
            )
    return "\n".join(lines)


def _loss(one: dict[str, Any]) -> str:
    (low, high), (least, most) = one["loss_interval"], one["run_interval"]
    times = one["extrapolates"]
    far = f"{times:.3g} times the FLOPs of the largest run" if times > 1 else "within the FLOPs of the runs"
    return f"loss {one['loss']:.4g} (interval of the law {low:.4g} to {high:.4g}, of a run {least:.4g} to {most:.4g}), {far}"


def _page(path: Path, metric: str, best: list[MeasuredRun], fit: Fit, found: dict[str, Any]) -> None:
    try:
        from forge.tools.report.draw import Curve, curves
        from forge.tools.report.page import make_page
        from forge.tools.report.parts import PageSection, Part, Picture, Table, TextBlock
    except MissingExtra as error:
        print(f"no page: {error}", file=sys.stderr)
        return
    rows = [
        [run.path.name, run.parameters, run.tokens, run.loss, fit.law.loss(run.parameters, run.tokens)]
        for run in best
    ]
    table = Table("Runs and law", ["run", "parameters", "tokens", metric, "law"], rows)
    parts: list[Part] = [TextBlock("The law", _text(found))]
    sizes = sorted({run.parameters for run in best})
    drawn = []
    for color, size in enumerate(sizes):
        members = sorted((run.tokens, run.loss) for run in best if run.parameters == size)
        tokens = [tokens for tokens, _ in members]
        drawn.append(Curve(f"N = {size:.3g}", (tokens, [loss for _, loss in members]), color))
        law = [fit.law.loss(size, one) for one in tokens]
        drawn.append(Curve(f"law, N = {size:.3g}", (tokens, law), color, run=1))
    picture = curves("law", drawn, metric, x="tokens", log_x=True, log=True, size=(10.4, 3.4))
    parts.append(Picture(f"{metric} by tokens, and the law", picture, table, wide=True))
    page = make_page(read_runs([run.path for run in best]), extra=[PageSection("Fitted laws", parts=parts)])
    replace_atomically(path, page.encode())
    print(f"wrote {path}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
