"""Training curves of forge, torchtitan and transformers: the same model, initial weights and tokens.

    make side-by-side                                                        installs the peers, and runs all
    python benchmarks/side_by_side.py --only transformers --models Llama     a part

Two models, a Llama and a Qwen3 mixture of experts, train on real text with one process and with two, in float32 or
--float64. forge trains with train.py. torchtitan's trainer, and a plain loop around transformers' model, start from
forge's exported initial weights and read the batches of forge's loader. Each package uses its own model, loss, clipping,
AdamW and sharding (FSDP2). torchtitan also uses its own schedule. Prints the differences and, on a machine without other
work, the tokens per second. Writes both, the curves and a drawing to benchmarks/results/. Other --section.key=value options
override the config.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, version
from itertools import accumulate, combinations, pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # works from a clone, installed or not

import torch

from benchmarks.measure import Spread, environment, is_busy, markdown, parser, publish
from benchmarks.peers.task import Curve, Task
from forge.config import Config, load_config
from forge.data.build import build_dataset
from forge.data.loader import Loader
from forge.model import IGNORE
from forge.optim.schedule import decay_start, learning_rate, warmup_steps
from forge.parallel.precision import DTYPES
from forge.runtime.errors import FAILED, UserError
from forge.tools.hf.model_config import choose_architecture, write_model
from forge.tools.hf.safetensors import Planned, write_tensors
from forge.tools.hf.tensors import their_tensors, weights_of
from forge.tools.verify.plain import plain_model
from scripts.images import stacked
from scripts.options import exit_code_of, positive

ROOT = Path(__file__).resolve().parent.parent
# Package -> module of benchmarks/peers.
PEERS = {"torchtitan": "torchtitan_trainer", "transformers": "transformers_loop"}
# All parameters decay, as in torchtitan and the plain loop. At 3e-3, the learning rate of debug.toml, rounding errors would
# grow to 0.05 nats, also between one and two processes of one package.
SHARED = (
    "--model.dim=64",
    "--model.n_layers=4",
    "--model.n_heads=4",
    "--model.n_kv_heads=2",
    "--model.ffn_dim=176",
    "--train.seq_len=64",
    "--train.global_batch_size=8",
    "--optimizer.lr=5e-4",
    "--optimizer.no_decay=[]",
    "--schedule.name=wsd",
    "--schedule.decay_fraction=0.5",
    "--schedule.decay_shape=cosine",
    "--evaluate.interval=0",
    "--evaluate.sample_interval=0",
    "--checkpoint.interval=0",
    "--metrics.log_interval=1",
    "--metrics.tensorboard=false",
)
MODELS: dict[str, tuple[str, ...]] = {
    "Llama": (),
    "Qwen3-MoE": (
        "--model.qk_norm=true",
        "--model.moe.n_experts=8",
        "--model.moe.top_k=2",
        "--model.moe.expert_dim=64",
        "--model.moe.balance=none",
    ),
}
TINY = ("--model.dim=32", "--model.n_layers=2", "--model.ffn_dim=64", "--train.seq_len=32")
# A line of an exception, or an error line of forge, in torchrun's output.
ERROR = re.compile(r"(\[rank\d+\]: )?([\w.]+Error|forge): ")
# torchtitan's experts use torch._grouped_mm, which does not support float64.
NO_FLOAT64 = ("Qwen3-MoE", "torchtitan")
FLOAT64 = ("--precision.storage=float64", "--precision.compute=float64", "--precision.reduce=float64")
# Steps that are timed together.
TURN = 20
Curves = dict[str, Curve]


def main(arguments: list[str] | None = None) -> int:
    """Measure, write the results and return the exit code."""
    given, overrides = _parser().parse_known_args(arguments)
    return exit_code_of(lambda: compare(given, overrides))


def compare(given: argparse.Namespace, overrides: list[str]) -> None:
    """Train with all packages; print and write the table; draw the curves."""
    versions = {peer: _version(peer) for peer in given.only}
    about = environment(torch.device("cpu"))
    about["versions"] |= versions
    about["settings"] = {
        "device": "cpu",
        "steps": given.steps,
        "processes": given.worlds,
        "overrides": overrides,
    }
    about["settings"]["precision"] = "float64" if given.float64 else "float32"
    curves: dict[str, Curves] = {}
    rates: dict[str, dict[str, Spread]] = {}
    for model in given.models:
        options = [
            *options_of(model, given.steps),
            *(TINY if given.tiny else ()),
            *(FLOAT64 if given.float64 else ()),
            *overrides,
        ]
        with tempfile.TemporaryDirectory() as folder:
            task = write_task(load_config(["--config", given.config, *options]), Path(folder))
            curves[model] = {}
            for world in given.worlds:
                for name in ("forge", *given.only):
                    if given.float64 and (model, name) == NO_FLOAT64:
                        print(f"{model}: {name} is left out: no grouped product in float64", file=sys.stderr)
                        continue
                    print(f"{model}: {name} on {world}", file=sys.stderr)
                    curve = (
                        train(task, given.config, options, world)
                        if name == "forge"
                        else ask(name, task, world)
                    )
                    curves[model][f"{name}, {world}"] = curve
            rates[model] = speeds(curves[model], task.tokens[0].numel())
    title = "-".join(["side_by_side", *(given.models if len(given.models) < len(MODELS) else [])])
    title += "-float64" if given.float64 else ""
    results: dict[str, Any] = {"losses": _losses(curves)}
    shown = table(curves)
    if is_busy(about):
        print("not shown: tokens per second, because other programs use this machine", file=sys.stderr)
    elif any(rates.values()):
        results["tokens_per_second"] = {
            model: {name: vars(rate) for name, rate in found.items()} for model, found in rates.items()
        }
        rows = [[model, name, rate.show(0)] for model, found in rates.items() for name, rate in found.items()]
        shown += "\n\n" + markdown(["model", "processes", "tokens/s"], rows)
    publish(title, given.output, about, results, shown, timed=False)
    _draw(curves, given.output / f"{about['date']}-cpu-{title}.svg")


def options_of(model: str, steps: int) -> list[str]:
    """Return the config overrides for a model of MODELS."""
    return [*SHARED, *MODELS[model], f"--train.steps={steps}", f"--schedule.warmup_steps={steps // 15}"]


def write_task(config: Config, folder: Path) -> Task:
    """Write train.py's initial weights and batches for this config into `folder`, as a task."""
    steps, schedule, optimizer = config.train.steps, config.schedule, config.optimizer
    loader = Loader(
        build_dataset(config),
        global_batch_size=config.train.global_batch_size,
        rank=0,
        ranks=1,
        device=torch.device("cpu"),
    )
    batches = [next(loader) for _ in range(steps)]
    loader.close()
    task = Task(
        folder=folder,
        tokens=torch.stack([batch.tokens for batch in batches]),
        labels=torch.stack([batch.labels for batch in batches]),
        rates=[
            learning_rate(schedule, lr=optimizer.lr, step=step, steps=steps) for step in range(1, steps + 1)
        ],
        lr=optimizer.lr,
        warmup=warmup_steps(schedule, steps),
        decay=steps - decay_start(schedule, steps),
        min_lr_ratio=schedule.min_lr_ratio,
        betas=list(optimizer.betas),
        eps=optimizer.eps,
        weight_decay=optimizer.weight_decay,
        max_norm=config.train.grad_clip_norm,
        dtype=config.precision.storage,
    )
    assert (task.labels != IGNORE).all(), "the peers do not mask documents"
    task.save()
    _export(config, task.weights)
    return task


