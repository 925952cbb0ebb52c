"""Effect of each emulated float8 recipe on training: final loss, gradient noise, and a layer with an outlier channel.

    python benchmarks/low_precision.py                                     after `make data`; days on two CPU cores
    python benchmarks/low_precision.py --small --compute float32            smaller models, four hours of one core
    python benchmarks/low_precision.py --only mxfp8 --models dense         a part

Makes whole runs of train.py, one after another, seed by seed. A finished run is a line of OUTPUT/low_precision-runs.jsonl
and is not repeated. All recipes of a seed share initial weights and batches, so losses are compared pairwise. The table has
the mean difference over seeds, and the half-width of its 95 % interval by Student's t. --compute is the format of
computations outside the float8 products. bfloat16, the format on a GPU, is slow on most CPUs. An emulation says nothing
about speed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import re
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # works from a clone, installed or not

import torch
from torch import Tensor, nn

from benchmarks.measure import environment, markdown, parser, publish
from benchmarks.recipes import train
from forge.config import load_config
from forge.data.build import build_dataset, input_fingerprints
from forge.parallel.float8.apply import choose_layers, convert
from forge.parallel.float8.formats import FORMATS
from forge.parallel.float8.torchao import convert_with_torchao
from forge.tools.verify.plain import plain_model
from forge.tools.verify.record import every_batch
from scripts.options import exit_code_of, positive

MODELS = {"dense": "debug.toml", "moe": "moe_debug.toml", "mla": "mla_debug.toml"}
# A smaller model whose projections still have whole blocks of 128.
SMALL = (
    "--model.dim=128",
    "--model.n_layers=2",
    "--model.n_heads=4",
    "--model.ffn_dim=384",
    "--train.seq_len=128",
    "--train.global_batch_size=8",
    "--train.micro_batch_size=8",
)
SMALL_OF = {
    "dense": ("--model.n_kv_heads=4",),
    "moe": ("--model.n_kv_heads=4", "--model.moe.expert_dim=128"),
    "mla": ("--model.moe.expert_dim=128",),
}
RECIPES = ("float32", "tensorwise", "rowwise", "blockwise", "mxfp8", "bfloat16")
# Quantiles of Student's t for a two-sided 95 % interval, by degrees of freedom.
STUDENT = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36, 8: 2.31, 9: 2.26}
Run = dict[str, Any]


def main(arguments: list[str] | None = None) -> int:
    """Measure, write the results and return the exit code."""
    given, overrides = _parser().parse_known_args(arguments)
    return exit_code_of(lambda: measure(given, overrides))


def measure(given: argparse.Namespace, overrides: list[str]) -> None:
    """Train the missing runs; measure gradients, and a layer with an outlier; print and write the tables."""
    about = environment(torch.device("cpu"))
    shared = {"steps": given.steps, "seeds": given.seeds, "small": given.small, "compute": given.compute}
    about["settings"] = {"device": "cpu", "overrides": overrides} | shared
    given.output.mkdir(parents=True, exist_ok=True)
    runs = _trained(given, overrides)
    noise = outliers(given.dim, given.tokens)
    gradients = {}
    if "float32" in given.only:
        gradients = {model: gradient_noise(model, given, overrides) for model in given.models}
    results = {"runs": runs, "gradients": gradients, "outlier": noise}
    tables = [
        _table(runs, given.compute),
        *([_noise_table(gradients)] if gradients else []),
        _outlier_table(noise),
    ]
    publish("low_precision", given.output, about, results, "\n\n".join(tables), timed=False)


def _trained(given: argparse.Namespace, overrides: list[str]) -> list[Run]:
    """Return the requested runs. Train runs that are missing in the file of runs, and append them to the file."""
    file: Path = given.output / "low_precision-runs.jsonl"
    done = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    found: list[Run] = []
    for seed in range(given.seeds):
        for model in given.models:
            for recipe in given.only:
                options = [
                    *(SMALL if given.small else ()),
                    *(SMALL_OF[model] if given.small else ()),
                    *overrides,
                ]
                options += [f"--run.seed={seed}", *_options(recipe, given.compute)]
                identity = {
                    "data": _fingerprints(MODELS[model], options),
                    "model": model,
                    "recipe": recipe,
                    "seed": seed,
                    "steps": given.steps,
                    "options": options,
                }
                old = next((run for run in done if run.items() >= identity.items()), None)
                if old is None:
                    trained = train(f"{model}, {recipe}, seed {seed}", MODELS[model], given.steps, options)
                    last = trained["losses"][-max(1, given.steps // 10) :]
                    old = identity | {"held_out": trained["held_out"], "last": sum(last) / len(last)}
                    with file.open("a") as stream:
                        stream.write(json.dumps(old) + "\n")
                found.append(old)
    return found


def _fingerprints(config: str, options: list[str]) -> Any:
    """Return the dataset fingerprints of a run with these options, with JSON's types, for comparison."""
    dataset = build_dataset(load_config(["--config", config, *options]))
    return json.loads(json.dumps(input_fingerprints(dataset, None)))


