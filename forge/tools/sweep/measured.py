"""`MeasuredRun`: a finished run as a data point of a scaling law."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from forge.config import Config, parse_toml_text
from forge.config.extensions import require_trust
from forge.model import parameter_counts
from forge.observe.json_lines import read_lines, read_object
from forge.parallel.build import build_meta_model
from forge.runtime.errors import UserError
from forge.tools.sweep.results import metric_of
from forge.tools.sweep.spec import check_metric


@dataclass(frozen=True)
class MeasuredRun:
    """A finished run.

    parameters: active parameters per token; `measure` may leave out embedding and head. tokens: number of training
    tokens. batch: tokens per step. lr: optimizer.lr. loss: the chosen metric at the end of the run.
    """

    path: Path
    parameters: float
    tokens: float
    batch: float
    lr: float
    loss: float


def measure(path: Path, metric: str, trust: bool = False, embeddings: bool = True) -> MeasuredRun:
    """Read the finished run in the directory `path`.

    metric: as in `metric_of`. trust: allow the import of a class named by model.kind. embeddings: count the parameters of
    the embedding and of the output head.

    Raises UserError if the run is not finished, lacks the metric or needs trust.
    """
    if read_object(path / "status.json").get("state") != "finished":
        raise UserError(
            f"{path}: is not the directory of a finished run; a scaling law is fitted to final losses"
        )
    config = parse_toml_text(
        (path / "config.toml").read_text("utf-8"), str(path), stored=True, import_classes=False
    )
    if not trust:
        require_trust(config, str(path / "config.toml"), ["model.kind"])
    check_metric(metric, config, f"{path}: the metric {metric}")
    lines = read_lines(path / "metrics.jsonl", "step")
    loss = metric_of(lines, metric)
    if loss is None:
        raise UserError(f"{path}: metrics.jsonl has no {metric} at the end of the run")
    tokens = max(line.get("tokens", 0) for line in lines)
    return MeasuredRun(
        path,
        _parameters(config, embeddings),
        float(tokens),
        float(config.train.global_batch_size * config.train.seq_len),
        config.optimizer.lr,
        loss,
    )


def _parameters(config: Config, embeddings: bool) -> float:
    model = build_meta_model(config)
    ends = {id(p): p.numel() for part in (model.embedding, model.head) if part for p in part.parameters()}
    return float(parameter_counts(model).active - (0 if embeddings else sum(ends.values())))


def find_runs(paths: Iterable[Path]) -> list[Path]:
    """Return the run directories among `paths`. For any other folder, e.g. of a sweep, return the finished runs inside.

    Raises UserError for a folder without a finished run.
    """
    found = []
    for path in paths:
        if (path / "status.json").is_file():
            found.append(path)
            continue
        inside = sorted(file.parent for file in path.glob("*/status.json"))
        if not inside:
            raise UserError(f"{path}: is neither a run directory nor a folder of run directories")
        finished = [run for run in inside if read_object(run / "status.json").get("state") == "finished"]
        if not finished:
            raise UserError(f"{path}: none of its {len(inside)} runs is finished; a law needs finished runs")
        found += finished
    return found


def best_of_each(runs: Iterable[MeasuredRun]) -> list[MeasuredRun]:
    """Return the run with the least loss for each pair (parameters, tokens).

    A law should be fitted to well-tuned runs only.
    """
    best: dict[tuple[float, float], MeasuredRun] = {}
    for run in runs:
        key = run.parameters, run.tokens
        if key not in best or run.loss < best[key].loss:
            best[key] = run
    return [best[key] for key in sorted(best)]