def _export(config: Config, folder: Path) -> None:
    """Write forge's initial weights to `folder` in Hugging Face's format."""
    folder.mkdir()
    architecture = choose_architecture(config.model)
    keys = write_model(config.model, architecture, config.train.seq_len)
    (folder / "config.json").write_text(json.dumps(keys))
    weights = [weight for weight in weights_of(config.model, architecture) if weight.theirs]
    ours = plain_model(config).state_dict()
    dtype = DTYPES[config.precision.storage]
    planned = [Planned(name, dtype, weight.their_shape) for weight in weights for name in weight.theirs]
    list(write_tensors(folder, planned, their_tensors(weights, lambda weight: ours[weight.ours]), 2**40))


def train(task: Task, config: str, options: list[str], world: int) -> Curve:
    """Train with train.py on `world` processes; return the curve."""
    own = [f"--run.output_dir={task.folder}", f"--run.name=forge-{world}"]
    own += [f"--train.micro_batch_size={task.tokens.shape[1] // world}"]
    _run("forge", world, ROOT / "train.py", "--config", config, *options, *own)
    file = task.folder / f"forge-{world}" / "metrics.jsonl"
    lines = [line for line in map(json.loads, file.read_text().splitlines()) if "loss" in line]
    losses, norms, rates = ([line[key] for line in lines] for key in ("loss", "grad_norm", "lr"))
    seconds = (task.tokens[0].numel() / line["tokens_per_second"] for line in lines)
    return Curve(losses, norms, rates, list(accumulate(seconds)))


def ask(peer: str, task: Task, world: int) -> Curve:
    """Train with another package on `world` processes; return the curve."""
    _run(peer, world, "-m", "benchmarks.peers", PEERS[peer], task.folder.absolute(), cwd=ROOT)
    return Curve.load(task.folder)