def _options(recipe: str, compute: str) -> list[str]:
    if recipe in ("float32", "bfloat16"):
        return [f"--precision.compute={recipe}"]
    return [f"--precision.compute={compute}", f"--precision.float8={recipe}"]


def gradient_noise(
    model: str, given: argparse.Namespace, overrides: list[str]
) -> dict[str, dict[str, float]]:
    """Return recipe -> parameter -> signal-to-noise ratio of the parameter's gradient, in dB.

    The gradients are of the first batch at the initial weights, in float32. Gradients without float8 are the reference.
    """
    shared = [*(SMALL + SMALL_OF[model] if given.small else ()), *overrides, "--precision.compute=float32"]
    gradients: dict[str, dict[str, Tensor]] = {}
    for recipe in given.only:
        if recipe == "bfloat16":
            continue
        blocks = [f"--precision.float8={recipe}"] if recipe in FORMATS else []
        config = load_config(["--config", MODELS[model], *shared, *blocks])
        net: Any = plain_model(config)
        net.reset_buffers(torch.float32)
        if recipe in ("tensorwise", "rowwise"):
            precision = config.precision.model_copy(update={"float8": recipe})
            chosen = choose_layers(net, precision)[0]
            convert_with_torchao(net, chosen, recipe, emulate=True, gather=False)
        with contextlib.closing(every_batch(config)) as every:
            batch = next(every)
        net.set_loss_scale(1 / (batch.labels >= 0).sum().clamp(min=1).double())
        net(batch.tokens, batch.labels, batch.positions, batch.documents)[0].backward()
        gradients[recipe] = {name: p.grad for name, p in net.named_parameters() if p.grad is not None}
    exact = gradients.pop("float32")
    return {
        recipe: {name: _decibel(exact[name].double(), grad) for name, grad in found.items()}
        for recipe, found in gradients.items()
    }


def _noise_table(found: dict[str, dict[str, dict[str, float]]]) -> str:
    """Return a table of `gradient_noise` by kind of parameter, each as a range over layers. found: by model."""
    rows = []
    for model, of in found.items():
        kinds = dict.fromkeys(re.sub(r"layers\.\d+\.", "", name) for one in of.values() for name in one)
        for kind in kinds:
            row = [model, kind]
            for one in of.values():
                own = [value for name, value in one.items() if re.sub(r"layers\.\d+\.", "", name) == kind]
                low, high = f"{min(own):.1f}", f"{max(own):.1f}"
                row.append(low if low == high else f"{low} to {high}")
            rows.append(row)
    recipes = list(next(iter(found.values())))
    return markdown(["model", "gradient, dB", *recipes], rows)


