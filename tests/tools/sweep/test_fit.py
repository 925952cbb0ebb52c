"""scripts/fit.py on folders of finished runs prints planted laws as text and JSON. Bad input gets one sentence."""

from __future__ import annotations

import io
import json
import math
import re
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

from forge.config import load_config, to_toml
from forge.model import parameter_counts
from forge.parallel.build import build_meta_model
from forge.tools.sweep.law import Law
from scripts.fit import main
from tests.support.harness import run_ranks

LAW = Law(1.7, 60.0, 0.3, 90.0, 0.33)
WIDTHS, STEPS = (32, 64, 128), (100, 400, 1600)
BEST_LR = 4e-3


def plant(folder: Path, width: int, steps: int, lr: float) -> float:
    """Write a finished run with the law's loss, plus a penalty away from the best learning rate; return N."""
    path = folder / f"{width}-{steps}-{lr:g}"
    path.mkdir(parents=True)
    config = load_config(
        ["--config=debug", f"--model.dim={width}", f"--train.steps={steps}", f"--optimizer.lr={lr}"]
    )
    size = float(parameter_counts(build_meta_model(config)).active)
    tokens = steps * config.train.global_batch_size * config.train.seq_len
    loss = LAW.loss(size, tokens) + 0.1 * math.log(lr / BEST_LR) ** 2
    lines = [
        {"step": 1, "loss": 9.0, "tokens": 1},
        {"step": steps, "loss": loss + 0.2, "tokens": tokens},
        {"step": steps, "eval": {"python": loss}},
    ]
    (path / "config.toml").write_text(to_toml(config))
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (path / "status.json").write_text('{"state": "finished"}')
    return size


@pytest.fixture(scope="module")
def planted(tmp_path_factory) -> tuple[Path, list[float]]:
    folder = tmp_path_factory.mktemp("ladder")
    sizes = []
    for width in WIDTHS:
        for steps in STEPS:
            sizes = [
                *sizes,
                *(plant(folder, width, steps, lr) for lr in (0.6 * BEST_LR, 1.2 * BEST_LR, 2.4 * BEST_LR)),
            ]
    return folder, sorted(set(sizes))


@pytest.mark.long
def test_a_planted_law_and_learning_rate_are_found_from_run_directories(planted, capsys) -> None:
    folder, sizes = planted
    asked = ["--metric=eval.python", "--budget=1e17", "--predict", "1e8", "2e9", "--json", "--resamples=5"]
    assert main([str(folder), *asked]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["runs"], found["points"]) == (27, 9)
    for name, wanted in vars(LAW).items():
        assert found["law"][name] == pytest.approx(wanted, rel=0.05), name
    (best,), (predicted,) = found["budgets"], found["predictions"]
    assert 6 * best["parameters"] * best["tokens"] == pytest.approx(1e17)
    assert best["parameters"] == pytest.approx(LAW.optimum(1e17)[0], rel=0.1)
    assert (
        predicted["loss"] == pytest.approx(LAW.loss(1e8, 2e9), rel=0.01) and predicted["extrapolates"] > 100
    )
    optima = found["learning_rate"]["optima"]
    assert {row["parameters"] for row in optima} == set(sizes)
    # Between the tried rates, a fifth away from the nearest one.
    assert all(row["best"] == pytest.approx(BEST_LR, rel=0.02) for row in optima)


@pytest.mark.long
def test_the_text_has_law_budget_and_extrapolation(planted, capsys) -> None:
    folder, _ = planted
    assert (
        main(
            [str(folder), "--metric=eval.python", "--budget=1e17", "--predict", "2e5", "1e6", "--resamples=5"]
        )
        == 0
    )
    printed = capsys.readouterr().out
    assert re.search(r"^9 points of 27 runs; the law is off by 0\.\d+% at most$", printed, re.M)
    assert re.search(r"^budget 1e\+17: N = .+ times the FLOPs of the largest run$", printed, re.M)
    assert re.search(r"^N = 2e\+05, D = 1e\+06: loss .+, within the FLOPs of the runs$", printed, re.M)


@pytest.mark.long
def test_n_counts_embeddings_unless_it_is_told_not_to(planted, capsys) -> None:
    """debug's embedding and head are one matrix each. N counts the rest: the layers and the last norm."""
    folder, sizes = planted
    asked = [str(folder), "--metric=eval.python", "--resamples=2", "--json"]
    found = {}
    for option in ([], ["--without-embeddings"]):
        assert main([*asked, *option]) == 0
        found[bool(option)] = json.loads(capsys.readouterr().out)["learning_rate"]["optima"]
    model = load_config(["--config=debug"]).model
    ends = {width: width * model.vocab_size * (1 if model.tie_embeddings else 2) for width in WIDTHS}
    left = {size - ends[width] for size, width in zip(sizes, WIDTHS, strict=True)}
    assert {row["parameters"] for row in found[False]} == set(sizes)
    assert {row["parameters"] for row in found[True]} == left
    assert main([*asked[:3], "--without-embeddings"]) == 0
    assert ", N without embeddings" in capsys.readouterr().out


def test_a_folder_of_unfinished_runs_is_one_sentence(tmp_path, capsys) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "status.json").write_text('{"state": "running"}')
    assert main([str(tmp_path)]) == 2
    assert f"{tmp_path}: none of its 1 runs is finished" in capsys.readouterr().err


def test_a_runs_class_is_imported_only_with_trust(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "stranger_fit.py").write_text("raise ValueError('imported')\n")
    plant(tmp_path / "runs", 32, 100, 1e-3)
    (config,) = tmp_path.glob("runs/*/config.toml")
    config.write_text(config.read_text().replace('kind = "transformer"', 'kind = "stranger_fit:Own"'))
    assert main([str(tmp_path / "runs"), "--metric=eval.python"]) == 2
    printed = capsys.readouterr().err
    assert "--trust" in printed and "ValueError" not in printed
    assert main([str(tmp_path / "runs"), "--metric=eval.python", "--trust"]) == 2
    assert "stranger_fit cannot be imported: ValueError: imported" in capsys.readouterr().err


@pytest.mark.long
def _fit_without_matplotlib(rank: int, world: int, arguments: list[str]) -> tuple[int, str, str]:
    """Return exit code, stdout and stderr."""
    for name in [*sys.modules]:  # the fork server has loaded both
        if name.startswith(("matplotlib", "forge.tools.report")):
            del sys.modules[name]
    sys.modules["matplotlib"] = None
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = main(arguments)
    return code, out.getvalue(), err.getvalue()


def test_a_fit_ends_with_0_without_matplotlib(planted, tmp_path) -> None:
    folder, _ = planted
    arguments = [str(folder), "--metric=eval.python", "--resamples=2", "--output", str(tmp_path / "law.html")]
    ((code, out, err),) = run_ranks(_fit_without_matplotlib, 1, arguments)
    assert code == 0, err
    assert "9 points of 27 runs" in out and "no page: " in err


def test_a_folder_without_runs_and_an_unknown_metric_are_one_sentence(planted, tmp_path, capsys) -> None:
    folder, _ = planted
    for arguments, sentence in (
        ([str(tmp_path)], f"{tmp_path}: is neither a run directory nor a folder of run directories"),
        (
            [str(folder), "--metric=eval.prose"],
            "the metric eval.prose: is not measured. Known: loss, eval.python",
        ),
        (
            [str(path) for path in [*folder.glob("*-400-0.0048"), *folder.glob("64-100-0.0048")]],
            "at least five runs",
        ),
    ):
        assert main(arguments) == 2
        printed = capsys.readouterr().err
        assert sentence in printed and "Traceback" not in printed