def _run(name: str, world: int, *command: str | Path, cwd: Path | None = None) -> None:
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"]
    whole = [sys.executable, *torchrun, *map(str, command)]
    done = subprocess.run(whole, capture_output=True, text=True, cwd=cwd)
    if done.returncode:
        said = (done.stdout + done.stderr).splitlines()
        reason = next(filter(ERROR.match, said), "\n".join(said[-5:]))
        raise UserError(f"{name} on {world} processes ended with {done.returncode}: {reason}", FAILED)


def table(curves: dict[str, Curves]) -> str:
    """Return a table of differences between packages at one number of processes, and between one and two processes."""
    rows = []
    for model, found in curves.items():
        for one, other in combinations(found, 2):
            same_package, same_world = (
                a == b for a, b in zip(one.split(", "), other.split(", "), strict=True)
            )
            if same_package or same_world:
                rows.append([model, one, other, *_differences(found[one], found[other])])
    head = ["model", "processes", "and", "loss, step 1", "loss, largest", "at step", "loss, mean", "last"]
    return markdown([*head, "gradient norm, largest, relative", "learning rate, largest"], rows)


def speeds(curves: Curves, step_tokens: int) -> dict[str, Spread]:
    """Return the tokens per second of each curve, as a Spread over turns of TURN steps. The first turn does not count.

    A curve of fewer than two turns is left out.
    """
    found = {}
    for name, curve in curves.items():
        turns = list(pairwise(curve.ended[TURN - 1 :: TURN]))
        if turns:
            found[name] = Spread.of([TURN * step_tokens / (end - begin) for begin, end in turns])
    return found


def _differences(one: Curve, other: Curve) -> list[str]:
    losses = [abs(a - b) for a, b in zip(one.losses, other.losses, strict=True)]
    norms = [abs(a / b - 1) for a, b in zip(one.norms, other.norms, strict=True)]
    rates = [abs(a - b) for a, b in zip(one.rates, other.rates, strict=True)]
    largest = max(losses)
    shown = [f"{losses[0]:.1e}", f"{largest:.1e}", str(losses.index(largest) + 1)]
    return [*shown, *(f"{value:.1e}" for value in (fmean(losses), losses[-1], max(norms), max(rates)))]


def _losses(curves: dict[str, Curves]) -> dict[str, dict[str, list[float]]]:
    return {
        model: {name: [float(f"{loss:.10g}") for loss in curve.losses] for name, curve in found.items()}
        for model, found in curves.items()
    }


def _draw(curves: dict[str, Curves], file: Path) -> None:
    """Draw the losses of each model, and below them the differences from the first curve, on a logarithmic scale."""
    from forge.tools.report.draw import Curve as Line  # needs matplotlib
    from forge.tools.report.draw import curves as draw

    drawings = []
    for model, found in curves.items():
        base, *others = found
        steps = [float(step) for step in range(1, len(found[base].losses) + 1)]
        packages = list(dict.fromkeys(name.split(", ")[0] for name in found))
        losses, differences = list[Line](), list[Line]()
        for number, (name, curve) in enumerate(found.items()):
            color, run = packages.index(name.split(", ")[0]), number // len(packages)
            losses.append(Line(name, (steps, curve.losses), color, run))
            apart = [
                abs(a - b) or float("nan") for a, b in zip(curve.losses, found[base].losses, strict=True)
            ]
            if name != base:
                differences.append(Line(name, (steps, apart), color, run))
        size = (7.2, 3.0)
        drawings.append(draw(f"loss {model}", losses, f"{model}: nats per token", size=size))
        unit = f"difference from {base}"
        drawings.append(draw(f"apart {model}", differences, unit, size=size, log=True))
    file.write_text(stacked(drawings))


def _version(peer: str) -> str:
    """Return the installed version of a package. Raises UserError (exit 1) if the package is missing."""
    try:
        return version(peer)
    except PackageNotFoundError:
        remedy = "`make side-by-side` installs it into an environment of its own; --only leaves it out"
        raise UserError(f"{peer} is not installed: {remedy}", FAILED) from None


def _parser() -> argparse.ArgumentParser:
    made = parser(__doc__, config="config with the data and all other keys, except the model's shape")
    add = made.add_argument
    add("--steps", type=positive, default=300, metavar="N", help="optimizer steps of a run (%(default)s)")
    add("--worlds", type=positive, nargs="+", default=[1, 2], metavar="N", help="processes of a run (1 2)")
    add("--models", nargs="+", default=list(MODELS), choices=MODELS, metavar="NAME", help="models (all)")
    add("--only", nargs="+", default=list(PEERS), choices=PEERS, metavar="NAME", help="peers of forge (all)")
    add("--float64", action="store_true", help="compute in float64 instead of float32")
    return made


if __name__ == "__main__":
    sys.exit(main())