def outliers(dim: int, tokens: int) -> dict[str, dict[str, dict[str, float]]]:
    """Return recipe -> size of the outlier -> output or gradient -> signal-to-noise ratio in dB, for a linear layer.

    The outlier is one of the `dim` input features, multiplied by its size. The reference is float64. The outlier's weight
    column is zero. Otherwise the outlier's part of the output would hide the error.
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, tokens, dim, generator=generator)
    weight = torch.randn(dim, dim, generator=generator) / math.sqrt(dim)
    grad = torch.randn(1, tokens, dim, generator=generator)
    weight[:, 5] = 0.0
    found: dict[str, dict[str, dict[str, float]]] = {}
    for size in (1, 10, 100, 1000, 10000, 100000):
        planted = x.clone()
        planted[..., 5] *= size
        exact = _products(None, planted.double(), weight.double(), grad.double())
        for recipe in RECIPES:
            if recipe == "float32":
                continue
            mine = _products(recipe, planted.bfloat16(), weight.bfloat16(), grad.bfloat16())
            for one in (mine, exact):
                # The outlier's own large gradient would hide the error of the other columns.
                one["weight gradient"][:, 5] = 0.0
            ratios = {kind: _decibel(exact[kind], value) for kind, value in mine.items()}
            found.setdefault(recipe, {})[str(size)] = ratios
    return found


def _products(recipe: str | None, x: Tensor, weight: Tensor, grad: Tensor) -> dict[str, Tensor]:
    """Return the output, input gradient and weight gradient of a linear layer. recipe: a float8 recipe, or None."""
    dim = weight.shape[0]
    model = nn.Sequential(nn.Linear(dim, dim, bias=False)).to(x.dtype)
    with torch.no_grad():
        model[0].weight.copy_(weight)
    if recipe in FORMATS:
        convert(model, ["0"], {}, FORMATS[recipe], emulate=True)
    elif recipe in ("tensorwise", "rowwise"):
        convert_with_torchao(model, {"0": model[0]}, recipe, emulate=True, gather=False)
    x = x.detach().requires_grad_()
    y = model(x)
    y.backward(grad)
    assert x.grad is not None
    weight_grad = model[0].weight.grad
    return {"output": y.detach(), "input gradient": x.grad, "weight gradient": weight_grad}


def _decibel(exact: Tensor, mine: Tensor) -> float:
    error = (mine.double() - exact).square().sum().item()
    signal = exact.square().sum().item()
    if not math.isfinite(error):
        return -math.inf
    return 10 * math.log10(signal / error) if error else math.inf


def _table(runs: list[Run], base: str) -> str:
    models = list(dict.fromkeys(run["model"] for run in runs))
    recipes = list(dict.fromkeys(run["recipe"] for run in runs))
    of = {(run["model"], run["recipe"], run["seed"]): run for run in runs}
    rows = []
    for recipe in recipes:
        row = [recipe]
        for model in models:
            seeds = [seed for m, r, seed in of if (m, r) == (model, recipe) and (model, base, seed) in of]
            pairs = [of[model, recipe, s]["held_out"] - of[model, base, s]["held_out"] for s in seeds]
            losses = [of[key]["held_out"] for key in of if key[:2] == (model, recipe)]
            row.append(f"{statistics.mean(losses):.4f}")
            row.append(_interval(pairs))
        rows.append(row)
    head = ["recipe"]
    for model in models:
        head += [f"{model}: held-out loss", f"minus {base}"]
    return markdown(head, rows)


def _interval(pairs: list[float]) -> str:
    if len(pairs) < 2:
        return "".join(f"{one:+.4f}" for one in pairs)
    half = STUDENT[min(len(pairs) - 1, 9)] * statistics.stdev(pairs) / math.sqrt(len(pairs))
    return f"{statistics.mean(pairs):+.4f} ± {half:.4f}"


def _outlier_table(found: dict[str, dict[str, dict[str, float]]]) -> str:
    sizes = list(next(iter(found.values())))
    rows = [
        [recipe, kind, *(f"{of[size][kind]:.1f}" for size in sizes)]
        for recipe, of in found.items()
        for kind in ("output", "input gradient", "weight gradient")
    ]
    return markdown(
        ["recipe", "signal to noise, dB, outlier of", *(f"{int(size):,}" for size in sizes)], rows
    )


def _parser() -> argparse.ArgumentParser:
    made = parser(__doc__, tiny=False)
    add = made.add_argument
    add("--steps", type=positive, default=1000, metavar="N", help="steps of a run (%(default)s)")
    add("--seeds", type=positive, default=3, metavar="N", help="seeds (%(default)s)")
    add("--models", nargs="+", default=list(MODELS), choices=MODELS, metavar="NAME", help="models (all)")
    add("--only", nargs="+", default=list(RECIPES), choices=RECIPES, metavar="NAME", help="recipes (all)")
    add(
        "--compute",
        default="bfloat16",
        choices=("bfloat16", "float32"),
        help="format of the computations outside float8 (%(default)s)",
    )
    add("--small", action="store_true", help="two layers of width 128 on sequences of 128 tokens")
    add("--dim", type=positive, default=512, help="features of the layer with the outlier (%(default)s)")
    add("--tokens", type=positive, default=512, help="tokens of the layer with the outlier (%(default)s)")
    return made


if __name__ == "__main__":
    sys.exit(main())
